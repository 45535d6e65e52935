"""Pictures in one style, as every page shows them."""

__all__ = [
    "stage_color",
    "Drawing",
    "drawing_style",
    "as_drawing",
    "draw_box",
    "draw_arrow",
    "draw_byte_bars",
    "tile_picture",
]


import functools
import html
import io
import re
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterable, Optional

from fusedloss.core.tables import si


def least_in_bold(
    values: list[Optional[float]],  # None: not measured
    show: Callable[[float], str] = str,
) -> list[str]:  # a dash for None
    "Numbers as texts of a row, the least in bold where there are two or more."
    texts = ["–" if v is None else show(v) for v in values]
    known = [v for v in values if v is not None]
    least = show(min(known)) if len(known) > 1 else None
    return [f"**{text}**" if text == least else text for text in texts]


GREY = "#8c8c8c"  # baselines
INK = "#010203"  # replaced by the page's text colour
STAGE_COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#B8A800",
)  # Okabe-Ito, its yellow darkened


def stage_color(
    stage: int | str,  # its number, or a name that begins with it: "05_clusters", "results/05_clusters.json"
) -> str:
    "The fixed colour of stage 1, 2, …; stage 0 is grey."
    number = int(Path(stage).name[:2]) if isinstance(stage, str) else stage
    return GREY if number == 0 else STAGE_COLORS[(number - 1) % len(STAGE_COLORS)]


class Drawing:
    "An SVG with alternative text and a caption, shown inline."

    def __init__(self, svg: str, alt: str, caption: str = ""):
        self.svg, self.alt, self.caption = svg, alt, caption

    def _repr_html_(self) -> str:
        text = html.escape(self.caption)
        caption = f"<figcaption>{text}</figcaption>" if self.caption else ""
        return f'<figure class="fl-figure">{self.svg}{caption}</figure>'

    def __repr__(self) -> str:
        return f"Drawing: {self.alt}"

    def save(self, path: str | Path):
        "Write a file of its own, in mid-grey ink, for pages that cannot pass their colour in."
        svg = self.svg.replace("<svg ", '<svg color="#777" ', 1)
        Path(path).write_text(svg + "\n", encoding="utf-8")


@contextmanager
def drawing_style():
    "The workbook's matplotlib style; nothing outside the `with` changes."
    import matplotlib as mpl

    style = {
        "svg.hashsalt": "fusedloss",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titleweight": "bold",
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.titlepad": 14,
        "figure.constrained_layout.use": True,
        "lines.linewidth": 1.8,
    }
    ink = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    with mpl.rc_context({**style, **dict.fromkeys(ink, INK)}):
        yield


def as_drawing(
    fig,  # a matplotlib figure, closed afterwards
    alt: str,  # what a reader who cannot see it should know
    caption: str = "",  # machine, dtype, shape, date, commit
) -> Drawing:
    "Render `fig` to an inline SVG with no date and fixed ids."
    import matplotlib.pyplot as plt

    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    fig.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    plt.close(fig)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r' width="[\d.]+pt"| height="[\d.]+pt"', "", svg, count=2)
    title = html.escape(alt, quote=True)
    width = fig.get_figwidth() * 96
    head = f'<svg role="img" aria-label="{title}" style="width:{width:.0f}px;max-width:100%;height:auto" '
    return Drawing(svg.replace("<svg ", head, 1).strip(), alt, caption)


def draw_box(
    ax,  # matplotlib's
    x: float,
    y: float,
    width: float,
    height: float,
    text: str = "",  # in its middle
    alpha: float = 0.0,  # of the filling
    *,
    stage: int | str = 1,  # whose colour fills it
    edge: str = INK,  # colour of its edge; a grey one is thinner
):
    "Draw a rectangle with a text in it."
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((x, y), width, height, fc=stage_color(stage), alpha=alpha, lw=0))
    ax.add_patch(Rectangle((x, y), width, height, fc="none", ec=edge, lw=0.6 if edge == GREY else 1))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center")


def draw_arrow(
    ax,  # matplotlib's
    *points: tuple[float, float],  # two or more; the head is at the last
    color: str = GREY,
):
    "Draw a line through points, with a head at its end."
    for (x, y), (to_x, to_y) in zip(points[:-2], points[1:-1]):
        ax.plot([x, to_x], [y, to_y], color=color, lw=1.3)
    ax.annotate("", points[-1], points[-2], arrowprops=dict(arrowstyle="->", color=color, lw=1.3, shrinkA=0, shrinkB=0))


def draw_byte_bars(
    ax,  # matplotlib's
    sizes: dict[str, float],  # bytes by name
    stage: int | str,  # whose colour the page's own bars have
    own: Callable[[str], bool],  # whether a name is one of these; the others are grey
):
    "Draw a bar a name, its bytes beside it, without axes."
    most = max(sizes.values())
    for row, (name, size) in enumerate(sizes.items()):
        ax.barh(row, size, height=0.7, color=stage_color(stage) if own(name) else GREY)
        ax.text(size + most / 80, row, si(size, "B"), va="center")
    ax.set(yticks=range(len(sizes)), yticklabels=sizes, ylim=(len(sizes) - 0.5, -0.5), xlim=(0, 1.35 * most), xticks=[])
    ax.tick_params(axis="y", length=0)
    for side in ax.spines.values():
        side.set_visible(False)


def letters_of(label, renderer):
    "The box of an annotation's letters, without the line to its point."
    from matplotlib.text import Text

    label.update_positions(renderer)
    return Text.get_window_extent(label, renderer).padded(1)


def spread_labels(
    fig,  # a matplotlib figure
    labels: list,  # its annotations, moved in points
) -> None:
    "Move labels up or down until none covers another or a point, each as little as it can, by 200 points at most."
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.transforms import Bbox

    fig.draw_without_rendering()
    box = functools.partial(
        letters_of, renderer=RendererAgg(*fig.bbox.size, fig.dpi)
    )  # not every canvas has a renderer
    points = [label.axes.transData.transform(label.xy) for label in labels]
    placed = [Bbox([point - 4, point + 4]) for point in points]
    for label in sorted(labels, key=lambda label: box(label).y0):
        x, y = label.xyann
        for up in sorted(range(-200, 201), key=abs):
            label.xyann = x, y + up
            if not any(box(label).overlaps(other) for other in placed):
                break
        placed.append(box(label))


def tile_picture(
    tiles: tuple[int, int],  # how many tiles of tokens, and of classes
    lit: Iterable[tuple[int, int]],  # the tiles (row, column) that are in memory now
    title: str,
    alt: str,
    notes: tuple[str, str] = ("tokens N", "classes V"),  # labels of the two sides
    stage: int | str = 1,  # whose colour
) -> Drawing:
    "The N×V rectangle of scores with the tiles that exist at this moment filled in."
    from matplotlib.patches import Rectangle
    import matplotlib.pyplot as plt

    rows, columns = tiles
    with drawing_style():
        fig, ax = plt.subplots(figsize=(6.4, 2.7))
        for r in range(rows):
            for c in range(columns):
                ax.add_patch(Rectangle((c, r), 1, 1, fill=False, ec=GREY, lw=0.6, ls=":"))
        for r, c in lit:
            ax.add_patch(Rectangle((c, r), 1, 1, fc=stage_color(stage), ec=INK, lw=1))
        ax.add_patch(Rectangle((0, 0), columns, rows, fill=False, ec=INK, lw=1.4))
        ax.set(
            xlim=(-0.02 * columns, 1.02 * columns),
            ylim=(1.02 * rows, -0.02 * rows),
            xticks=[],
            yticks=[],
            xlabel=notes[1],
            ylabel=notes[0],
            title=title,
        )
        for side in ax.spines.values():
            side.set_visible(False)
        return as_drawing(fig, alt)
