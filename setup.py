"""Packaging: every value comes from settings.ini."""
import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).parent
SPDX = {"apache2": "Apache-2.0"}
LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?![a-z]+:|#)")  # in Markdown, to a file; of a picture it begins with !
STATUS = {"3": "3 - Alpha", "4": "4 - Beta", "5": "5 - Production/Stable"}


def read_settings() -> dict:
    "The `[DEFAULT]` section of settings.ini"
    config = ConfigParser(delimiters="=")
    config.read(ROOT / "settings.ini", encoding="utf-8")
    return dict(config["DEFAULT"])


def long_description(readme: str, cfg: dict) -> str:
    "README.md, whose links to files lead to the repository at the version's tag, or at its branch before there is one"
    files = f"{cfg['git_url']}/%s/{cfg['branch'] if '.dev' in cfg['version'] else 'v' + cfg['version']}/"
    return LINK.sub(lambda found: found[1] + found[2] + files % ("raw" if found[1] else "blob"), readme)


class BuildModules(build_py):
    "All modules but nbdev's index of what the notebooks export"

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        return [module for module in super().find_package_modules(package, package_dir) if module[1] != "_modidx"]


class EditableWheel(editable_wheel):
    "An editable install, which finds the workbook beside the package too"

    def run(self) -> None:
        self.distribution.packages += find_packages(include=["workbook*"])
        super().run()


cfg = read_settings()
extras = {key.removesuffix("_requirements"): value.split() for key, value in cfg.items() if key.endswith("_requirements")}

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=long_description((ROOT / "README.md").read_text(encoding="utf-8"), cfg),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    project_urls={"Documentation": cfg["doc_host"] + cfg["doc_baseurl"], "Changelog": f"{cfg['git_url']}/blob/{cfg['branch']}/CHANGELOG.md"},
    keywords=cfg["keywords"],
    classifiers=[f"Development Status :: {STATUS[cfg['status']]}", "Typing :: Typed",
                 *(f"Programming Language :: Python :: {version}" for version in cfg["python_versions"].split())],
    license=SPDX[cfg["license"]],
    license_files=["LICENSE"],
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require=extras,
    packages=[*find_packages(include=[f"{cfg['lib_path']}*"]), f"{cfg['lib_path']}.cuda"],
    package_dir={cfg["lib_path"]: cfg["lib_path"], f"{cfg['lib_path']}.cuda": "cuda"},
    package_data={"": ["py.typed", "*.pyi"], f"{cfg['lib_path']}.cuda": ["*.cu", "*.cuh"]},
    cmdclass={"build_py": BuildModules, "editable_wheel": EditableWheel},
    zip_safe=False,
)
