"""Each kind of fault, planted in a small package, is found; a sound one has none."""
import json

import check_house
import pytest
from check_house import House, faults
from helpers import need_fonts

SOUND = {
    "__init__": "from fusedloss import second\nfrom fusedloss.losses import loss\n__all__ = ['loss', 'second']",
    "core.__init__": "",
    "core.words": "WORDS = 'a', 'b'\n__all__ = ['WORDS']",
    "core.rates": "from .words import WORDS\ndef rate(): return WORDS",
    "first": "from fusedloss.core.words import WORDS\nfrom fusedloss.core import rates\ndef one(): return 1\n_HIDDEN = 2\n__all__ = ['one']",
    "second": "from fusedloss.first import one\ndef two(): return one() + 1",
    "losses": "from fusedloss import second\ndef loss():\n    from fusedloss.sharded import spread\n    return second.two()",
    "sharded": "from fusedloss.first import one\ndef spread(): return one()",
    "integrations.__init__": "",
    "integrations.trainer": "from ..losses import loss\ndef adapted(): return loss()",
}
PAGES = {"01_first": "first", "02_second": "second", "03_losses": "losses", "04_sharded": "sharded"}


@pytest.fixture
def found(tmp_path):
    "The faults of the sound package with some of its modules replaced, or with lines after them"
    def write(**changed: str) -> list[str]:
        changed = {name.replace("__", ".", 1) if name.startswith("core") else name: text for name, text in changed.items()}
        for name, text in (SOUND | {name: f"{SOUND.get(name, '')}\n{text}" for name, text in changed.items()}).items():
            path = tmp_path / "fusedloss" / f"{name.replace('.', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        for name, module in PAGES.items():
            path = tmp_path / "nbs" / f"{name}.ipynb"
            path.parent.mkdir(parents=True, exist_ok=True)
            cells = [{"cell_type": "markdown", "source": "# Title"}, {"cell_type": "code", "source": f"#| default_exp {module}"}]
            path.write_text(json.dumps({"cells": cells}), encoding="utf-8")
        return faults(tmp_path)
    return write


def test_a_sound_package_has_no_fault(found, tmp_path):
    assert found() == [] and House(tmp_path).stages == {"first": 1, "second": 2, "losses": 3, "sharded": 4}
    assert check_house.main([str(tmp_path)]) == 0


def test_a_fault_is_printed_and_fails(found, tmp_path, capsys):
    found(second="from .first import _HIDDEN")
    assert check_house.main([str(tmp_path)]) == 1 and capsys.readouterr().out == "second takes the private name _HIDDEN of first\n"


@pytest.mark.parametrize("line", ("from fusedloss.second import two", "from fusedloss import second", "from . import second", "from .second import two",
                                  "def lazy():\n    from .second import two"))
def test_a_stage_that_imports_a_later_one(found, line):
    assert found(first=line) == ["first imports the later stage second", "circle of imports: first → second → first"]


@pytest.mark.parametrize("line", ("from fusedloss.first import one", "from ..first import one", "from .. import first"))
def test_core_that_imports_a_stage(found, line):
    "Which makes a circle where that stage imports this module"
    assert found(core__rates=line)[0] == "core.rates imports the stage first"
    assert found(core__words="", core__more=line) == ["core.more imports the stage first"]


@pytest.mark.parametrize("line, door", (("from .losses import loss", "losses"), ("from fusedloss.integrations import trainer", "integrations.trainer"),
                                        ("import fusedloss as fl", "fusedloss"), ("import fusedloss.losses", "fusedloss"), ("from fusedloss import loss", "fusedloss")))
def test_a_stage_that_imports_a_door(found, line, door):
    assert [fault for fault in found(second=line) if "circle" not in fault] == [f"second imports the door {door}"]


def test_core_that_imports_a_door(found):
    assert found(core__words="def lazy():\n    from fusedloss.sharded import spread")[0] == "core.words imports the door sharded"


@pytest.mark.parametrize("line", ("import workbook", "import workbook.pages as pages", "from workbook import pages", "def lazy():\n    from workbook.pages import show"))
@pytest.mark.parametrize("module", ("core__words", "first", "losses", "integrations.trainer"))
def test_the_workbook_is_not_imported(found, module, line):
    fault, = found(**{module: line})
    assert fault.startswith(f"{module.replace('__', '.')} imports workbook") and fault.endswith("which no wheel holds")


def test_a_module_whose_name_begins_alike_is_another(found):
    assert found(first="import workbooks") == []


def test_a_circle_is_found_among_doors_and_in_core(found):
    assert found(sharded="from fusedloss.losses import loss") == ["circle of imports: losses → sharded → losses"]
    assert found(sharded="", core__words="from fusedloss.core.rates import rate") == ["circle of imports: core.rates → core.words → core.rates"]


def test_a_private_name_that_another_module_takes(found):
    assert found(second="from .first import _HIDDEN as known") == ["second takes the private name _HIDDEN of first"]


def test_the_picture_has_every_module_and_the_imports_between_stages(found, tmp_path):
    need_fonts("DejaVuSans")
    from draw_house import picture
    assert found(sharded="", first="from fusedloss.second import two") != []
    drawn = picture(House(tmp_path))
    assert all(f">{text}</text>" in drawn.svg for text in ("1 · first", "2 · second", "rates   words", "fusedloss   integrations   integrations.trainer   losses   sharded"))
    assert "staircase from first to second" in drawn.alt and "imports: second imports first. On top the doors: fusedloss, " in drawn.alt
