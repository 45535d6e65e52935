"""Look at pages of the site in a browser without a window: what a script finds on a page, and pictures.

    python tools/browse.py docs/tiles.html ...     height, faults and errors of pages, wide and on a phone
"""
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDE, PHONE = 1280, 390
PROBE = """<script>
const errors = [];
addEventListener("error", event => errors.push(String(event.message || event.target?.src || event.target?.href)), true);
addEventListener("load", () => setTimeout(async () => {
  let found;
  try { found = await (async () => { %s })(); } catch (error) { found = {failed: String(error)}; }
  const said = document.createElement("script");
  said.type = "text/found";
  said.textContent = JSON.stringify({found, errors});
  document.head.append(said);
}, 300));
</script>"""
LAYOUT = """
  const main = document.querySelector("main"), library = document.getElementById("in-the-library");
  const width = document.documentElement.clientWidth, beyond = [];
  for (const element of document.querySelectorAll("main *")) {
    if (element.closest("pre, .sd-table, svg, table, details:not([open]), math")) continue;
    if (element.getBoundingClientRect().right > width + 1) beyond.push(element.tagName + " " + element.textContent.trim().slice(0, 40));
  }
  return {height: Math.round((library || main).getBoundingClientRect()[library ? "top" : "bottom"] - main.getBoundingClientRect().top),
          scrolls: document.documentElement.scrollWidth > width, beyond: beyond.slice(0, 5)};
"""


def answers(path: str) -> bool:
    "Does this browser show a page here?"
    try:
        done = subprocess.run([path, *QUIET, "--dump-dom", "data:text/html,<p>here</p>"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "<p>here</p>" in done.stdout


@cache
def browser() -> str | None:
    "The browser at hand, if there is one that works"
    return next(filter(answers, filter(None, map(shutil.which, BROWSERS))), None)


def options(width: int, height: int = 1000) -> list[str]:
    "How the browser is started: reproducible, without a window"
    return [browser(), *QUIET, f"--window-size={width},{height}", "--virtual-time-budget=20000"]


def evaluate(page: Path, script: str, width: int = WIDE) -> dict[str, Any]:
    "What a script returns on a page, as `found`, and the errors that the page raised"
    with tempfile.NamedTemporaryFile("w", suffix=".html", encoding="utf-8") as copy:
        text, home = page.read_text(encoding="utf-8"), f'<base href="file://{page.resolve().parent}/">'
        copy.write(text.replace("<head>", "<head>" + home + PROBE % script, 1))
        copy.flush()
        done = subprocess.run([*options(width), "--dump-dom", f"file://{copy.name}"], capture_output=True, text=True, timeout=120)
    answer = re.search(r'<script type="text/found">(.*?)</script>', done.stdout, re.DOTALL)
    if not answer:
        raise RuntimeError(f"{page}: expected an answer from the browser, got {done.stderr[-500:]}")
    return json.loads(html.unescape(answer[1]))


def screenshot(page: Path, picture: Path, width: int = WIDE, height: int = 2000) -> None:
    "A picture of the top of a page"
    subprocess.run([*options(width, height), f"--screenshot={picture}", f"file://{page.resolve()}"], check=True, capture_output=True, timeout=120)


def inspected(page: Path, width: int) -> tuple[int | None, list[str]]:
    "The height of a page's lesson, and what is wrong with its layout at a width"
    seen = evaluate(page, LAYOUT, width)
    layout = seen["found"]
    if "failed" in layout:
        return None, [f"{page.name} at {width}: {layout['failed']}"]
    found = [f"error {error}" for error in seen["errors"]] + [f"beyond the edge: {text}" for text in layout["beyond"]]
    return layout["height"], [f"{page.name} at {width}: {what}" for what in found + ["the page scrolls sideways"] * layout["scrolls"]]


def complaints(page: Path, width: int) -> list[str]:
    "What is wrong with a page's layout at a width"
    return inspected(page, width)[1]


def main(names: list[str]) -> int:
    "Print height and complaints of pages; 1 if there are complaints"
    found = []
    for path in map(Path, names):
        height, wide = inspected(path, WIDE)
        print(f"{height:7} px  {path.name}" if height else f"      ? px  {path.name}")
        found += wide + complaints(path, PHONE)
    print("\n".join(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
