"""A Llama with a byte-pair vocabulary learns the source of Python's standard library, first with each method of the loss, then for longer with one."""

import math
import random
import sysconfig
from pathlib import Path
from typing import Callable, Iterable

import torch
from torch import nn, Tensor

from workbook.drawing import as_drawing, Drawing, drawing_style, INK
from workbook.runs import Run


SIZES = {  # characters: of text; hidden: features; length: tokens of a window; batch: windows of a step; rate: the learning rate at its highest
    "cuda": dict(
        characters=40_000_000, vocabulary=32768, hidden=512, layers=6, length=512, batch=64, rate=1e-3, steps=400
    ),
    "cpu": dict(characters=1_500_000, vocabulary=4096, hidden=128, layers=3, length=64, batch=4, rate=3e-3, steps=700),
}


def library_files() -> list[Path]:
    "The sources of Python's standard library, without its tests, its tables of characters and what was installed beside it."
    root = Path(sysconfig.get_paths()["stdlib"])
    others = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
    return [path for path in sorted(root.rglob("*.py")) if not others & set(path.relative_to(root).parts)]


def read_texts(
    files: Iterable[Path],
    characters: int,  # no further file is read after so many
    every: int = 10,  # each file of this number is held out
    seed: int = 0,
) -> tuple[list[str], list[str]]:  # to train on, and held out
    "Different texts of files in a random order; one that cannot be read, or is not UTF-8, is left out."
    files, found, total = list(files), {}, 0
    for path in random.Random(seed).sample(files, len(files)):
        if total >= characters:
            break
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        total += len(text) if text not in found else 0
        found[text] = None
    texts = list(found)
    return [text for i, text in enumerate(texts) if i % every], texts[::every]


def train_tokenizer(texts: Iterable[str], vocabulary: int):
    "A byte-pair tokenizer; its token 0 is `<file>`."
    from tokenizers import decoders, models, pre_tokenizers, Tokenizer, trainers

    tokenizer, by_bytes = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer, tokenizer.decoder = by_bytes(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=["<file>"], initial_alphabet=by_bytes.alphabet(), show_progress=False
        ),
    )
    return tokenizer


def windows(tokenizer, texts: Iterable[str], length: int) -> Tensor:  # [windows, length]
    "The texts as tokens, each after a 0, one after the other; what is left over at the end is dropped."
    ids = torch.tensor([i for text in tokenizer.encode_batch_fast(list(texts)) for i in (0, *text.ids)])
    return ids[: len(ids) // length * length].view(-1, length)


def draw_batch(data: Tensor, size: int, step: int) -> Tensor:  # [size, length]
    "Windows of `data` [windows, length] at random, the same ones for the same step."
    rows = torch.randint(len(data), (size,), generator=torch.Generator().manual_seed(step))
    return data[rows.to(data.device)]


def bytes_of_tokens(tokenizer) -> Tensor:  # [V], integers
    "How many bytes of text each token of `train_tokenizer` stands for; `<file>` stands for none."
    texts = (tokenizer.id_to_token(i) for i in range(1, tokenizer.get_vocab_size()))  # a character for each byte
    return torch.tensor([0, *map(len, texts)])


def small_llama(vocabulary: int, hidden: int, layers: int, seed: int = 0):
    "A random Llama whose output layer is its embedding."
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    heads = max(2, hidden // 64)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            initializer_range=0.5 * hidden**-0.5,
        )
    )


def flow_picture(
    boxes: list[tuple[int, int, str, str]],  # column, row, text and colour; a grey text in brackets is what is not made
    arrows: list[tuple[tuple, tuple]],  # from (column, row) to (column, row)
    alt: str,
) -> Drawing:
    "What flows where."
    import matplotlib.pyplot as plt
    from matplotlib.patches import FancyBboxPatch

    columns, rows = (1 + max(box[i] for box in boxes) for i in (0, 1))
    with drawing_style():
        fig, ax = plt.subplots(figsize=(1.8 * columns, 1.05 * rows))
        for x, y, text, color in boxes:
            fill = dict(ls="--", fc="none") if text.startswith("(") else dict(fc=color + "33")
            ax.add_patch(FancyBboxPatch((x + 0.08, y + 0.17), 0.84, 0.66, boxstyle="round,pad=0.02", ec=color, **fill))
            ax.text(x + 0.5, y + 0.5, text.strip("()"), ha="center", va="center", fontsize=9)
        for (a, b), (c, d) in arrows:
            end = c + 0.05, d + 0.5 - 0.3 * (d > b) + 0.3 * (d < b)
            ax.annotate("", end, (a + 0.95, b + 0.5), arrowprops=dict(arrowstyle="->", color=INK))
        ax.set(xlim=(0, columns), ylim=(0, rows))
        ax.axis("off")
        return as_drawing(fig, alt)


def trained_by_adamw(model: nn.Module, rate: float, steps: int) -> dict:
    "A model with its optimizer and schedule: a tenth of the steps to warm up, then a cosine to a tenth of the rate."
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.1)
    warm = max(1, steps // 10)
    factor = lambda step: min((step + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * step / steps))
    return dict(model=model, optimizer=optimizer, schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, factor))


def train(
    run: Run,
    model: nn.Module,
    optimizer,
    schedule,
    loss: Callable[[nn.Module, Tensor], Tensor],  # of the model and a batch
    batch: Callable[[int], Tensor],  # of a step
    steps: int,
    after: Callable[[int], None] = lambda step: None,  # called with the number of each step that is done
):
    "Train through `steps` batches, logging the loss of each."
    for step in run.steps(steps):
        value = loss(model, batch(step))
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        run.log(loss=value)
        after(step + 1)


@torch.no_grad()
def mean_loss(model: nn.Module, data: Tensor, loss: Callable, size: int) -> float:  # nats a token
    "The loss of all windows [windows, length], `size` at a time."
    return sum(loss(model, part).item() * len(part) for part in data.split(size)) / len(data)
