"""One command trains the same small model with each loss of stages 1 to 7, and a model that reads words with those of stages 20 and 22, and shows that all agree and how much memory each takes."""

__all__ = ["run_tour", "run_reading", "main"]


import argparse
import json
import math
import re
import sys
import time
import traceback
from collections import Counter
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Callable, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import nn, Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from fusedloss.baseline import baseline_linear_cross_entropy
from fusedloss.chunks import chunked_linear_cross_entropy
from fusedloss.clusters import cross_entropy
from fusedloss.core.tables import si, Table
from fusedloss.core.rates import dtype_name
from fusedloss.ctc import ctc_loss_with_logits, forced_align
from fusedloss.filter import recompute_linear_cross_entropy
from fusedloss.iota import iota_cross_entropy
from fusedloss.linear_ctc import linear_ctc_loss
from fusedloss.tiles import MemoryEfficientVocabOutput
from workbook.drawing import as_drawing, Drawing, drawing_style, GREY, INK, stage_color
from workbook.measure import peak_memory, relative_error
from workbook.records import machine_line, versions


def english() -> str:
    "The help texts that ship with Python, one after the other."
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


class Words(NamedTuple):
    "A text in numbers."

    ids: Tensor  # [T] the class of each word, 0 for a rare one
    vocabulary: list[str]  # [V] the word of each class


def read_words(
    text: str,
    at_least: int = 2,  # a word that occurs less often is rare
) -> Words:
    "Cut a text into words and number them by frequency."
    words = re.findall(r"\w+|[^\w\s]+", text)
    vocabulary = ["", *(w for w, n in Counter(words).most_common() if n >= at_least)]
    number = {w: i for i, w in enumerate(vocabulary)}
    return Words(torch.tensor([number.get(w, 0) for w in words]), vocabulary)


def examples(
    ids: Tensor,  # [T] the text
    at: Tensor,  # [N] positions of the words to guess
    k: int,  # words of context
) -> tuple[Tensor, Tensor]:  # contexts [N,K], targets [N] with −100 for rare words
    "The words before some positions, and the words there."
    contexts, targets = ids[at[:, None] + torch.arange(-k, 0)], ids[at]
    return contexts, torch.where(targets > 0, targets, -100)


class NextWord(nn.Module):
    "Features that, multiplied by the embedding, score the next word."

    def __init__(
        self,
        n_classes: int,
        n_features: int,
        k: int,  # V, H, K
        seed: int = 0,
    ):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *size: nn.Parameter(torch.randn(size, generator=generator) * size[-1] ** -0.5)
        self.embedding = draw(n_classes, n_features)
        self.hidden, self.out = draw(2 * n_features, k * n_features), draw(n_features, 2 * n_features)

    def forward(
        self,
        contexts: Tensor,  # [N,K] classes
    ) -> Tensor:  # [N,H]
        joined = F.embedding(contexts, self.embedding).flatten(1) * self.embedding.shape[1] ** 0.5
        return F.layer_norm(F.linear(F.gelu(F.linear(joined, self.hidden)), self.out), self.embedding.shape[1:])


class Sizes(NamedTuple):
    "How large a tour is."

    N: int  # words guessed a step
    H: int  # features
    K: int  # words of context
    steps: int


CPU_SIZES, GPU_SIZES = Sizes(1024, 128, 4, 100), Sizes(8192, 512, 4, 40)


def default_sizes(device: str | torch.device) -> Sizes:
    "Ten seconds a stage or less."
    return GPU_SIZES if torch.device(device).type == "cuda" else CPU_SIZES


@dataclass
class Task:
    "The same start, batches and examination for every stage."

    sizes: Sizes
    n_classes: int
    seed: int
    device: torch.device
    batches: list[tuple]  # what the model and the loss are given at each step: contexts [N,K] and targets [N]
    held_out: tuple  # the same, of words that no batch holds
    start: Callable[[], nn.Module]  # the untrained model
    scores_bytes: int  # of the held-out words
    dtype: torch.dtype = torch.float32
    oracle: Callable = baseline_linear_cross_entropy  # what the loss is in float64
    show: Callable[[nn.Module], dict] = lambda model: {}  # what a trained model can do, for the report


def make_task(words: Words, sizes: Sizes, device: str | torch.device = "cpu", seed: int = 0) -> Task:
    "Draw the batches of every step and set the held-out words apart."
    held = torch.linspace(sizes.K, len(words.ids) - 1, sizes.N, dtype=torch.float64).long()
    free = torch.ones(len(words.ids), dtype=torch.bool).index_fill(0, held, False)
    free = free[sizes.K :].nonzero().squeeze(1) + sizes.K
    draws = torch.randint(len(free), (sizes.steps, sizes.N), generator=torch.Generator().manual_seed(seed))
    pick = lambda at: tuple(t.to(device) for t in examples(words.ids, at, sizes.K))
    batches, n_classes = [pick(free[d]) for d in draws], len(words.vocabulary)
    start = lambda: NextWord(n_classes, sizes.H, sizes.K, seed)
    return Task(sizes, n_classes, seed, torch.device(device), batches, pick(held), start, 4 * sizes.N * n_classes)


class Stage(NamedTuple):
    "A way to compute the loss."

    name: str
    number: int
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]  # of x [N,H], w [V,H], y [N]: a scalar, the mean


STAGES = (
    Stage("baseline", 1, baseline_linear_cross_entropy),
    Stage("tiles", 2, lambda x, w, y: MemoryEfficientVocabOutput(w, tile_factor=8, reduction="mean")(x, y)),
    Stage("iota", 3, lambda x, w, y: iota_cross_entropy(F.linear(x, w), y)),
    Stage("kernels", 4, lambda x, w, y: cross_entropy(F.linear(x, w), y, inplace=True)),
    Stage("chunks", 6, lambda x, w, y: chunked_linear_cross_entropy(x, w, y, chunk_size=128)),
    Stage("recompute", 7, lambda x, w, y: recompute_linear_cross_entropy(x, w, y, memory_budget=2**20)),
)


@dataclass
class Outcome:
    "What came of one stage; a figure that was not reached is None."

    name: str
    number: int
    final_loss: float | None = None  # of the held-out words, by the stage's own loss
    loss_error: float | None = None  # relative, of that loss against float64
    dx_error: float | None = None  # relative, of the gradient for x against float64
    dw_error: float | None = None
    memory_bytes: int | None = None  # the loss's peak, forward and backward, beyond dx and dw
    step_seconds: float | None = None  # median
    curve: list[float] = field(default_factory=list)  # the loss of each step
    failures: list[str] = field(default_factory=list)  # what is wrong and by how much
    trace: str = ""  # where an exception came from
    shown: dict = field(default_factory=dict)  # what the trained model can do


def train_step(loss: Callable, model: nn.Module, optimizer, contexts: Tensor, targets: Tensor) -> float:
    "One step; the loss before it."
    value = loss(model(contexts), model.embedding, targets)
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
    return value.item()


def train(
    stage: Stage,
    task: Task,
    outcome: Outcome,  # the curve and the time are written here
    tick: Callable[[float], None] = lambda loss: None,  # called after each step
) -> nn.Module:
    "Train from the task's start through all its batches."
    model = task.start().to(task.device)
    optimizer, seconds = torch.optim.Adam(model.parameters(), lr=5e-3), []
    for contexts, targets in task.batches:
        start = time.perf_counter()
        value = train_step(stage.loss, model, optimizer, contexts, targets)
        seconds.append(time.perf_counter() - start)
        if not math.isfinite(value):
            raise FloatingPointError(f"loss is {value}")
        outcome.curve.append(value)
        outcome.step_seconds = sorted(seconds)[len(seconds) // 2]
        tick(value)
    return model


def loss_and_gradients(loss: Callable, x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    "The loss, dx, dw."
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    value = loss(x, w, y)
    return value.detach(), *torch.autograd.grad(value, [x, w])


def examine(stage: Stage, task: Task, model: nn.Module, outcome: Outcome):
    "Loss, errors and memory of a stage's loss on the held-out words, written to `outcome`."
    contexts, y = task.held_out
    with torch.no_grad():
        x, w = model(contexts), model.embedding.detach()
    exact = loss_and_gradients(task.oracle, x.double(), w.double(), y)
    out = loss_and_gradients(stage.loss, x, w, y)
    outcome.final_loss = out[0].item()
    outcome.loss_error, outcome.dx_error, outcome.dw_error = map(relative_error, out, exact)
    del exact, out
    peak = peak_memory(lambda: loss_and_gradients(stage.loss, x, w, y), task.device)
    outcome.memory_bytes = peak - x.nbytes - w.nbytes
    outcome.shown = task.show(model)


TOLERANCES = dict(final_loss=1e-4, loss=1e-5, dx=1e-4, dw=1e-4)  # relative; float32, products included


def disagreements(outcome: Outcome, reference: Outcome) -> list[str]:
    "What a stage got wrong and by how much; empty if nothing."
    found, allowed = [], TOLERANCES
    for name in ("loss", "dx", "dw"):
        error = getattr(outcome, f"{name}_error")
        if error is not None and not error <= allowed[name]:
            found.append(f"{name} differs from float64 by {error:.1e}, more than {allowed[name]:.0e}")
    if outcome.final_loss is None or reference.final_loss is None:
        return found
    drift = abs(outcome.final_loss - reference.final_loss) / abs(reference.final_loss)
    if not drift <= allowed["final_loss"]:
        found.append(
            f"final loss {outcome.final_loss:.5f}, {reference.name} {reference.final_loss:.5f}: "
            f"they differ by {drift:.1e}, more than {allowed['final_loss']:.0e}"
        )
    return found


def run_stage(stage: Stage, task: Task, tick: Callable[[float], None] = lambda loss: None) -> Outcome:
    "Train and examine one stage; what goes wrong is written down, not raised."
    outcome = Outcome(stage.name, stage.number)
    try:
        examine(stage, task, train(stage, task, outcome, tick), outcome)
    except Exception as error:
        step = len(outcome.curve) + 1
        where = f"in training step {step}" if step <= len(task.batches) else "after training"
        outcome.failures.append(f"{type(error).__name__}: {error} ({where})")
        outcome.trace = traceback.format_exc()
    return outcome


LETTERS, ROWS, BELOW = "abcdefghijklmnopqrstuvwxyz", 14, 3  # class 1 is "a", 0 the blank; rows below the line


def letter_pictures() -> dict[str, Tensor]:  # each [ROWS,columns]
    "Every small letter on its line, in the font DejaVu Serif; needs matplotlib."
    from matplotlib import get_data_path
    from matplotlib.ft2font import FT2Font

    font, pictures = FT2Font(str(Path(get_data_path(), "fonts", "ttf", "DejaVuSerif.ttf"))), {}
    font.set_size(11, 72)
    for letter in LETTERS:
        font.set_text(letter)
        font.draw_glyphs_to_bitmap(antialiased=True)
        ink = torch.tensor(font.get_image(), dtype=torch.float64) / 255
        below = BELOW - round(font.get_descent() / 64)
        pictures[letter] = F.pad(ink, (0, 0, ROWS - below - len(ink), below))
    return pictures


class Spelling(NamedTuple):
    "What is written in N pictures; the arguments of a CTC loss in its order."

    labels: Tensor  # [N,L] classes of the letters, 0 beyond a word's end
    columns: Tensor  # [N] of each picture
    lengths: Tensor  # [N] letters of each word


def typeset(
    words: list[str],  # of small letters
    letters: dict[str, Tensor],  # from `letter_pictures`
    generator: torch.Generator,  # of the gaps and the noise
) -> tuple[Tensor, Spelling]:  # pictures [N,ROWS,T]
    "Write words as pictures, each a little different every time."
    gap = lambda: int(torch.randint(0, 3, (), generator=generator))
    lines = [torch.cat([F.pad(letters[c], (gap(), 0)) for c in word], 1).T for word in words]
    pictures = pad_sequence(lines, batch_first=True).transpose(1, 2)
    labels = pad_sequence([torch.tensor([1 + LETTERS.index(c) for c in word]) for word in words], batch_first=True)
    y = Spelling(labels, torch.tensor([len(line) for line in lines]), torch.tensor([len(word) for word in words]))
    return pictures + 0.15 * torch.randn(pictures.shape, generator=generator, dtype=torch.float64), y


class Reader(nn.Module):
    "Features that, multiplied by the embedding, score the letter at each column."

    def __init__(
        self,
        n_features: int,
        k: int,  # H, and K columns, an odd number
        seed: int = 0,
    ):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *size: nn.Parameter(
            torch.randn(size, generator=generator, dtype=torch.float64) * size[-1] ** -0.5
        )
        self.embedding = draw(1 + len(LETTERS), n_features)
        self.hidden, self.out = draw(2 * n_features, ROWS * k), draw(n_features, 2 * n_features)
        self.k = k

    def forward(
        self,
        pictures: Tensor,  # [N,ROWS,T]
    ) -> Tensor:  # [T,N,H]
        columns = F.pad(pictures, (self.k // 2, self.k // 2)).unfold(2, self.k, 1)  # [N,ROWS,T,K]
        joined = columns.permute(2, 0, 1, 3).flatten(2)
        return F.layer_norm(F.linear(F.gelu(F.linear(joined, self.hidden)), self.out), self.embedding.shape[1:])


def spell(
    scores: Tensor,  # [T,N,V]
    columns: Tensor,  # [N]
) -> list[str]:
    "The best class of each column, repetitions merged and blanks dropped."
    best = [row[:n].unique_consecutive().tolist() for row, n in zip(scores.argmax(2).T, columns.tolist())]
    return ["".join(LETTERS[c - 1] for c in row if c) for row in best]


def read_aloud(
    model: Reader,
    pictures: Tensor,
    y: Spelling,
    words: list[str],  # what is written
) -> dict:
    "Words as read, the share that is right, and one word's picture and alignment, as plain numbers."
    with torch.no_grad():
        log_p = F.linear(model(pictures), model.embedding).log_softmax(2)
    read, i = spell(log_p, y.columns), int(y.lengths.argmax())
    path = forced_align(log_p, *y).labels[i, : y.columns[i]].tolist()
    ink = (9 * pictures[i, :, : len(path)].clamp(0, 1)).round().int().tolist()
    right = sum(a == b for a, b in zip(read, words)) / len(words)
    return dict(
        written=words, read=read, right=right, word=words[i], picture=["".join(map(str, row)) for row in ink], path=path
    )


READING_SIZES = Sizes(N=32, H=96, K=15, steps=200)  # N words a step, K columns around each column


def torch_ctc(
    x: Tensor,
    w: Tensor,  # [T,N,H], [V,H]
    y: Spelling,
) -> Tensor:  # the mean over words of their loss a letter
    "CTC as PyTorch computes it."
    return F.ctc_loss(F.linear(x, w).log_softmax(2), *y)


def make_reading(words: Words, sizes: Sizes, device: str | torch.device = "cpu", seed: int = 0) -> Task:
    "The words of a text as pictures: batches of them, and 64 words apart."
    letters, generator = letter_pictures(), torch.Generator().manual_seed(seed)
    known = [w for w in words.vocabulary if re.fullmatch("[a-z]{3,7}", w)]
    known = [known[i] for i in torch.randperm(len(known), generator=generator)]
    held, free = known[:64], known[64:]
    move = lambda pictures, y: (pictures.to(device), Spelling(*(t.to(device) for t in y)))
    write = lambda some: move(*typeset(some, letters, generator))
    draws = torch.randint(len(free), (sizes.steps, sizes.N), generator=generator)
    held_out, batches = write(held), [write([free[i] for i in draw]) for draw in draws]
    return Task(
        sizes,
        1 + len(LETTERS),
        seed,
        torch.device(device),
        batches,
        held_out,
        start=lambda: Reader(sizes.H, sizes.K, seed),
        oracle=torch_ctc,
        scores_bytes=8 * held_out[0].shape[2] * len(held) * (1 + len(LETTERS)),
        dtype=torch.float64,
        show=lambda model: read_aloud(model, *held_out, held),
    )


READERS = (
    Stage("torch", 1, torch_ctc),
    Stage("ctc", 20, lambda x, w, y: ctc_loss_with_logits(F.linear(x, w), *y)),
    Stage("linear_ctc", 22, lambda x, w, y: linear_ctc_loss(x, w, *y)),
)


def run_tour(
    stages: tuple[Stage, ...] | None = None,  # the first is the reference; all where None
    sizes: Sizes | None = None,  # chosen by the device where None
    device: str | torch.device = "cpu",
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,  # hears what is about to run
) -> dict:
    "Train once with each stage, compare, and report."
    stages, sizes, words = stages or STAGES, sizes or default_sizes(device), read_words(english())
    task = make_task(words, sizes, device, seed)
    report = describe(task, words)
    say(headline(report, len(stages)))
    return _compared(stages, task, report)


def run_reading(
    readers: tuple[Stage, ...] | None = None,  # the first is the reference; all where None
    sizes: Sizes | None = None,  # `READING_SIZES` where None
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> dict:
    "Train a reader once with each CTC loss, compare, and report; `ImportError` without matplotlib."
    words = read_words(english())
    task = make_reading(words, sizes or READING_SIZES, device, seed)
    return _compared(readers or READERS, task, describe(task, words))


def _compared(stages: tuple[Stage, ...], task: Task, report: dict) -> dict:
    with tqdm(total=task.sizes.steps * len(stages), unit="step", mininterval=0.5) as bar:
        outcomes = [_with_bar(bar, i, stage, task) for i, stage in enumerate(stages)]
    for outcome in outcomes:
        outcome.failures += disagreements(outcome, outcomes[0])
    report["stages"] = [_entry(o, report) for o in outcomes]
    report["ok"] = not any(o.failures for o in outcomes)
    return report


def _with_bar(bar, i: int, stage: Stage, task: Task) -> Outcome:
    def tick(loss):
        bar.set_postfix_str(f"loss {loss:.2f}", refresh=False)
        bar.update()

    bar.set_description(stage.name)
    outcome = run_stage(stage, task, tick)
    bar.update((i + 1) * task.sizes.steps - bar.n)  # a stage that failed skips the rest of its steps
    return outcome


def describe(task: Task, words: Words) -> dict:
    "Everything of a report but its stages."
    config = dict(
        task.sizes._asdict(),
        V=task.n_classes,
        dtype=dtype_name(task.dtype),
        device=str(task.device),
        seed=task.seed,
        matmul_precision=torch.get_float32_matmul_precision(),
    )
    text = dict(source="pydoc_data.topics", words=len(words.ids), rare=(words.ids == 0).float().mean().item())
    return dict(
        ok=False,
        config=config,
        text=text,
        machine=machine_line(task.device),
        versions=versions(),
        date=datetime.now(timezone.utc).date().isoformat(),
        scores_bytes=task.scores_bytes,
        tolerances=TOLERANCES,
        stages=[],
    )


def headline(report: dict, n_stages: int) -> str:
    "What is about to run, for a person."
    c, text = report["config"], report["text"]
    plural = "" if n_stages == 1 else "s"
    return (
        f"The help texts of Python: {text['words']} words, {c['V']} classes, {text['rare']:.1%} of the words too rare to guess.\n"
        f"{n_stages} stage{plural}, {c['steps']} steps each: N = {c['N']} words a step, H = {c['H']} features, "
        f"V = {c['V']} classes, {si(report['scores_bytes'], 'B')} of scores.\n{report['machine']}"
    )


def _entry(outcome: Outcome, report: dict) -> dict:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(outcome).items()}
    memory = outcome.memory_bytes
    return dict(finite, memory_fraction=None if memory is None else memory / report["scores_bytes"])


def tour_table(report: dict) -> Table:
    "One line a stage."
    show = lambda value, form: "–" if value is None else form(value)

    def row(s):
        errors = [e for e in (s["dx_error"], s["dw_error"]) if e is not None]
        return [
            s["name"],
            show(s["final_loss"], "{:.5f}".format),
            show(max(errors, default=None), "{:.0e}".format),
            show(s["memory_bytes"], lambda b: si(b, "B")),
            show(s["memory_fraction"], "×{:.3f}".format),
            show(s["step_seconds"], lambda t: si(t, "s")),
            "NO" if s["failures"] else "yes",
        ]

    header = ["stage", "final loss", "gradient error", "peak memory", "of the logits", "time per step", "agrees"]
    return Table(header, map(row, report["stages"]))


def agreement_lines(report: dict) -> list[str]:
    "The failures, a line each; or one line that all is well."
    wrong = [f"{s['name']}: {line}" for s in report["stages"] for line in s["failures"]]
    if wrong:
        return wrong
    losses = [s["final_loss"] for s in report["stages"]]
    if len(losses) == 1:
        return ["The baseline agrees with float64."]
    drift = max(abs(loss - losses[0]) for loss in losses) / abs(losses[0])
    names = [s["name"] for s in report["stages"]]
    return [
        f"All {len(losses)} stages agree, {names[0]} to {names[-1]}: "
        f"their final losses differ by {drift:.1g} at most, {TOLERANCES['final_loss']:.0e} is allowed."
    ]


def reading_table(
    report: dict,  # from `run_reading`
    n: int = 8,  # words
) -> Table:
    "Some held-out words, and what each reader makes of them."
    readers = [s for s in report["stages"] if s["shown"]]
    written = readers[0]["shown"]["written"] if readers else []
    rows = sorted(zip(written, *(s["shown"]["read"] for s in readers)), key=lambda row: row[0] == row[1])
    return Table(["written", *(s["name"] for s in readers)], rows[:n])


def reading_line(report: dict) -> str:
    "How many of the held-out words each reader reads."
    rights = [f"{s['name']} {s['shown']['right']:.0%}" for s in report["stages"] if s["shown"]]
    return f"Held-out words read without a mistake: {', '.join(rights) or 'none'}."


def _plot_curves(ax, stages: list[dict]):
    for s in stages:
        style = dict(color=GREY, lw=6, alpha=0.5) if s is stages[0] else dict(color=stage_color(s["number"]), lw=1.4)
        ax.plot(range(1, len(s["curve"]) + 1), s["curve"], **style)
    wrong, names = [s["name"] for s in stages if s["failures"]], [s["name"] for s in stages]
    title = (
        f"Disagreement: {', '.join(wrong)}"
        if wrong
        else f"The losses of all {len(stages)} stages fall on one curve"
        if len(stages) > 1
        else "The loss"
    )
    ax.set(xlabel="step", ylabel="loss", title=title)
    label = " = ".join(names) if len(names) < 4 else f"{names[0]} in grey, {len(names) - 1} more on it"
    ax.annotate(label, (1, 0.98), xycoords="axes fraction", ha="right", va="top", fontsize=9)


def _plot_memory(ax, stages: list[dict]):
    held = [s["memory_fraction"] for s in stages]
    for i, s in enumerate(stages):
        ax.barh(i, held[i], color=GREY if i == 0 else stage_color(s["number"]), height=0.6)
        ax.annotate(f"×{held[i]:.2f}", (held[i], i), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    ax.axvline(1, color=INK, lw=0.8, ls=":")
    title = (
        f"Peak memory: ×{held[0]:.2f} of the logits at first, ×{min(held):.2f} at best"
        if len(held) > 1
        else "Peak memory"
    )
    ax.set(
        yticks=range(len(held)),
        yticklabels=[s["name"] for s in stages],
        ylim=(len(held) - 0.4, -0.6),
        title=title,
        xlabel="peak memory / N×V logits",
        xlim=(0, 1.15 * max([1.0, *held])),
    )


def tour_plot(report: dict) -> Drawing:
    "Loss curves, and peak memory; needs matplotlib."
    import matplotlib.pyplot as plt

    stages, c = report["stages"], report["config"]
    measured = [s for s in stages if s["memory_fraction"] is not None]
    heights = [2.6, 0.9 + 0.3 * len(measured)]
    with drawing_style():
        fig, (top, low) = plt.subplots(2, figsize=(6.4, sum(heights)), height_ratios=heights)
        _plot_curves(top, stages)
        _plot_memory(low, measured) if measured else low.set_axis_off()
        held = ", ".join(f"{s['name']} ×{s['memory_fraction']:.2f}" for s in measured)
        alt = f"Training loss against step for each stage, and a bar for the peak memory of each as a fraction of the logits: {held}."
        shape = " × ".join(f"{k} {c[k]}" for k in "NHV")
        return as_drawing(fig, alt, f"{report['machine']}, {c['dtype']}, {shape}, {c['steps']} steps, {report['date']}")


def runs_of(path: list[int]) -> list[tuple[int, int, int]]:
    "Class, first column and last column of each run of one class, blanks left out."
    ends = [t for t in range(1, len(path) + 1) if t == len(path) or path[t] != path[t - 1]]
    return [(path[b - 1], a, b - 1) for a, b in zip([0, *ends], ends) if path[b - 1]]


def alignment_plot(
    report: dict,  # from `run_reading`
) -> Drawing:
    "A word's picture, and under its columns the letters that are read there; needs matplotlib."
    import matplotlib.pyplot as plt

    shown, c = next(s["shown"] for s in report["stages"] if s["shown"]), report["config"]
    picture, runs = [list(map(int, row)) for row in shown["picture"]], runs_of(shown["path"])
    with drawing_style():
        fig, ax = plt.subplots(figsize=(6.4, 2.4))
        ax.imshow(picture, cmap="Greys", vmin=0, vmax=9, interpolation="nearest")
        for label, a, b in runs:
            ax.plot([a - 0.4, b + 0.4], [ROWS + 0.5] * 2, color=stage_color("20_ctc"), lw=3, solid_capstyle="butt")
            ax.annotate(LETTERS[label - 1], ((a + b) / 2, ROWS + 1.2), ha="center", va="top", annotation_clip=False)
        ax.set(
            yticks=[],
            ylim=(ROWS + 4, -0.5),
            xlabel="column",
            title=f"{len(runs)} letters are read in {len(shown['path'])} columns",
        )
        ax.spines["left"].set_visible(False)
        where = ", ".join(f"{LETTERS[label - 1]} {a}–{b}" for label, a, b in runs)
        alt = f"The word {shown['word']} as a small picture, and the columns at which each letter is read: {where}."
        return as_drawing(fig, alt, f"{report['machine']}, {c['dtype']}, {c['steps']} steps, {report['date']}")


def save_report(
    report: dict,  # from `run_tour`; its entry "reading", where there is one, from `run_reading`
    folder: Path,  # exists
) -> list[str]:  # a line for each file written, or not
    "Write `tour.json`, and the plots where matplotlib is installed."
    (folder / "tour.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    lines, reading = [f"figures: {folder / 'tour.json'}"], report.get("reading")
    try:
        tour_plot(report).save(folder / "tour.svg")
    except ImportError:
        return ["no plot: it needs matplotlib (pip install matplotlib)", *lines]
    except FileNotFoundError:
        return ["no plot: matplotlib finds no font here", *lines]
    if reading and any(s["shown"] for s in reading["stages"]):
        alignment_plot(reading).save(folder / "reading.svg")
        lines = [f"plot: {folder / 'reading.svg'}", *lines]
    return [f"plot: {folder / 'tour.svg'}", *lines]


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def make_parser() -> argparse.ArgumentParser:
    "The arguments of `python -m workbook.tour`."
    parser = argparse.ArgumentParser(
        "python -m workbook.tour",
        description="Train a small next-word model with the loss of every stage and compare. Exit code 1 if a stage disagrees.",
    )
    names = [s.name for s in (*STAGES, *READERS[1:])]
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    parser.add_argument(
        "--stage",
        nargs="+",
        action="extend",
        metavar="NAME",
        choices=names,
        help=f"only these, and {names[0]} or PyTorch's CTC, which they are compared with: {', '.join(names)}",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the report as JSON, and nothing else, on standard output"
    )
    parser.add_argument("--device", choices=devices, default=devices[0], help="where to run (default: %(default)s)")
    parser.add_argument("--steps", type=_positive, metavar="N", help="training steps a stage (default: by the device)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("tour"),
        metavar="FOLDER",
        help="where the plot and the JSON go (default: %(default)s)",
    )
    return parser


def _chosen(stages: tuple[Stage, ...], names: list[str] | None) -> tuple[Stage, ...]:
    "The stages of these names behind their reference, or all."
    return tuple(s for s in stages if s is stages[0] or not names or s.name in names)


def _readers(args: argparse.Namespace, fail: Callable[[str], NoReturn]) -> tuple[Stage, ...]:
    "The ways to read that were asked for; none where there is no font."
    readers = _chosen(READERS, args.stage)
    if len(readers) == 1:
        return ()
    try:
        letter_pictures()
    except (ImportError, FileNotFoundError):
        if args.stage:
            fail("reading needs a font of matplotlib's (pip install matplotlib)")
        print("no reading: it needs a font of matplotlib's (pip install matplotlib)\n", file=sys.stderr, flush=True)
        return ()
    return readers


def _say_all(report: dict, folder: Path):
    "The tables, the files and the verdicts."
    parts = [part for part in (report, report["reading"]) if part]
    print(f"{tour_table(report)}\n")
    for reading in parts[1:]:
        print(tour_table(reading), reading_table(reading), reading_line(reading), sep="\n\n", end="\n\n")
    print(*save_report(report, folder), sep="\n", flush=True)
    for part in parts:
        print(*agreement_lines(part), sep="\n", file=sys.stdout if part["ok"] else sys.stderr)


def tour_command(args: argparse.Namespace, fail: Callable[[str], NoReturn]) -> int:
    "Run the tour and say what came of it: 0 if all stages agree, else 1."
    try:
        english()
        args.out.mkdir(parents=True, exist_ok=True)
    except ImportError:
        fail("this Python came without its help texts (pydoc_data.topics)")
    except OSError as error:
        fail(f"argument --out: cannot make {args.out}: {error.strerror}")
    readers, *both = _readers(args, fail), default_sizes(args.device), READING_SIZES
    sizes, reading_sizes = (sizes._replace(steps=args.steps or sizes.steps) for sizes in both)
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        report = run_tour(
            _chosen(STAGES, args.stage), sizes, args.device, say=lambda line: print(f"{line}\n", flush=True)
        )
        report["reading"] = run_reading(readers, reading_sizes, args.device) if readers else None
        report["ok"] &= not report["reading"] or report["reading"]["ok"]
        _say_all(report, args.out)
    if args.json:
        print(json.dumps(report, indent=1))
    return 0 if report["ok"] else 1


def main(
    argv: list[str] | None = None,  # `sys.argv[1:]` where None
) -> int:  # the exit code
    "The command line `python -m workbook.tour`."
    parser = make_parser()
    return tour_command(parser.parse_args(argv), parser.error)


if __name__ == "__main__":
    sys.exit(main())
