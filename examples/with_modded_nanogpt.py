"""modded-nanogpt's training loss from hidden states, on a CPU, against its definition: a sigmoid for a soft cap, tokens ahead, a prefix.

    python examples/with_modded_nanogpt.py

Its `train_gpt.py` is a script for eight H100s and cannot be imported: the definition below is written from its kernel and from its validation.
"""
import torch
import torch.nn.functional as F

import fusedloss as fl

CLASSES, FEATURES, TOKENS = 384, 32, 60  # rows that only pad are classes too, as in train_gpt.py


def fused(x, lm_head_weight, target_seq, mtp_weights, prefix_target_seq, prefix_weight):
    "The sum of the losses of tokens, of hidden states [T,H] and a weight [H,V], in the place of `FusedSoftcappedCrossEntropy.apply`"
    ahead = [F.pad(target_seq[k:], (0, k), value=-100) for k in range(len(mtp_weights))]
    targets = torch.stack([*ahead, prefix_target_seq.where(prefix_target_seq >= 0, -100)], -1)
    weights = torch.cat([mtp_weights, prefix_weight.reshape(1)])
    five = x.new_full((lm_head_weight.shape[1],), 5.0)  # 23 σ((z + 5) / 7.5) = 11.5 + 11.5 tanh((z + 5) / 15)
    return fl.linear_cross_entropy(x, lm_head_weight.T, targets, target_weight=weights, linear_bias=five,
                                   logit_scale=11.5 / 15, softcap=11.5, reduction="sum")


def defined(x, lm_head_weight, target_seq, mtp_weights, prefix_target_seq, prefix_weight):
    "The same by logits: each token's targets are itself and what follows, and the prefix of the first if it has one"
    z = 23 * torch.sigmoid((x @ lm_head_weight + 5) / 7.5)
    loss = 0
    for k, weight in enumerate(mtp_weights):
        loss = loss + weight * F.cross_entropy(z[:len(z) - k], target_seq[k:], reduction="sum")
    return loss + prefix_weight * F.cross_entropy(z, prefix_target_seq, ignore_index=-1, reduction="sum")


def drawn(dtype):
    "Hidden states, a weight, targets, their weights, prefixes"
    made = torch.Generator().manual_seed(0)
    x, w = (3 * torch.randn(*size, generator=made, dtype=torch.float64) for size in ((TOKENS, FEATURES), (FEATURES, CLASSES)))
    targets, prefixes = torch.randint(350, (2, TOKENS), generator=made)
    return (x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), targets, torch.tensor([1.0, 0.5, 0.25], dtype=dtype),
            prefixes.where(prefixes % 3 > 0, -1), torch.tensor(0.25, dtype=dtype))


def results(loss, given):
    value = loss(*given)
    return [value.detach(), *torch.autograd.grad(value, given[:2])]


def main():
    def told(name, found, expected):
        print(f"{name}: {max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected)):.0e} from the definition")
    given = drawn(torch.float64)
    told("three tokens ahead and a prefix", results(fused, given), results(defined, given))
    alone = (*given[:3], given[3][:1], given[4], torch.zeros_like(given[5]))
    told("one token", results(fused, alone), results(defined, alone))
    told("a cap of 23 without the 5", results(lambda x, w, y, *_: fl.linear_cross_entropy(x, w.T, y, softcap=23.0, reduction="sum"), alone), results(defined, alone))


if __name__ == "__main__":
    main()
