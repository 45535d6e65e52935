"""The puzzles: solutions pass, and what is wrong with other kernels is said in the right words."""
import importlib.util
import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from grids import thorough_but
from helpers import interpreted, need_fonts
from typed_launches import Lowerer, can_look, launch_types
from project import ROOT, read_notebook

from fusedloss.core.triton import jit, tl
from workbook.puzzles import check, picture, report
from workbook.puzzles.refusals import in_words, refusal, text_of
from workbook.puzzles.report import check_arguments, moved_bytes, near_misses
from workbook.puzzles.tasks import Case, TASKS, anyone, loss_of
from workbook.puzzles.verdicts import faults, place_words
from workbook.puzzles.watch import Array, Memory, Watch, places_of, watch_kernel

pytest.importorskip("triton")
pytestmark = interpreted
PAGES = sorted((ROOT / "nbs" / "puzzles").glob("*.ipynb"))
ANSWERS = ROOT / "nbs" / "solutions" / "puzzles.ipynb"
SOLVED = [cell["source"] for cell in read_notebook(ANSWERS)["cells"] if cell["source"].startswith("@jit")]
NAMES = {number: task.name for number, task in TASKS.items()}

# of each puzzle: a piece of its solution, what a wrong kernel has there, and words that must be said
WRONG = {
    1: [("row * V + ", "", "program 1 loads z[0, 0…15], which belongs to program 0"),
        ("tl.max(z, 0)", "tl.sum(z, 0)", "It is the sum of the row, not its maximum"),
        ("tl.max(z, 0)", "tl.min(z, 0)", "It is the minimum of the row, not its maximum"),
        ("tl.max(z, 0)", "max(z)", "line 7, `tl.store(out_ptr + row, max(z))`: Python's brackets, loops, `max` and `sum` know neither"),
        ("tl.load(z_ptr + row * V + tl.arange(0, V))", "z_ptr[row]", "`z = z_ptr[row]`: Python's brackets, loops"),
        ("tl.load(z_ptr", "tl.load(tl.arange(0, 3) + z_ptr", "line 6, `z = tl.load(tl.arange(0, 3) + z_ptr"),
        ("tl.store(out_ptr + row, tl.max(z, 0))", "out_ptr[row] = tl.max(z, 0)", "Use `tl.store(out_ptr + at, values)`"),
        ("tl.max(z, 0)", "tl.max(z, 1)", "the block has no axis 1"),
        ("tl.max(z, 0)", "z", "a block of values goes to one place"),
        ("    tl.store(", "    while row < V:\n        z = z + 1\n    tl.store(", "Program 0 does not come to an end"),
        ("    tl.store(", "    while row < V:\n        z = tl.max(tl.load(z_ptr + row * V + tl.arange(0, V)), 0)\n    tl.store(",
         "Program 0 does not come to an end"),
        ("out_ptr + row", "out_ptr", "program 1 stores out[0], which belongs to program 0"),
        ("row = tl.program_id(0)", "row = tl.program_id(0) + 1", "program 0 loads z[1, 0…15], which belongs to program 1")],
    2: [(", mask=cols < V, other=-float(\"inf\")", "", "Program 0 loads z[1, 0…4], which belongs to program 1. The block runs on"),
        ("-float(\"inf\")", "0.0", "Of a maximum, −∞ is neutral"),
        (", other=-float(\"inf\")", "", "has a mask and no `other=`"),
        ("row * V", "row * BV", "Program 1 does not begin where its part does: it leaves out z[1, 0…4]. A row of z is 27 elements long"),
        ("cols < V", "cols < V - 1", "Wrong values: out is wrong at"),
        ("cols < V", "cols < V - 1", "Never loaded: z[0, 26] and 4 more")],
    3: [("m + tl.log(tl.sum(tl.exp(z - m), 0))", "tl.log(tl.sum(tl.exp(z), 0))", "e¹⁰⁰ overflows"),
        ("m + tl.log", "tl.log", "the maximum has to be added"),
        ("tl.sum(tl.exp(z - m), 0)", "tl.sum(tl.exp(z - m).to(tl.float16), 0).to(tl.float32)",
         "The dtype of a sum is wrong: `tl.sum` is done in float16"),
        ("tl.sum(tl.exp(z - m), 0)", "tl.sum(tl.exp((z.to(tl.float16) - m.to(tl.float16)).to(tl.float32)), 0)",
         "a subtraction is done in float16"),
        ("other=-float(\"inf\")", "other=0.0", "The lanes beyond the row are counted as scores of 0")],
    4: [("s * tl.exp(m - new_max)", "s", "The sum is not rescaled when the maximum rises"),
        ("m, s = -float(\"inf\"), 0.0", "m, s = 0.0, 0.0", "The running maximum begins with 0"),
        ("    new_max = tl", "    z = tl.load(z_ptr + row * V + cols, mask=cols < V, other=-float(\"inf\"))\n        new_max = tl",
         "z is loaded 2 times; 1 is enough"),
        ("range(0, V, BV)", "range(0, V - BV, BV)", "Wrong values: out is wrong at 4 of 4 places"),
        ("range(0, V, BV)", "range(0, BV, BV)", "Never loaded: z[0, 32…74]")],
    5: [("mask=valid, other=0.0", "mask=True", "program 2 loads z[0, 50], which belongs to program 0. Row 2's label is `ignore_index`"),
        ("range(0, V, BV)", "range(0, BV, BV)", "Never loaded: z[0, 32…43] and 126 more"),
        ("y != ignore_index", "y >= 0", "z[255] is no score, and must not be loaded"),
        ("tl.where(valid, m + tl.log(s) - z_y, 0.0)", "m + tl.log(s) - z_y", "The row whose label is `ignore_index` has a loss"),
        ("m + tl.log(s) - z_y", "z_y - m - tl.log(s)", "the loss is its negative"),
        ("row * V + y", "y", "loads z[0,")],
    6: [("cols == y", "tl.arange(0, BV) == y", "The label is compared with the place in the block"),
        ("dz = tl.where(y != ignore_index, dz, 0.0)", "pass", "The row whose label is `ignore_index` has a gradient"),
        ("dz, mask=cols < V)", "dz)", "Program 0 stores z[1, 0…4], which belongs to program 1. The block runs on"),
        ("g * (", "(", "The gradient lacks the factor g"),
        ("y != ignore_index", "y >= 0", "The row whose label is `ignore_index` has a gradient")],
    7: [("cols * stride_v", "cols", "Out of bounds: program 0 loads z[0, "),
        ("tl.program_id(0).to(tl.int64)", "tl.program_id(0)", "If both factors of an offset are int32, so is their product"),
        ("row * stride_n", "row * V", "Out of bounds: program 1 loads z[0, ")],
    8: [("cols[None, :] == y", "tl.arange(0, BV)[None, :] == y", "The label is compared with the place in the tile"),
        ("total / V", "total / BV", "divided by the BV lanes of one block"),
        ("total += tl.sum(z, 1)", "total += tl.sum(z, 0)",
         "blocks of 4 and 16 lanes do not fit: is it the wrong axis, or a missing `[:, None]`?"),
        ("tl.zeros([BN], tl.float32)\n", "0.0\n",
         "Triton does not compile it. `for first in range(0, V, BV):`: `total` begins as fp32 and becomes"),
        ("total / V", "total / (tl.cdiv(V, BV) * BV)", "The mean is over the lanes of the blocks"),
        (", mask=rows < N, other=-1", "", "Out of bounds: program 2 loads y[10…11], but y is 10"),
        ("(rows < N)[:, None] & ", "", "Out of bounds: program 2 loads z[10, 0…15]"),
        ("    z_y += tl.sum(tl.where(cols[None, :] == y[:, None], z, 0.0), 1)", "    pass", "The target's score is missing"),
        ("    tl.store(", "    z_y = tl.load(z_ptr + rows * V + y, mask=rows < N, other=0.0)\n    tl.store(",
         "z is loaded 1.04 times; 1 is enough")],
    9: [("total += tl.sum(dz.to(tl.float32), 0)",
         "total = (total.to(tl.float16) + tl.sum(dz.to(tl.float32), 0).to(tl.float16)).to(tl.float32)",
         "an addition is done in float16"),
        ("dz.to(tl.float32)", "dz", "`tl.sum` is done in float16"),
        ("tl.store(out_ptr + cols, total,", "tl.atomic_add(out_ptr + cols, total,",
         "Not deterministic: program 0 adds to out by an atomic"),
        ("total += tl", "total = tl", "It is the sum of the last rows only"),
        ("range(0, N, BN)", "range(0, BN, BN)", "Never loaded: dz[8, 0…23]"),
        ("(rows < N)[:, None] & ", "", "Out of bounds: program 0 loads dz[37, 0…15]")],
    10: [("tl.where(m == -float(\"inf\"), 0.0, m)", "m", "only in the part that lies beyond the row"),
         ("row * P + part, m)", "part * 4 + row, m)", "program (0, 1) stores max[1, 0], which belongs to program (1, 0)"),
         ("tl.exp(z - relative_to)", "tl.exp(z)", "The sum is not relative to the part's maximum"),
         ("    tl.store(sum_ptr", "    if part == 0:\n        tl.store(sum_ptr", "Not stored: sum[0, 1…3] and 9 more, 12 of 16 places")],
    11: [(" * tl.exp(part_max - relative_to)", "", "The sums are added as they are"),
         ("tl.where(m == -float(\"inf\"), 0.0, m)", "m", "only in the row whose parts are all empty"),
         ("mask=parts < P, other=0.0", "mask=parts < P", "a load of sum has a mask and no `other=`")],
    12: [("z = tl.dot(", "tl.dot(", "All scores are 0: `tl.dot` returns its result"),
         ("x = tl.load(x_ptr + rows[:, None] * H + at, mask=real_x, other=0.0)", "x = tl.zeros([BN, BH], tl.float32)",
          "`tl.dot` takes operands of one dtype, and got fp32 and fp16"),
         ("z = tl.where((cols < V)[None, :], z, -float(\"inf\"))", "pass", "Classes beyond V count with a score of 0"),
         ("    for first in range(0, V, BV):\n        cols = first + tl.arange(0, BV)\n        z = tl.zeros([BN, BV], tl.float32)\n",
          "    z = tl.zeros([BN, BV], tl.float32)\n    for first in range(0, V, BV):\n        cols = first + tl.arange(0, BV)\n",
          "The products of one tile of classes are still there"),
         ("real_x, real_w = real_rows & (at < H)", "real_x, real_w = real_rows",
          "Program 0 loads x[16, 0…7], which belongs to program 1. The block runs on"),
         ("(cols < V)[:, None] & (at < H)", "(at < H)", "Out of bounds: program 0 loads w[40, 0…15]")],
    13: [("- tl.where(cols[None, :] == y[:, None], 1.0, 0.0)", "", "The one of the one-hot vector is not subtracted"),
         ("dx, mask", "-dx, mask", "The gradient has the wrong sign"),
         ("dx = tl.dot(", "tl.dot(", "dx is 0: `tl.dot` returns its sum"),
         ("tl.dot(x, tl.trans(w))", "tl.zeros([BN, BV], tl.float32)", "All scores are 0"),
         ("dx = tl.dot(", "w = tl.load(w_ptr + cols[:, None] * H + at, mask=(cols < V)[:, None], other=0.0)\n        dx = tl.dot(",
          "w is loaded 4 times; 2 are enough"),
         ("dx, mask=(rows < N)[:, None]", "dx", "Out of bounds: program 1 stores dx[20, 0…31]")],
    14: [(">= eps", "< eps", "loads w["),
         (">= eps", "> eps", "A tile whose bound is eps is skipped"),
         (">= eps:", "< eps:\n            continue\n        if tile >= 0:",
          "Triton does not compile it. `continue`: there is no `continue` and no `break`: put the lines"),
         (">= eps:", "< eps:\n            break\n        if tile >= 0:", "The first tile that is skipped ends the loop"),
         (">= eps", ">= 0.0", "which has to be skipped"),
         ("tl.program_id(0) * T + tile", "tile", "program 1 loads bound[0, 0], which belongs to program 0")],
    15: [("tl.num_programs(0))", "5)",
          "(3 programs, N 10, V 27, BN 4, BV 16): program 0 loads z[8, 16…26] and 11 more, which belongs to program 2"),
         ("tl.num_programs(0))", "8 * tl.num_programs(0))", "Not stored: out["),
         ("range(tl.program_id(0), tl.cdiv(N, BN) * across, tl.num_programs(0))", "range(3 * tl.program_id(0), 3 * tl.program_id(0) + 3)",
          "program 0 loads z[0, 16…31] and 48 more, which belongs to program 1"),
         ("(cols < V)[None, :]", "(cols < V + 1)[None, :]", "The block runs on into what follows")],
    16: [("z = tl.dot(", "tl.dot(", "All scores are 0"),
         ("at = h + BH + tl", "at = h + tl", "Wrong values: out is wrong at"),
         ("range(0, H, BH)", "range(0, H - BH, BH)", "The last step's product is missing"),
         ("        z = tl.dot(x, tl.trans(w), z)\n        x, w = next_x, next_w",
          "        if h == 0: z = tl.dot(x, tl.trans(w), z)\n        z = tl.dot(next_x, tl.trans(next_w), z)",
          "nothing is on its way: program (0, 0) loads step 2 after 2 products"),
         ("    z = tl.zeros(", "    early = tl.load(w_ptr + cols * H + 2 * BH + at, mask=cols < V, other=0.0)\n    z = tl.zeros(", "w is loaded")],
    17: [("& (state != before)", "", "the blank between them is skipped"),
         ("tl.where(m == -float(\"inf\"), 0.0, m)", "m", "only in states that no path reaches"),
         ("    total += tl.exp(by_two - relative_to)\n", "", "No path goes on by two states"),
         ("(s >= 1) & (s < S)", "s < S", "loads alpha[-1, 10]"),
         ("alpha_ptr += row * S", "alpha_ptr += row * 12", "does not begin where its part does: it leaves out alpha[1, 0]")],
    18: [("reverse=True", "reverse=False", "beta comes from the other end"),
         ("stay + late_enter", "late_stay + late_enter", "only where two steps or more are combined"),
         ("after(late_stay, late_enter, stay, enter)", "after(stay, enter, late_stay, late_enter)", "has its pairs the wrong way round"),
         ("return late_stay + stay,", "return stay,", "`after` is not associative: a GPU combines steps in pairs"),
         ("other=-float(\"inf\")", "other=0.0", "The lanes beyond T are combined as time steps"),
         ("tl.where(m == -float(\"inf\"), 0.0, m)", "m", "NaN comes from −∞ − (−∞)")],
}


def module_of(source: str, folder):
    "The kernels of a text: Triton reads their source from a file"
    path = folder / "kernels.py"
    path.write_text("from fusedloss.core.triton import jit, tl\n\n" + source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"kernels_{abs(hash(source))}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def sources(number: int) -> list[str]:
    "The solution of a puzzle, and before it the functions that it calls"
    names = ("log_add", "after", NAMES[number]) if number == 18 else (NAMES[number],)
    return [next(source for source in SOLVED if f"def {name}(" in source) for name in names]

def solution(number: int, folder, *changes: tuple[str, str]):
    "A puzzle's kernel, with pieces of its source replaced"
    source = "\n\n".join(sources(number))
    for old, new in changes:
        assert old in source, f"{old!r} is not in the solution"
        source = source.replace(old, new)
    return getattr(module_of(source, folder), NAMES[number])


@pytest.mark.parametrize("number", thorough_but(TASKS, 1, 16))
def test_a_solution_passes(number, tmp_path):
    report = check(number, solution(number, tmp_path))
    assert report.solved and not report.words, report


@pytest.mark.parametrize("number, old, new, words", thorough_but([(n, *wrong) for n, cases in WRONG.items() for wrong in cases], (1, *WRONG[1][0])))
def test_a_wrong_kernel_is_told_why(number, old, new, words, tmp_path):
    report = check(number, solution(number, tmp_path, (old, new)))
    assert not report.solved
    assert words.lower() in " ".join(report.words).lower() and len(report.words) <= 3


@pytest.mark.thorough
def test_loads_that_run_too_far_ahead_are_named(tmp_path):
    late = [("    for h in", "    soon_x, soon_w = next_x, next_w\n    for h in"),
            ("    z = tl.zeros", "    next_x = tl.load(x_ptr + rows * H + BH + at, mask=rows < N, other=0.0)\n"
             "    next_w = tl.load(w_ptr + cols * H + BH + at, mask=cols < V, other=0.0)\n    z = tl.zeros"),
            ("at = h + BH", "at = h + 2 * BH"), ("x, w = next_x, next_w", "x, w, soon_x, soon_w = soon_x, soon_w, next_x, next_w")]
    said = check(16, solution(16, tmp_path, *late)).words[0]
    assert "holds too many tiles: it loads step 2 after 0 products" in said


@pytest.mark.thorough
def test_one_product_is_no_products(tmp_path):
    product = "        z = tl.dot(x, tl.trans(w), z)\n"
    late = (product, ""), ("        next_x = tl.load(", f"{product}        next_x = tl.load(")
    assert "loads step 1 after 1 product, so" in check(16, solution(16, tmp_path, *late)).words[0]


@pytest.mark.thorough
def test_loads_without_other_are_named_as_in_a_sentence(tmp_path):
    masks = [("(cols < V)[:, None], other=0.0", "(cols < V)[:, None]"), ("rows < N, other=0.0", "rows < N"),
             ("rows < N, other=-1", "rows < N")]
    said = check(13, solution(13, tmp_path, *masks)).words[0]
    assert ": loads of lse, w and y have a mask and no `other=`" in said


@pytest.mark.thorough
def test_a_scalar_comparison_may_join_a_mask(tmp_path):
    masked = [(">= eps:", ">= eps\n        if tile >= 0:"), ("if tl.load(", "keep = tl.load("),
              ("mask=(cols < V)[:, None]", "mask=(cols < V)[:, None] & keep")]
    report = check(14, solution(14, tmp_path, *masked))
    assert report.solved, report


@pytest.mark.thorough
def test_a_kernel_that_names_constants_and_functions_is_compiled(tmp_path):
    helper = "least = tl.constexpr(-float(\"inf\"))\n\n@jit\ndef lowest(z):\n    return tl.where(z > 0, z, least)\n\n"
    wrong = "for part in range(0, V):\n        if part == 1:\n            continue\n    tl.store("
    source = helper + sources(2)[0].replace("tl.max(z, 0)", "tl.max(tl.minimum(z, -lowest(-z)), 0)")
    kernel = module_of(source, tmp_path).masked_max
    assert check(2, kernel).solved and "least = triton.language.constexpr(-inf)" in text_of(kernel)
    assert "there is no `continue`" in check(2, module_of(source.replace("tl.store(", wrong), tmp_path).masked_max).words[0]


@pytest.mark.thorough
def test_what_has_no_text_is_not_compiled(tmp_path, monkeypatch):
    kernel = solution(1, tmp_path)
    kernel.fn.__globals__["program_id"] = object()
    assert refusal(kernel, {"z_ptr": torch.zeros(4), "out_ptr": torch.zeros(4), "V": 4}) is None


@pytest.mark.thorough
def test_pictures_and_reports_say_sizes(tmp_path):
    need_fonts("DejaVuSans")
    drawn = picture(10)._repr_html_()
    assert "Dotted: tiles. 4 × 4 programs, V 75, P 4, PART 32." in drawn
    shown = check(5, solution(5, tmp_path, ("    for first", "    if y == ignore_index:\n        V = 0\n    for first")))
    assert "1.246 KiB moved (1.227 KiB loaded, 20 B stored); 1.543 KiB are enough." in repr(shown)
    assert "a missing <code>[:, None]</code>?" in check(8, solution(8, tmp_path, ("tl.sum(z, 1)", "tl.sum(z, 0)")))._repr_html_()


@pytest.mark.thorough
def test_a_second_launch_of_other_sizes_is_tried(tmp_path):
    report = check(2, solution(2, tmp_path, ("cols < V", "cols < 27")))
    assert report.words[0] == "A first launch is right. In a second one, of other sizes (4 programs, V 19, BV 32):"
    assert report.words[1].startswith("Program 0 loads z[1, 0…7], which belongs to program 1")


@pytest.mark.thorough
def test_a_kernel_that_two_programs_store_from_is_not_deterministic():
    z = torch.ones(4)
    case = Case({"out": Array(None, z.double(), owner=anyone)}, (2,), {})
    watch = Watch(case.arrays, case.grid)
    for program in (0, 1):
        watch.program = program
        pointers = np.array([watch.memory.tensors["out"].data_ptr()], np.uint64)
        watch.note("stores", pointers, np.array([True]))
    assert faults(case, watch)[0].startswith("Not deterministic: programs 0 and 1 both store out[0]")


def test_the_shipped_stubs_are_told_that_nothing_is_stored():
    pages = [json.loads(path.read_text(encoding="utf-8")) for path in PAGES]
    shown = [str(output["data"]["text/plain"]) for page in pages for cell in page["cells"] if cell["cell_type"] == "code"
             and "check(" in "".join(cell["source"]) for output in cell["outputs"]]
    assert len(shown) == len(TASKS) and all("is not solved yet" in text and "It stores nothing so far." in text for text in shown)


@pytest.mark.thorough
def test_pages_ask_for_every_puzzle_once_and_hint():
    text = "\n".join(cell["source"] for path in PAGES for cell in read_notebook(path)["cells"])
    for number, task in TASKS.items():
        asked = f"## Puzzle {number}: {task.title}\n", f"\ncheck({number}, {task.name})", f"picture({number})"
        assert [text.count(words) for words in asked] == [1, 1, 1]
    assert text.count("<details><summary>Hint</summary>") == len(TASKS)


@pytest.mark.thorough
@pytest.mark.parametrize("number", TASKS)
def test_stubs_have_the_parameters_that_are_asked_for(number):
    stub = next(cell["source"] for path in PAGES for cell in read_notebook(path)["cells"] if f"\ncheck({number}, " in cell["source"])
    parameters = re.findall(r"(\w+)(?:: tl.constexpr)?[,)]", re.search(rf"def {NAMES[number]}(\(.*?\)):", stub, re.DOTALL)[1])
    check_arguments(number, SimpleNamespace(arg_names=parameters))


@pytest.mark.thorough
def test_a_report_counts_bytes_and_draws(tmp_path):
    need_fonts("DejaVuSans")
    report = check(16, solution(16, tmp_path))
    shown = report._repr_html_()
    assert shown.count("<svg") == 2 and shown.count("<tr>") == 5 and "is solved" in shown
    loaded, stored = 2 * 2 * (20 + 24) * 72, 4 * 20 * 24  # each operand twice, by two tiles of the other
    assert moved_bytes(report.case, report.watch)[-1] == ("all", loaded, stored, loaded + stored)
    wrong = check(2, solution(2, tmp_path, (", mask=cols < V, other=-float(\"inf\")", "")))
    assert near_misses(wrong.case.arrays["z"], wrong.watch, "z") == [(1, 0, 5, 5)]
    assert "#d00000" in wrong._repr_html_() and "<svg" in picture(14)._repr_html_()


@pytest.mark.parametrize("number, kernel, words", [
    (0, None, "number: expected an integer from 1 to 18, got 0"), ("3", None, "got '3'"), (True, None, "got True"),
    (1, len, "kernel: expected a function under `@jit`, got builtin_function_or_method")])
def test_bad_arguments_are_refused(number, kernel, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        check(number, kernel)


def test_other_parameters_are_refused(tmp_path):
    with pytest.raises(ValueError, match="expected the parameters z_ptr, out_ptr, V, BV, got z_ptr, out_ptr, V"):
        check(2, solution(1, tmp_path))
    with pytest.raises(ValueError, match="from 1 to 18, got 19"):
        picture(19)


def test_without_triton_a_puzzle_says_so_and_goes_on(monkeypatch):
    need_fonts("DejaVuSans")
    monkeypatch.setattr(report, "triton", None)
    said = check(3, lambda z_ptr: None)
    assert not said.solved and said.words[0].startswith("Triton is not installed here, so the kernel was not run.")
    assert said.verdict().startswith("Puzzle 3 was not checked:")
    assert "Triton is not installed here" in said._repr_html_() and "<svg" in picture(3)._repr_html_()


def test_without_the_interpreter_a_puzzle_says_so_and_goes_on():
    import triton
    compiled = triton.JITFunction(loss_of)
    compiled.arg_names = ["z_ptr", "out_ptr", "V"]
    said = check(1, compiled)
    assert not said.solved and said.verdict() == "Puzzle 1 was not checked: A row's maximum."
    assert "os.environ['TRITON_INTERPRET'] = '1'" in said.words[0] and "was not checked" in said._repr_html_()


@pytest.mark.thorough
def test_a_kernel_that_raises_leaves_the_interpreter_as_it_was(tmp_path):
    from triton.runtime import interpreter
    before = dict(vars(interpreter.interpreter_builder)), interpreter.ReduceOps.sum, interpreter.ScanOps.generic_scan
    assert check(1, solution(1, tmp_path, ("tl.max(z, 0)", "tl.max(z, 3)"))).words[0].startswith("The kernel stops in program 0, line 7, ")
    after = vars(interpreter.interpreter_builder)
    assert (interpreter.ReduceOps.sum, interpreter.ScanOps.generic_scan) == before[1:]
    assert not any(name.startswith("create_") for name in after)


@pytest.mark.thorough
@pytest.mark.skipif(not can_look(), reason="launches are to be seen from Triton 3.5 on")
def test_the_compiler_takes_every_solution(tmp_path, monkeypatch):
    "What the interpreter runs must be Triton: each solution is lowered for a GPU"
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "solved_puzzles.py").write_text("from fusedloss.core.triton import jit, tl\n\n" + "\n\n".join(SOLVED), encoding="utf-8")
    kernels, lowerer = importlib.import_module("solved_puzzles"), Lowerer()
    for number, task in TASKS.items():
        case = task.case(0)
        tensors = {f"{name}_ptr": tensor for name, tensor in Watch(case.arrays, case.grid).memory.tensors.items()}
        line = launch_types(getattr(kernels, task.name), (), tensors | case.others)
        assert not lowerer.complaint(line), f"puzzle {number}: {lowerer.complaint(line)}"
    lowerer.process.kill()


def test_places_are_those_of_the_tensor():
    padded, columns = Array(torch.zeros(2, 3), strides=(4, 1)), Array(torch.zeros(2, 3), strides=(1, 8))
    assert places_of(padded, np.array([0, 2, 3, 4, 6, 7, -1])).tolist() == [0, 2, -1, 3, 5, -1, -1]
    assert places_of(columns, np.array([0, 1, 2, 8, 17])).tolist() == [0, 3, -1, 1, 5]
    memory = Memory({"z": padded, "y": Array(torch.arange(2), tile=(2, 1))})
    begin = {name: t.data_ptr() for name, t in memory.tensors.items()}
    name, offsets, places = memory.find(np.array([begin["z"] + 4 * 4, begin["z"] + 4 * 7], np.uint64))
    assert (name, offsets.tolist(), places.tolist()) == ("z", [4, 7], [3, -1])
    name, _, places = memory.find(np.array([begin["y"] - 8], np.uint64))
    assert (name, places.tolist()) == ("y", [-1])


def test_places_are_named():
    assert place_words("z", Array(torch.zeros(3, 27)), np.arange(27, 32)) == "z[1, 0…4]"
    assert place_words("y", Array(torch.zeros(4)), np.array([-100])) == "y[-100]"


def test_a_picture_has_few_rectangles():
    assert report.rectangles(np.array([[0, 0, 1], [0, 0, 1], [2, 2, 2]])) == [(0, 0, 2, 2, 0), (0, 2, 2, 1, 1), (2, 0, 1, 3, 2)]


def test_an_error_without_words_of_ours_is_shown_as_it_is():
    assert in_words("Cannot make_shape_compatible: incompatible dimensions at index 0: 4 and 16") \
        == "blocks of 4 and 16 lanes do not fit: is it the wrong axis, or a missing `[:, None]`?"
    assert in_words("disk full") == "disk full"


@jit
def copy_kernel(z_ptr, out_ptr, V: tl.constexpr, BV: tl.constexpr):
    at = tl.program_id(0) * V + tl.arange(0, BV)
    tl.store(out_ptr + at, tl.load(z_ptr + at))


def test_loads_and_stores_are_watched():
    z = torch.arange(6.).view(2, 3)
    watch = watch_kernel(Watch({"z": Array(z), "out": Array(None, z.double())}, (2,)), copy_kernel, dict(V=3, BV=4))
    assert [(a.kind, a.program, a.name, a.places.tolist()) for a in watch.accesses][:3] == [
        ("loads", 0, "z", [0, 1, 2, 3]), ("stores", 0, "out", [0, 1, 2, 3]), ("loads", 1, "z", [3, 4, 5, -1])]
    assert watch.memory.tensors["out"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_block_that_runs_on_is_named():
    z = torch.arange(9.).view(3, 3)
    case = Case({"z": Array(z), "out": Array(None, z.double())}, (3,), dict(V=3, BV=4))
    said = faults(case, watch_kernel(Watch(case.arrays, case.grid), copy_kernel, case.others))
    assert said[0].startswith("Program 0 loads z[1, 0], which belongs to program 1. The block runs on")
