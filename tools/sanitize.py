"""Every kernel under compute-sanitizer: fails for a report that `sanitize_expected.txt` does not list, and for a listed one that does not appear.

`python tools/sanitize.py [TOOL ...]` runs memcheck, synccheck and racecheck, or the tools named (initcheck too); `--accept` writes the list anew.
"""
import re
import subprocess
import sys
from pathlib import Path
from typing import Iterable, Iterator

HERE = Path(__file__).resolve().parent
EXPECTED = HERE / "sanitize_expected.txt"
TOOLS = "memcheck", "synccheck", "racecheck"
PREFIX = "========="
NO_REPORT = re.compile(r"COMPUTE-SANITIZER|\w+ SUMMARY:|Target application")
LIBRARY = re.compile(r"\bat (nvjet|cutlass|cublas|void (at|cub|thrust)::)")  # kernels that PyTorch brings, beside ours
PLACE = re.compile(r"(?P<function>[\w$:<>, ()*&~]+?)\+0x[0-9a-f]+(?: in (?P<file>.*?):(?P<line>\d+))?")


def reports(output: str) -> Iterator[list[str]]:
    "The lines of each report in what compute-sanitizer printed, without its prefix"
    report: list[str] = []
    for line in output.splitlines():
        if not line.startswith(PREFIX):
            continue
        text = line.removeprefix(PREFIX)
        if text.startswith("     ") and report:
            report.append(text.strip())
            continue
        if report:
            yield report
        report = [text.strip()] if text.strip() and not NO_REPORT.search(text) else []
    if report:
        yield report


def placed(text: str, source: list[str]) -> str:
    "A line of a report without offsets and counts; a line of a CUDA source is quoted, as its number moves with every edit"
    def place(match: re.Match) -> str:
        name, file, number = match["function"].strip(), match["file"] or "", int(match["line"] or 0)
        if not number or file.endswith(".py"):
            return name
        return f"{name} [{source[number - 1].strip() if number <= len(source) else number}]"
    text = re.sub(r"\s*\[\d+ hazards?\]", "", PLACE.sub(place, text))
    return re.sub(r"\s+", " ", re.sub(r"0x[0-9a-f]+", "0x", text)).strip()


def in_words(tool: str, report: list[str], source: list[str]) -> str:
    "A report in one line: what it says, and where; not which thread or address"
    where = [line for line in report[1:] if re.match(r"(at|and) ", line)]
    what = placed(report[0], source)
    return " ".join([f"{tool}:", re.sub(r"^Error: ", "", what), *(placed(line, source) for line in where[:1])])


def found(tool: str, output: str, source: list[str]) -> set[str]:
    "All that a tool reports of our kernels, each once"
    return {in_words(tool, report, source) for report in reports(output) if not any(map(LIBRARY.search, report))}


def expected(tools: Iterable[str]) -> set[str]:
    "The listed reports of these tools"
    lines = EXPECTED.read_text(encoding="utf-8").splitlines()
    return {line for line in lines if line.partition(":")[0] in set(tools)}


def run(tool: str) -> tuple[int, str]:
    "Status and output of every kernel under one tool"
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "100000", sys.executable, str(HERE / "kernels_once.py"), "--lines"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def disagreements(seen: set[str], listed: set[str]) -> list[str]:
    "What is wrong, in lines"
    return [f"unexpected: {line}" for line in sorted(seen - listed)] + [f"expected, and not reported: {line}" for line in sorted(listed - seen)]


def main(arguments: list[str]) -> int:
    "0 where every tool says what is listed"
    from fusedloss.core.cuda import cuda_source
    tools = [a for a in arguments if a != "--accept"] or list(TOOLS)
    source, seen, failed = (cuda_source("ctc") + cuda_source("linear_ctc")).splitlines(), set(), 0
    for tool in tools:
        status, output = run(tool)
        of_tool = found(tool, output, source)
        seen |= of_tool
        print(f"{tool}: {sum(1 for _ in reports(output))} reports, {len(of_tool)} different, status {status}", flush=True)
        if status:
            failed += 1
            print(output[-3000:])
    if "--accept" in arguments:
        EXPECTED.write_text("".join(f"{line}\n" for line in sorted(seen | expected(set(TOOLS) - set(tools)))), encoding="utf-8")
        return failed
    wrong = disagreements(seen, expected(tools))
    print("\n".join(wrong) or "nothing unexpected")
    return failed + len(wrong)


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
