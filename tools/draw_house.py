"""The modules of the package and what they import, as a picture: core below, stages in their order, doors on top."""
import textwrap

from check_house import House, in_core, is_door

from workbook.drawing import GREY, Drawing, as_drawing, drawing_style, stage_color

ROW, COLUMN, LEFT = 0.34, 0.25, 1.5  # inches: from stage to stage, upwards and to the right; left of the first one's line
LETTER, LINE = 0.082, 0.19  # inches, of a line of names


def stages_and_imports(house: House) -> dict[str, list[str]]:
    "Each stage that is no door, in order, with the earlier ones that it imports itself"
    stages = [stage for stage in house.stages if not is_door(stage)]
    return {stage: [other for other in stages[:place] if other in house.taken[stage]] for place, stage in enumerate(stages)}


def described(imports: dict[str, list[str]], core: list[str], doors: list[str]) -> str:
    "The picture in words"
    joined = "; ".join(f"{stage} imports {', '.join(others)}" for stage, others in imports.items() if others)
    return (f"Three floors. At the bottom core: {', '.join(core)}. Above it {len(imports)} stages, a staircase from {next(iter(imports))} "
            f"to {next(reversed(imports))}, with a line from each down to the earlier ones that it imports: {joined}. On top the doors: {', '.join(doors)}.")


def floor(ax, bottom: float, width: float, title: str, names: list[str]) -> float:
    "A box with names over the whole width; its top"
    from matplotlib.patches import FancyBboxPatch
    lines = textwrap.wrap("   ".join(names), int(width / LETTER), break_long_words=False)
    top = bottom + LINE * (len(lines) + 1) + 0.16
    ax.add_patch(FancyBboxPatch((0.05, bottom), width - 0.1, top - bottom, boxstyle="round,pad=0,rounding_size=0.06", fc=GREY, ec="none", alpha=0.18))
    ax.text(0.15, top - 0.08, title, va="top", weight="bold", fontsize=9)
    for number, line in enumerate(lines, 1):
        ax.text(0.15, top - 0.09 - LINE * number, line, va="top", fontsize=9)
    return top


def wires(ax, imports: dict[str, list[str]], places: dict[str, tuple[float, float]], colors: dict[str, str]) -> None:
    "A line to each stage from all that import it, and from each stage one down, with a dot at every line that it meets on purpose"
    for stage, (x, y) in places.items():
        users = [places[user][0] for user, taken in imports.items() if stage in taken]
        if users:
            ax.annotate("", (x + 0.1, y), (max(users), y), arrowprops={"arrowstyle": "-|>", "color": GREY, "lw": 1, "shrinkA": 0, "shrinkB": 0})
        met = [places[other][1] for other in imports[stage]]
        ax.plot([x, x], [y, min([y, *met])], color=colors[stage], lw=1.6, zorder=3)
        ax.plot([x] * len(met), met, "o", color=colors[stage], ms=5, zorder=4)


def staircase(ax, house: House, imports: dict[str, list[str]], ground: float) -> None:
    "The stages, each above the one before and to its right, with what they import"
    places = {stage: (LEFT + COLUMN * place, ground + ROW * (place + 1)) for place, stage in enumerate(imports)}
    colors = {stage: stage_color(house.stages[stage]) for stage in imports}
    wires(ax, imports, places, colors)
    for stage, (x, y) in places.items():
        ax.text(x - 0.12, y, f"{house.stages[stage]} · {stage}", ha="right", va="center", fontsize=9)
        ax.plot(x, y, "s", color=colors[stage], ms=8, zorder=5)


def picture(house: House) -> Drawing:
    "Core, the stages with a line for each direct import, and the doors"
    import matplotlib.pyplot as plt
    imports = stages_and_imports(house)
    core = sorted(module.removeprefix("core.") for module in house.files if in_core(module) and module != "core")
    doors = sorted(module for module in house.files if is_door(module))
    width = max(6.0, LEFT + COLUMN * len(imports) + 0.3)
    with drawing_style():
        fig, ax = plt.subplots(layout="none")
        ground = floor(ax, 0, width, "core, which imports no stage; every module may import it", core)
        staircase(ax, house, imports, ground)
        top = floor(ax, ground + ROW * (len(imports) + 1), width, "doors, which import any stage; no stage imports them", doors)
        ax.set(xlim=(0, width), ylim=(0, top), position=(0, 0, 1, 1))
        ax.axis("off")
        fig.set_size_inches(width, top)
        return as_drawing(fig, described(imports, core, doors))
