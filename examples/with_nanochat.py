"""nanochat's GPT with its loss from hidden states, on a CPU, against the same model with logits.

    PYTHONPATH=path/to/nanochat python examples/with_nanochat.py

Four lines are written into a copy of its `nanochat/gpt.py`.
"""
import copy
import importlib.util
import tempfile
from pathlib import Path

import torch

ABOVE = "        # Forward the lm_head (compute logits)\n"  # the line of nanochat/gpt.py above which ours are
LINES = '''\
        if targets is not None:
            weight = self.lm_head.weight[:self.config.vocab_size].to(x.dtype)
            return fl.linear_cross_entropy(x, weight, targets, softcap=15, ignore_index=-1, reduction=loss_reduction)
'''
MISTAKES = {  # what the lines would be, and a wrong number
    "padded rows are classes": ("[:self.config.vocab_size]", ""),
    "without the soft cap": ("softcap=15, ", ""),
    "labels shifted twice": ("reduction=", "shift=1, reduction="),
}


def with_lines(lines):
    "nanochat's `GPT` with a forward that has these lines"
    path = importlib.util.find_spec("nanochat.gpt").origin
    text = Path(path).read_text(encoding="utf-8")
    if text.count(ABOVE) != 1:
        raise ValueError(f"nanochat/gpt.py: expected the line {ABOVE.strip()!r} once, got {text.count(ABOVE)}")
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder) / "gpt.py"
        changed.write_text("import fusedloss as fl\n" + text.replace(ABOVE, lines + ABOVE), encoding="utf-8")
        spec = importlib.util.spec_from_file_location("changed_gpt", changed)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module.GPT


def small_gpt():
    "A random GPT of nanochat with 1000 classes in 1024 rows, in float32"
    from nanochat.gpt import GPT, GPTConfig
    torch.manual_seed(0)
    model = GPT(GPTConfig(sequence_len=64, vocab_size=1000, n_layer=2, n_head=2, n_kv_head=2, n_embd=64))
    model.init_weights()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.normal_(std=0.3)  # scores of which the cap takes part
    return model


def distance(found, expected):
    "The larger relative difference: of the losses, or of all gradients as one vector"
    vectors = [(t[0], torch.cat([g.flatten() for g in t[1:]])) for t in (found, expected)]
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(*vectors))


def results(model, reduction="mean"):
    "The loss of 4 × 64 tokens, some ignored, and every gradient"
    made = torch.Generator().manual_seed(1)
    ids, targets = torch.randint(1000, (2, 4, 64), generator=made)
    targets[0, :40] = -1
    loss = model(ids, targets, loss_reduction=reduction).flatten()
    (loss * torch.arange(1.0, 1 + len(loss))).sum().backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def main():
    lines = []
    start = small_gpt()

    def changed(text):
        model = copy.deepcopy(start)
        model.__class__ = with_lines(text)
        return model

    for reduction in ("mean", "none"):
        error = distance(results(changed(LINES), reduction), results(copy.deepcopy(start), reduction))
        lines.append(f"{reduction}: {error:.0e} from nanochat with logits")
    for name, (old, new) in MISTAKES.items():
        found = results(changed(LINES.replace(old, new)))
        lines.append(f"{name}: {distance(found, results(copy.deepcopy(start))):.0e} from nanochat with logits")
    model = changed(LINES)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    lines.append(f"compiled in one graph: {distance(results(compiled), results(model)):.0e} from the same in eager mode")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
