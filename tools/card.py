"""Draw nbs/card.png, which others show where somebody links to the site: what the loss of a language model holds, before and after.

    python tools/card.py
"""
from pathlib import Path

from project import ROOT, SETTINGS

CARD = ROOT / "nbs" / "card.png"
RECORDS = ROOT / "nbs" / "results"
NOTE = "Description"  # the PNG's field that says which figures are drawn


def words() -> tuple[str, str]:
    "The two lines of figures, from the records of the baseline and of stage 7"
    from fusedloss.core.tables import si
    from workbook.measure import SHAPES
    from workbook.records import figures_of

    sizes = SHAPES[0]._asdict()
    before = figures_of(RECORDS / "01_baseline.json", **sizes)["eager, fp32 softmax"]["extra"]
    after = figures_of(RECORDS / "07_recompute.json", **sizes)["recompute, 256 MiB"]["extra"]
    return f"{si(before, 'B')}  →  {si(after, 'B')}", f"beyond the gradients, {sizes['N']} tokens × {sizes['V']} classes"


def draw(path: Path) -> None:
    "Write the card, 1200 × 630"
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    figures, what = words()
    about = SETTINGS["DEFAULT"]["description"].partition(":")[0]
    fig = plt.figure(figsize=(12, 6.3), dpi=100, facecolor="#ffffff")
    fig.text(0.06, 0.78, "fusedloss", fontsize=58, fontweight="bold", color="#1b1b1b")
    fig.text(0.06, 0.66, about, fontsize=20, color="#555555")
    fig.text(0.06, 0.36, figures, fontsize=46, color="#0072B2")
    fig.text(0.06, 0.26, what, fontsize=22, color="#555555")
    fig.patches.append(Rectangle((0.80, 0.20), 0.15, 0.25, fill=False, ec="#8c8c8c", lw=4, transform=fig.transFigure))
    fig.patches.append(Rectangle((0.84, 0.27), 0.04, 0.08, fc="#0072B2", transform=fig.transFigure))
    fig.savefig(path, metadata={NOTE: f"{figures}; {what}", "Software": None})
    plt.close(fig)


if __name__ == "__main__":
    draw(CARD)
