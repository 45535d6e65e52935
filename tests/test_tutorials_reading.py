"""The tutorial on reading: its functions for data, decoding and error rates, and that faults in them are noticed."""
import ast
import random
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import fusedloss as fl
import pytest
import torch
from helpers import need_fonts
from torch.nn import functional as F
from project import ROOT, directives, read_notebook

PAGE = ROOT / "nbs" / "tutorials" / "5_reading.ipynb"
CELLS = [cell["source"] for cell in read_notebook(PAGE)["cells"]
         if cell["cell_type"] == "code" and not {"hide", "cuda", "slow"} & directives(cell["source"])]
KEPT = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
WIDTH = 96


def is_constant(node: ast.stmt) -> bool:
    "Does the statement give a value to names in capitals, and to nothing else?"
    return isinstance(node, ast.Assign) and all(isinstance(t, ast.Name) and t.id.isupper() for t in node.targets)


def page(*pairs: str) -> SimpleNamespace:
    "The page's functions, classes and constants at a small size, with `pairs` (old, new, …) replaced in their source"
    source = "\n".join(CELLS)
    for old, new in zip(pairs[::2], pairs[1::2]):
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    names = {"torch": torch, "device": torch.device("cpu"), "half": nullcontext(),
             "sizes": SimpleNamespace(width=WIDTH, letters=10, channels=2, features=4, blocks=1)}
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if isinstance(node, KEPT) or is_constant(node)]
    exec(compile(tree, str(PAGE), "exec"), names)  # the project's own page
    return SimpleNamespace(**names)


def fewest_edits(a: str, b: str) -> int:
    "By its definition, for short texts"
    if not a or not b:
        return len(a) + len(b)
    return min(fewest_edits(a[1:], b) + 1, fewest_edits(a, b[1:]) + 1, fewest_edits(a[1:], b[1:]) + (a[0] != b[0]))


def edits_fault(p) -> str | None:
    "Numbers of edits, and the rates of several lines"
    numbers = random.Random(0)
    for _ in range(40):
        a, b = ("".join(numbers.choices("abc", k=numbers.randint(0, 4))) for _ in "ab")
        if p.edits(a, b) != fewest_edits(a, b):
            return f"edits of {a!r} and {b!r}"
    if p.error_rates(["to be or", "x"], ["to bee or", "y z"]) != (4 / 12, 3 / 5):
        return "rates of two lines"
    return None if p.replaced("abc", "adc") == [("b", "d")] and p.replaced("abcd", "badc") == [] else "pairs"


def frames_fault(p) -> str | None:
    "The fewest frames are those for which PyTorch's loss is finite"
    for labels in ([1], [1, 1], [1, 2, 2, 2], [2, 1, 2]):
        y = torch.tensor(labels)
        losses = [F.ctc_loss(torch.zeros(t, 1, 3), y[None], (t,), (len(y),), reduction="sum") for t in range(1, 9)]
        if p.frames_needed(y) != 1 + sum(loss.isinf().item() for loss in losses):
            return f"frames of {labels}"
    pictures = p.Pictures(["aa", "ab", "abc"], torch.arange(3, dtype=torch.uint8)[:, None, None], torch.tensor([2, 2, 9]))
    kept, classes = p.with_frames(pictures, p.classes_of(pictures, p.characters_of(pictures.said)))
    fit = kept.said, kept.pixels.flatten().tolist(), kept.frames.tolist(), [len(y) for y in classes]
    return None if fit == (["ab", "abc"], [1, 2], [2, 9], [2, 3]) else "pictures that are kept"


def batch_fault(p) -> str | None:
    "Classes and frames of a batch are those of its lines; what is said is decoded"
    alphabet = p.characters_of(["abc", "a d"])
    pictures = p.Pictures(["abc", "d", "a d"], torch.zeros(3, 32, WIDTH, dtype=torch.uint8), torch.tensor([5, 6, 7]))
    x, y, frames, lengths = p.batch_of(pictures, p.classes_of(pictures, alphabet), torch.tensor([2, 1]))
    said = [alphabet.decode(row[:n]) for row, n in zip(y.tolist(), lengths.tolist())]
    if said != ["a d", "d"] or frames.tolist() != [7, 6] or x.shape != (2, 32, WIDTH) or 0 in y[0].tolist():
        return "lines of a batch"
    path = torch.tensor([0, *alphabet.encode("a"), 0, *alphabet.encode("abd")])  # the last frame is beyond the line
    scores = torch.full((len(path), 1, len(alphabet.texts)), -9.0).scatter(2, path[:, None, None], 0.0)
    read = p.texts_of(scores, pictures._replace(frames=torch.tensor([len(path) - 1])), alphabet)
    return None if read == ["aab"] and p.Alphabet(["", "▁to", "▁be"], list).decode([1, 2]) == " to be" else "what is read"


def picture_fault(p) -> str | None:
    "A line lies within its picture and its columns, even a long one; the same seed is the same picture"
    for text in ("i", "word", "wwwwwwwwwwwwwwww"):
        for seed in range(4):
            picture, columns = p.draw_line(text, "DejaVuSans", random.Random(seed))
            ink = picture.amax(0).nonzero()[:, 0]
            if picture.shape != (32, WIDTH) or not 0 < ink.min() <= ink.max() < min(columns, WIDTH - 1):
                return f"{text!r} beyond its columns"
    one, two = (p.draw_lines(["ab", "cd"], ["DejaVuSans"], 5, seed=1) for _ in "ab")
    same = one.said == two.said and torch.equal(one.pixels, two.pixels)
    return None if same and one.frames.max() * 4 <= WIDTH + 3 else "other pictures"


def lines_fault(p) -> str | None:
    "Words, or lines of the text as it runs"
    text = "Reads words; reads lines (of 12 letters), not {braces} or incomprehensibility."
    if p.lines_of(text, 10) != ["braces", "letters", "lines", "reads", "words"]:
        return "words"
    lines = p.lines_of(text, 12)
    return None if " ".join(lines) == "Reads words; reads lines (of 12 letters), not or" and max(map(len, lines)) <= 12 else "lines"


def transducer_fault(p) -> str | None:
    "The transducer's loss is that of its logits; what it reads is what each line says alone, frame by frame"
    torch.manual_seed(0)
    alphabet, pictures = p.characters_of(["abc"]), p.Pictures(["ab", "cca"], torch.randint(255, (2, 32, WIDTH), dtype=torch.uint8), torch.tensor([20, 9]))
    model = p.Transducer(len(alphabet.texts)).eval()
    torch.manual_seed(1)  # says two letters in turn, in every frame
    torch.nn.init.normal_(model.head.weight, std=2), torch.nn.init.zeros_(model.head.bias)
    _, y, frames, lengths = p.batch_of(pictures, p.classes_of(pictures, alphabet), torch.arange(2))
    torch.manual_seed(5)
    x = model(p.noisy(pictures.pixels))  # [T,N,H]
    before = model.before(torch.cat([torch.zeros_like(y[:, :1]), y], 1))
    z = model.head(torch.tanh(x.transpose(0, 1)[:, :, None] + before[:, None]))
    expected = (fl.transducer_loss(z, y, frames, lengths, blank=0, reduction="none") / lengths).mean()
    if not torch.isclose(model.loss(x, model.head, y, frames, lengths), expected):
        return "the loss"
    said = []
    for n in range(2):
        labels = [0]
        for t in range(frames[n]):
            for _ in range(3):
                y = model.head(torch.tanh(x[t, n] + model.before.weight[labels[-1]])).argmax().item()
                if y == 0:
                    break
                labels.append(y)
        said.append(alphabet.decode(labels[1:]))
    return None if p.said_by(model, pictures, alphabet) == said and len(set(said)) == 2 and len(p.said_by(model, pictures, alphabet, 3)) == 2 else "what is read"


FAULTS = edits_fault, frames_fault, batch_fault, picture_fault, lines_fault, transducer_fault
BUGS = [(edits_fault, "above[j - 1] + (c != d)", "above[j - 1] + 1"),
        (edits_fault, "row[-1] + 1,", "row[-1] + 2,"),
        (edits_fault, "sum(len(parts(b)) for b in said)", "sum(len(parts(a)) for a in read)"),
        (edits_fault, "len(differ) == 1", "differ"),
        (frames_fault, "labels[1:] == labels[:-1]", "labels[1:] != labels[:-1]"),
        (frames_fault, "<= pictures.frames[i]", "< pictures.frames[i]"),
        (batch_fault, "pictures.frames[some], lengths", "pictures.frames[:len(some)], lengths"),
        (batch_fault, 'texts = ["", *sorted(set("".join(lines)))]', 'texts = sorted(set("".join(lines)))'),
        (batch_fault, "fl.ctc_decode(log_probs, pictures.frames, beam_size=beam)", "fl.ctc_decode(log_probs, beam_size=beam)"),
        (batch_fault, '.replace("▁", " ")', ""),
        (picture_fault, "size = min(size,", "size = max(size,"),
        (picture_fault, "getlength(text)) + 6", "getlength(text)) - 6"),
        (transducer_fault, "F.pad(y, (1, 0))", "F.pad(y, (0, 1))"),
        (transducer_fault, "losses / lengths.to(losses.device)", "losses"),
        (transducer_fault, "found = fl.transducer_decode(x, pictures.frames,", "found = fl.transducer_decode(x, pictures.frames * 0 + 20,"),
        (lines_fault, "set(word) <= SIGNS and", "set(word) and"),
        (lines_fault, "{{4,{letters}}}", "{{2,{letters}}}")]


@pytest.fixture(scope="module")
def whole():
    "The page's functions as they are"
    need_fonts("DejaVuSans", "STIXGeneral", "cmr10")
    return page()


@pytest.mark.parametrize("fault", FAULTS)
def test_functions(whole, fault):
    assert fault(whole) is None


@pytest.mark.thorough
@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("fault, old, new", BUGS)
def test_planted(fault, old, new):
    assert fault(page(old, new)) is not None


def test_missing_fonts_are_named(whole, tmp_path, capsys):
    (tmp_path / "cmr10.ttf").touch()
    assert whole.fonts_there(["cmb10", "cmr10", "cmss10"], Path(tmp_path)) == ["cmr10"]
    assert capsys.readouterr().out == "matplotlib has no cmb10, cmss10 here: we go on without.\n"
    for name in whole.FONTS:
        (tmp_path / f"{name}.ttf").touch()
    assert whole.fonts_there(whole.FONTS, Path(tmp_path)) == whole.FONTS and not capsys.readouterr().out


def test_without_tokenizers_the_page_goes_on(capsys):
    source = next(cell for cell in CELLS if cell.startswith("pieces = "))
    names = {"find_spec": lambda name: None}
    exec(source, names)  # the project's own page
    assert names["pieces"] is None
    assert capsys.readouterr().out == "tokenizers is not installed here: from here on we go on with characters alone.\n"
