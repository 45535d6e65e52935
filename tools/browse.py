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
  parent.postMessage(JSON.stringify({found, errors}), "*");
}, 300));
</script>"""
FRAME = """<!doctype html><style>body { margin: 0 } iframe { border: 0; height: 1000px; width: %dpx }</style><iframe></iframe><script>
const answers = [], frame = document.querySelector("iframe"), pages = %s;
let waiting;
const next = answer => {
  clearTimeout(waiting);
  answers.push(answer);
  if (answers.length <= pages.length) {
    waiting = setTimeout(next, 15000, {found: {failed: "no answer"}, errors: []});
    frame.src = pages[answers.length - 1];
    return;
  }
  const said = document.createElement("script");
  said.type = "text/found";
  said.textContent = JSON.stringify(answers.slice(1));
  document.head.append(said);
};
addEventListener("message", event => next(JSON.parse(event.data)));
next(null);
</script>"""  # a window is never narrower than 500 px, a frame is
LAYOUT = """
  const main = document.querySelector("main"), library = document.getElementById("in-the-library");
  const width = document.documentElement.clientWidth, beyond = [];
  for (const element of document.querySelectorAll("main *")) {
    if (element.closest("pre, .sd-table, svg, table, details:not([open]), math")) continue;
    if (element.getBoundingClientRect().right > width + 1) beyond.push(element.tagName + " " + element.textContent.trim().slice(0, 40));
  }
  const letters = [];
  for (const svg of document.querySelectorAll("main svg")) {
    const column = main.getBoundingClientRect(), box = svg.getBoundingClientRect(), labels = [];
    const left = Math.min(box.left, column.left), right = Math.max(box.right, column.right);
    for (const label of svg.querySelectorAll("text")) {
      const said = label.textContent.trim(), at = label.getBoundingClientRect(), scale = label.getScreenCTM();
      if (!said || !at.width || getComputedStyle(label).visibility === "hidden") continue;
      if (at.left < left - 2 || at.right > right + 2 || at.top < box.top - 2 || at.bottom > box.bottom + 2) letters.push(`clipped: ${said}`);
      if (!scale.b) labels.push([said, at]);  // slanted letters need less than their box
    }
    labels.forEach(([said, at], number) => labels.slice(number + 1).forEach(([other, there]) => {
      const wide = Math.min(at.right, there.right) - Math.max(at.left, there.left), high = Math.min(at.bottom, there.bottom) - Math.max(at.top, there.top);
      if (wide > 2 && high > 0.3 * Math.min(at.height, there.height)) letters.push(`collide: ${said} | ${other}`);
    }));
  }
  return {letters: letters.slice(0, 3), height: Math.round((library || main).getBoundingClientRect()[library ? "top" : "bottom"] - main.getBoundingClientRect().top),
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


def options(width: int, height: int = 1000, seconds: int = 20, dark: bool = False) -> list[str]:
    "How the browser is started: reproducible, without a window"
    scheme = ["--blink-settings=preferredColorScheme=0"] * dark
    return [browser(), *QUIET, *scheme, f"--window-size={width},{height}", f"--virtual-time-budget={1000 * seconds}"]


def evaluate_all(pages: list[Path], script: str, width: int = WIDE, dark: bool = False) -> list[dict[str, Any]]:
    "For each page what a script returns on it, as `found`, and the errors that the page raised; one browser reads them all"
    with tempfile.TemporaryDirectory() as folder:
        copies = [Path(folder) / f"{number}.html" for number in range(len(pages))]
        for page, copy in zip(pages, copies):
            home = f'<head><base href="file://{page.resolve().parent}/">'
            copy.write_text(page.read_text(encoding="utf-8").replace("<head>", home + PROBE % script, 1), encoding="utf-8")
        frame = Path(folder) / "frame.html"
        frame.write_text(FRAME % (width, json.dumps([copy.name for copy in copies])), encoding="utf-8")
        command = [*options(max(width, WIDE), seconds=20 * len(pages), dark=dark), "--dump-dom", f"file://{frame}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 15 * len(pages))
    answer = re.search(r'<script type="text/found">(.*?)</script>', done.stdout, re.DOTALL)
    if not answer:
        raise RuntimeError(f"{pages[0]} and others: expected an answer from the browser, got {done.stderr[-500:]}")
    return json.loads(html.unescape(answer[1]))


def evaluate(page: Path, script: str, width: int = WIDE) -> dict[str, Any]:
    "What a script returns on a page, as `found`, and the errors that the page raised"
    return evaluate_all([page], script, width)[0]


def screenshot(page: Path, picture: Path, width: int = WIDE, height: int = 2000) -> None:
    "A picture of the top of a page"
    subprocess.run([*options(width, height), f"--screenshot={picture}", f"file://{page.resolve()}"], check=True, capture_output=True, timeout=120)


def faults(page: Path, seen: dict[str, Any], width: int) -> list[str]:
    "What is wrong with the layout of a page at a width, from what LAYOUT saw"
    layout = seen["found"]
    if "failed" in layout:
        return [f"{page.name} at {width}: {layout['failed']}"]
    found = [f"error {error}" for error in seen["errors"]] + [f"beyond the edge: {text}" for text in layout["beyond"]]
    return [f"{page.name} at {width}: {what}" for what in found + ["the page scrolls sideways"] * layout["scrolls"] + layout["letters"]]


def complaints(page: Path, width: int) -> list[str]:
    "What is wrong with a page's layout at a width"
    return faults(page, evaluate(page, LAYOUT, width), width)


def main(names: list[str]) -> int:
    "Print height and complaints of pages; 1 if there are complaints"
    pages, found = list(map(Path, names)), []
    for width in (WIDE, PHONE):
        for page, seen in zip(pages, evaluate_all(pages, LAYOUT, width)):
            print(f"{seen['found'].get('height', '?'):>7} px at {width:4}  {page.name}")
            found += faults(page, seen, width)
    print("\n".join(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
