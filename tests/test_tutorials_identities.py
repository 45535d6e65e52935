"""The tutorial on identities: its helpers, a font that is missing, and faults that its quick cells notice."""
import io
from contextlib import redirect_stdout

import pytest
import torch

from helpers import need_fonts
from project import ROOT, directives, read_notebook

pytestmark = pytest.mark.thorough
PAGE = ROOT / "nbs" / "tutorials" / "4_identities.ipynb"
CELLS = [cell["source"] for cell in read_notebook(PAGE)["cells"]
         if cell["cell_type"] == "code" and not {"slow", "cuda"} & directives(cell["source"])]
FONTS = [f"DejaVu{family}{cut}" for family, slanted in (("Sans", "Oblique"), ("SansMono", "Oblique"), ("Serif", "Italic"))
         for cut in ("", "-Bold", f"-{slanted}", f"-Bold{slanted}")] + ["STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"]
FAULTS = {  # a cell that has this, what it says instead, and a word of the cell whose check must fail
    "equal scores are accepted": ("same > t", "same >= t", "test_eq(accepted("),
    "a threshold one pair too low": ("(false_accepts * len(other)).long()", "(false_accepts * len(other)).long() + 1", "test_eq(accepted("),
    "the farthest is taken": (".argmax(1)", ".argmin(1)", "test_eq(rank_one"),
    "each code point is a class": ("alike.setdefault(picture.numpy().tobytes()", "alike.setdefault(code", "assert [ord("),
    "strangers are trained on": ("if code not in set(strangers)", "", "assert not set(classes)"),
    "unseen fonts are trained on": ("rows_of(is_class & is_known), rows_of(is_class & ~is_known)",
                                    "rows_of(is_class), rows_of(is_class & ~is_known)", "test_eq(len(learn)"),
}


@pytest.fixture(scope="module")
def page() -> dict:
    "The names of the page after its quick cells, run once with fewer characters; drawings are left out"
    pytest.importorskip("fastcore", reason="fastcore is not installed")
    need_fonts(*FONTS)
    names = {"__name__": "page"}
    with redirect_stdout(io.StringIO()):
        for source in CELLS:
            if "_picture(" not in source.replace("def ", ""):
                exec(source, names)
            if "\nsizes = " in source:
                names["sizes"] = names["sizes"]._replace(characters=120, batch=96)  # a GPU's batch would have every character
    return names


def cell_with(text):
    "The one quick cell that has a text"
    found, = [source for source in CELLS if text in source]
    return found


def again(page, old, new, check):
    "Run the cell that has `old`, changed, and the cell with the check, on the page's names"
    names, changed = dict(page), cell_with(old).replace(old, new)
    with redirect_stdout(io.StringIO()):
        exec(changed, names)
        if check not in changed:
            exec(cell_with(check), names)


@pytest.mark.parametrize("fault", FAULTS)
def test_page_notices(page, fault):
    old, new, check = FAULTS[fault]
    again(page, old, old, check)
    with pytest.raises(AssertionError):
        again(page, old, new, check)


def test_missing_fonts(page, capsys):
    "A font that is not there is named, and the others are read"
    found = page["read_fonts"](["DejaVuSans", "DejaVuAbsent", "STIXAbsent"])
    assert [font.name for font in found] == ["DejaVuSans"]
    assert capsys.readouterr().out == "matplotlib's fonts lack DejaVuAbsent, STIXAbsent here: the page goes on without.\n"
    assert page["read_fonts"](["DejaVuSans"]) and not capsys.readouterr().out


def test_pictures(page):
    "What a font lacks or leaves blank is no picture; labels and fonts are those that were drawn"
    sans, = page["read_fonts"](["DejaVuSans"])
    stix, = page["read_fonts"](["STIXGeneral"])
    only_sans = next(code for code in sorted(sans.codes) if code not in stix.codes)
    assert not page["draw"](only_sans, stix).any() and 32 not in sans.codes
    found = page["pictures_of"]([ord("A"), only_sans], [sans, stix])
    assert found.label.tolist() == [0, 0, 1] and found.font.tolist() == [0, 1, 0]
    assert torch.equal(found.pixels[1], page["draw"](ord("A"), stix)) and found.pixels.flatten(1).any(1).all()


def test_augment_keeps_the_picture_in_the_middle(page):
    "Pictures change, and their ink stays about where and as much as it was"
    torch.manual_seed(0)
    x = torch.zeros(64, 1, 32, 32)
    x[:, :, 12:20, 12:20] = 1
    changed = page["augment"](x)
    assert (changed - x).abs().mean((1, 2, 3)).min() > 0.01
    assert abs(changed.mean() / x.mean() - 1) < 0.1 and changed[:, :, 6:26, 6:26].sum() > 0.9 * x.sum()
