"""What several ranks must agree on: each function runs on four processes, and on groups of one to four of them."""
import contextlib
import copy
import functools
import itertools
import math
import os
import random
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing import assert_close

import fusedloss as fl
import fusedloss.contrast as contrast
import fusedloss.sharded as sharded
from fusedloss.core import ranks as core_ranks
from fusedloss.core import products, triton, tuning
from fusedloss.core.ranks import shard_range
from fusedloss.margins import AdaFace, ArcFace, Circle, CosFace, SubCenter
from fusedloss.core.sampling import NegativeSampler
from fusedloss.partial_fc import PartialFC
from fusedloss.filter import recompute_linear_cross_entropy
from fusedloss.sharded import sharded_linear_cross_entropy
from fusedloss.sharded_heads import ShardedPartialFC, ShardedRowSparse
from workbook.measure import Shape
from workbook.records import load_results
from grids import FULL
from helpers import everywhere, INTERPRETED, example_module, planted, unchanged
from test_contrast import exact_positives, exact_sigmoid
from test_margins import MagFace

f32, f64 = torch.float32, torch.float64
DEVICE = "cuda" if os.environ.get("SHARDED_BACKEND") == "nccl" else "cpu"
CASES, ON_GPUS = {}, ("losses_and_gradients", "product_against_one_process", "product_in_bf16_by_chunks", "rows_arrive_as_kernels_read_them", "product_remakes_an_offset_on_one_rank", "product_sends_three_numbers_a_chunk",
                      "ranks_choose_alike", "log_probs_against_one_process", "log_probs_that_raise_on_every_rank", "classes_of_a_row_against_one_process", "classes_of_a_row_lie_otherwise_on_each_rank", "topk_against_one_process", "topk_by_kernels", "hostile_topk", "samples_against_one_process", "hostile_samples", "answers_that_ranks_disagree_on", "answers_beside_a_mesh", "ranks_that_differ_on_gpus_lose_their_result", "divergences_against_one_process", "labels_of_one_rank_or_none", "statistics", "half_precision_and_autocast",
                      "collectives_are_counted", "heads_match_one_process", "a_method_that_cannot_be_raises_on_ranks_without_a_class", "half_precision_heads", "tokens_that_are_not_the_same", "what_is_wrong_on_one_rank_raises_on_all", "curves_do_not_know_the_ranks",
                      "fsdp_with_its_head_apart", "fsdp_at_the_root", "ddp_through_its_forward", "ddp_and_a_head_over_ranks", "tensor_parallel",
                      "sequence_parallel", "wrong_reductions_raise", "contrast_by_a_ring", "positives_by_a_ring", "a_contrast_has_the_same_bits_on_all_ranks", "positives_of_ranks_that_disagree", "contrasts_of_nothing_over_ranks", "contrast_of_ranks_that_disagree", "every_argument_works_or_raises", "planted_bugs_are_noticed",
                      "peers_over_ranks_say_what_pytorch_says", "the_example_measures_in_turn")


def case(fn):
    "Register a case under its name; it is called with the meshes of 1, 2, 3 and 4 ranks"
    CASES[fn.__name__] = fn
    return fn


def fails_on_one_rank(meshes):
    assert dist.get_rank(), "on purpose"


FAULTS = {"fails_on_one_rank": fails_on_one_rank}  # what tests of the tests ask for


def mine(meshes):
    "(R, mesh, rank) of each group that this process is in; all meshes' processes go in step"
    for mesh in meshes:
        if mesh.get_coordinate() is not None:
            yield mesh.size(), mesh, mesh.get_local_rank()


def some(meshes):
    "Those of two and four ranks, and in a full run all"
    return meshes if FULL else meshes[1::2]


def spread(t, mesh, dim=0):
    "A DTensor of rows that every process has, made without a message"
    rows = shard_range(t.shape[dim], mesh.size(), mesh.get_local_rank())
    part = t.narrow(dim, rows.start, len(rows)).clone()
    return DTensor.from_local(part, mesh, [Shard(dim)], run_check=False, shape=t.shape, stride=t.stride())


def uneven(t, mesh):
    "A rank's rows, more of each rank than of the one before"
    squares, rank = mesh.size()**2, mesh.get_local_rank()
    return t[len(t) * rank**2 // squares:len(t) * (rank + 1)**2 // squares]


def raises(error, words, call):
    "Fail unless `call` raises an error that says these words"
    try:
        call()
    except error as e:
        assert words in str(e), str(e)
    else:
        raise AssertionError(f"no {error.__name__} about {words!r}")


def refused_or_nan(words, call):
    "Where ranks have other tensors: on CPUs an error that says these words, on GPUs, where nobody waits, a loss that is no number"
    if DEVICE == "cpu":
        raises(ValueError, words, call)
    else:
        assert call().isnan().all()


def local(t):
    "This rank's part of a DTensor"
    return t.to_local() if isinstance(t, DTensor) else t


def whole(t):
    "All of a DTensor"
    return t.full_tensor() if isinstance(t, DTensor) else t


def problem(n, h, v, seed=0, dtype=f64):
    "Input, weight, bias, labels (some ignored), class weights, token weights"
    g = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(size, generator=g, dtype=dtype).to(DEVICE)
    y = torch.randint(v, (n,), generator=g).to(DEVICE)
    y[::4] = -100
    return draw(n, h), draw(v, h), draw(v), y, draw(v).abs(), draw(n).abs()


OPTIONS = [dict(), dict(label_smoothing=0.1), dict(softcap=2.0, logit_scale=1.5), dict(z_loss=1e-2), dict(weights=True),
           dict(label_smoothing=0.3, weights=True, z_loss=1e-2, softcap=3.0, logit_scale=0.5)]


def against_one(mesh, n, v, seed, options, reduction, kind, bias, tokens, labels=None, **more):
    "Loss and gradients of a group, against stage 7 on one process"
    options = dict(options)
    x, w, b, y, class_weight, token_weight = problem(n, 4, v, seed)
    if labels is not None:
        y = labels(y)
    if options.pop("weights", False):
        options["weight"] = class_weight
    options.update(reduction=reduction)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    wanted = recompute_linear_cross_entropy(*leaves[:2], y, linear_bias=leaves[2] if bias else None,
                                            token_weight=token_weight if tokens else None, **options)
    g = torch.linspace(-1, 2, wanted.numel(), dtype=f64, device=DEVICE).view(wanted.shape)
    exact = torch.autograd.grad(wanted, leaves[:3 if bias else 2], g)
    here = dict(plain=lambda t: t, rows=lambda t: spread(t, mesh).to_local(), own=lambda t: uneven(t, mesh))[kind]
    leaves = [spread(x, mesh).requires_grad_() if kind == "rows" else here(x).clone().requires_grad_(),
              spread(w, mesh).requires_grad_(), spread(b, mesh).requires_grad_()]
    how = None if kind == "plain" else ("mean", "sum")[seed % 2]
    got = fl.linear_cross_entropy(*leaves[:2], here(y), linear_bias=leaves[2] if bias else None, backbone_reduction=how,
                                  token_weight=here(token_weight) if tokens else None, **options, **more)
    of_mine = here if reduction == "none" else lambda t: t
    assert_close(got, of_mine(wanted))
    exact = [here(exact[0]) * (mesh.size() if how == "mean" else 1), *exact[1:]]
    for a, b in zip(torch.autograd.grad(got, leaves[:3 if bias else 2], of_mine(g)), exact):
        assert_close(a.to_local() if kind == "rows" and b is exact[0] else whole(a), b)


@case
def losses_and_gradients(meshes):
    draw = random.Random(1)
    for ranks, mesh, rank in mine(meshes):
        draw.seed(ranks)
        for number in range(24 if FULL else 4):
            options, reduction = draw.choice(OPTIONS), draw.choice(["mean", "sum", "none"])
            against_one(mesh, draw.choice([0, 1, 2, 9, 13]), draw.choice([1, 2, 5, 11]), number, options, reduction,
                        draw.choice(["plain", "rows", "own"]), draw.random() < 0.5, draw.random() < 0.5)


@case
def a_scale_that_is_learned(meshes):
    for ranks, mesh, rank in mine(some(meshes)):
        for reduction, kind, how in (("mean", "plain", None), ("none", "plain", None), ("sum", "own", "mean"), ("none", "own", "sum"), ("mean", "own", "mean")):
            got, wanted = answers(sharded, mesh, kind, reduction, how)
            for a, e in zip(got, wanted):
                assert_close(a, e)
        x, w, _, y, _, _ = problem(8, 4, 11)
        scale, split = torch.tensor(1.3, dtype=f64, device=DEVICE, requires_grad=True), spread(x, mesh)
        ask = lambda how: fl.linear_cross_entropy(split, spread(w, mesh), spread(y, mesh), logit_scale=scale, backbone_reduction=how)
        if ranks > 1:
            raises(ValueError, "backbone_reduction: expected 'mean' where", lambda: ask(None))
        found, = torch.autograd.grad(ask("sum"), scale)
        dist.all_reduce(found, group=mesh.get_group())
        assert_close(found, torch.autograd.grad(recompute_linear_cross_entropy(x, w, y, logit_scale=scale), scale)[0])


@case
def product_against_one_process(meshes):
    draw, options = random.Random(), [dict(), dict(z_loss=1e-2, logit_scale=1.5), dict(weights=True)]
    for ranks, mesh, rank in mine(some(meshes)):
        draw.seed(ranks)
        for number, kind in enumerate(("plain", "rows", "own")):
            for n, v, budget in ((9, 11, None), (13, 5, 3000), (1, 2, None), (0, 3, None)):  # 13 tokens are several chunks
                against_one(mesh, n, v, number, options[number], draw.choice(["mean", "sum"]), kind, False, draw.random() < 0.5, method="product",
                            memory_budget=budget)


@case
def product_in_bf16_by_chunks(meshes):
    "Three chunks and more in two rooms, by the kernel where there is one; rows that came with their labels included"
    from fusedloss.sharded_product import chunk_row, kernel_everywhere
    x, w, _, y, class_weight, token_weight = problem(200, 64, 300, dtype=f32)
    leaves = [t.bfloat16().requires_grad_() for t in (x, w)]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    wanted = recompute_linear_cross_entropy(*doubles, y, weight=class_weight.double(), token_weight=token_weight.double())
    exact = torch.autograd.grad(wanted, doubles)
    for ranks, mesh, rank in mine(meshes):
        kernel = kernel_everywhere(leaves[0], core_ranks.shards_on(mesh, 300))
        assert kernel == (DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9)
        budget = 60 * chunk_row(64, -(-300 // ranks), torch.bfloat16, kernel)
        for kind, here, how in (("plain", torch.clone, None), ("spread", lambda t: spread(t, mesh), "sum"), ("own", lambda t: uneven(t, mesh), "sum")):
            own = [here(leaves[0].detach()).requires_grad_(), spread(leaves[1].detach(), mesh).requires_grad_()]
            got = fl.linear_cross_entropy(*own, here(y), weight=class_weight, token_weight=here(token_weight), method="product", memory_budget=budget,
                                          backbone_reduction=how)
            assert_close(got.double(), wanted, rtol=1e-3, atol=1e-3)
            mine_of_x = local(here(exact[0])) if kind != "plain" else exact[0]
            for name, a, e in zip(("dx", "dw"), torch.autograd.grad(got, own), (mine_of_x, exact[1])):
                a = local(a) if name == "dx" else whole(a)
                assert not len(e) or (a - e).norm() < 1e-2 * e.norm(), (name, kind, ranks)


@case
def rows_arrive_as_kernels_read_them(meshes):
    "Labels and weights one after the other; features at multiples of 16 bytes"
    for ranks, mesh, rank in mine(meshes):
        s = core_ranks.shards_on(mesh, 10)
        x, y, token_weight = torch.randn(3, 5, device=DEVICE).bfloat16(), torch.arange(3, device=DEVICE) + 10 * rank, torch.rand(3, device=DEVICE)
        b = core_ranks.RankTokens(False, 3, 4)
        features, labels, weights = core_ranks.gather_rows(x, y, token_weight, b, s, -100)
        assert labels.is_contiguous() and weights.is_contiguous() and features.stride(1) == 1
        assert features.data_ptr() % 16 == 0 and features.stride(0) * features.element_size() % 16 == 0
        assert labels.tolist() == [v for r in range(ranks) for v in (10 * r, 10 * r + 1, 10 * r + 2, -100)]


@case
def product_remakes_an_offset_on_one_rank(meshes):
    x, w, _, y, _, _ = problem(9, 4, 24)
    x[:, 0], w[:, 0] = 1.0, 0.0
    w[23, 0] = 1500.0  # of the last rank's classes, and no rank looks at it but for its offset
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    wanted = recompute_linear_cross_entropy(*leaves, y)
    exact = torch.autograd.grad(wanted, leaves)
    first = mock.patch("fusedloss.product.sampled_scores", lambda x, w, bias: x @ w[:1].T)
    for ranks, mesh, rank in mine(meshes):
        own = [x.clone().requires_grad_(), spread(w, mesh).requires_grad_()]
        with first:
            got = fl.linear_cross_entropy(*own, y, method="product")
        assert_close(got, wanted)
        for a, e in zip(torch.autograd.grad(got, own), exact):
            assert_close(whole(a), e)


@case
def product_sends_three_numbers_a_chunk(meshes):
    from torch.distributed.tensor.debug import CommDebugMode
    x, w, _, y, _, _ = problem(9, 4, 10)
    shared = 1 + (DEVICE == "cuda")  # facts; and numbers made of the labels, where they are compared on a GPU
    for ranks, mesh, rank in mine(meshes):
        weight, tokens = spread(w, mesh).requires_grad_(), spread(x, mesh).requires_grad_()
        with CommDebugMode() as mode:
            fl.linear_cross_entropy(x.clone().requires_grad_(), weight, y, method="product").backward()
        assert counts(mode) == {"allgather_base": shared + 1, "allreduce": 1}, counts(mode)
        with CommDebugMode() as mode:  # one chunk of each token; facts and rows are gathered before
            loss = fl.linear_cross_entropy(tokens, weight, spread(y, mesh), backbone_reduction="sum", method="product", memory_budget=1)
        gathered = ranks * len(shard_range(9, ranks, 0))
        assert counts(mode) == {"allgather_base": 2 + gathered, "reduce_scatter_base": 1}, counts(mode)
        with CommDebugMode() as mode:  # gradients are there
            loss.backward()
        assert not counts(mode), counts(mode)
        with CommDebugMode() as mode:  # nobody asks for dx: nobody reduces
            fl.linear_cross_entropy(x, weight, y, method="product").backward()
        assert counts(mode) == {"allgather_base": shared + 1}, counts(mode)


@case
def product_raises_on_every_rank(meshes):
    x, w, b, y, _, _ = problem(8, 4, 10)
    for ranks, mesh, rank in mine(meshes):
        weight, tokens, labels = spread(w, mesh), spread(x, mesh), spread(y, mesh).to_local().clone()
        if rank == 0:
            labels[0] = 10  # on one rank alone, and yet all raise
        of = lambda **more: lambda: fl.linear_cross_entropy(x, weight, y, method="product", **more)
        raises(IndexError, "expected 0 ≤ label < 10", lambda: fl.linear_cross_entropy(tokens, weight, labels, method="product"))
        raises(ValueError, "label_smoothing: expected 0 for method='product' over ranks", of(label_smoothing=0.1))
        raises(ValueError, "linear_bias: expected None for method='product'", of(linear_bias=spread(b, mesh)))
        raises(ValueError, "accumulate: expected 'auto' or 'native' for method='product'", of(accumulate="float32"))
        if ranks > 1:
            raises(ValueError, "target: expected the same on all ranks",
                   lambda: fl.linear_cross_entropy(x, weight, (y + (rank == 0)) % 10, method="product"))


@case
def ranks_choose_alike(meshes):
    from fusedloss.core.ranks import all_say
    for ranks, mesh, rank in mine(meshes):
        s, device = core_ranks.shards_on(mesh, 10), torch.device(DEVICE)
        assert not all_say(rank > 0, s, device, "some do not") and all_say(True, s, device, "all do")
        assert not all_say(True, s, device, "some do not"), "remembered"


@case
def log_probs_against_one_process(meshes):
    x, w, b, y, _, _ = problem(9, 4, 11)
    all_of_it = dict(entropy=True, mean_logits=True, target_rank=True)
    up, at = torch.linspace(-1, 2, 9, dtype=f64, device=DEVICE), torch.linspace(0.3, 1, 9, dtype=f64, device=DEVICE)
    for how in (dict(temperature=0.7, logit_scale=1.5, softcap=3.0), dict(temperature=at + 0.2, softcap=3.0)):
        leaves = [t.clone().requires_grad_() for t in (x, w, b)]
        wanted = fl.linear_log_probs(*leaves[:2], y, linear_bias=leaves[2], **all_of_it, **how)
        exact = torch.autograd.grad((up * wanted.log_probs + at * wanted.entropy).sum(), leaves)
        for ranks, mesh, rank in mine(some(meshes)):
            for kind, here in (("plain", lambda t: t), ("own", lambda t: uneven(t, mesh))):
                own = [here(x).clone().requires_grad_(), spread(w, mesh).requires_grad_(), spread(b, mesh).requires_grad_()]
                given = {name: here(value) if isinstance(value, torch.Tensor) else value for name, value in how.items()}
                got = fl.sharded_linear_log_probs(*own[:2], here(y), linear_bias=own[2], backbone_reduction=None if kind == "plain" else "sum",
                                                  **all_of_it, **given)
                assert_close([*got], [*map(here, wanted)])
                grads = torch.autograd.grad((here(up) * got.log_probs + here(at) * got.entropy).sum(), own)
                for a, e in zip(grads, (here(exact[0]), *exact[1:])):
                    assert_close(whole(a), e)


@case
def log_probs_that_raise_on_every_rank(meshes):
    x, w, _, y, _, _ = problem(9, 4, 11)
    for ranks, mesh, rank in mine(meshes):
        only = fl.sharded_linear_log_probs(x, spread(w, mesh), y)
        assert only[1:] == (None, None, None)
        assert_close(only.log_probs, fl.linear_log_probs(x, w, y).log_probs)
        split = fl.sharded_linear_log_probs(spread(x, mesh), spread(w, mesh), spread(y, mesh), temperature=spread(x[:, 0].exp(), mesh))
        assert_close(split.log_probs, local(spread(fl.linear_log_probs(x, w, y, temperature=x[:, 0].exp()).log_probs, mesh)))
        of = lambda *given, **how: lambda: fl.sharded_linear_log_probs(*(given or (x, spread(w, mesh), y)), **how)
        if DEVICE == "cpu":
            raises(IndexError, "expected 0 ≤ label < 11", of(x, spread(w, mesh), y + 5))
        else:
            assert of(x, spread(w, mesh), y + 5)().log_probs.isnan().any()
        raises(ValueError, "temperature: expected a positive number", of(temperature=0))
        raises(ValueError, "temperature: expected a positive number, or a float tensor of the target's shape [9]", of(temperature=x[1:, 0]))
        if DEVICE == "cpu":
            raises(ValueError, "temperature: expected positive, finite numbers" if rank == 0 or ranks == 1 else "an error on rank 0",
                   of(temperature=torch.where(y == y, rank, 0).double()))
        if ranks > 1:
            raises(ValueError, "entropy, target_rank and mean_logits: expected the same on all ranks", of(entropy=rank == 0, target_rank=rank > 0))
            raises(ValueError, "numbers of tokens: expected the same on all ranks", of(temperature=x[:, 0].exp() if rank else 1.0))
            if DEVICE == "cpu":
                raises(ValueError, "temperature: expected the same on all ranks", of(temperature=x[:, 0].exp() + rank))


@case
def classes_of_a_row_against_one_process(meshes):
    "K classes a row: some ignored, some rows wholly; a class of every rank"
    x, w, b, _, _, _ = problem(9, 4, 11)
    y = torch.randint(11, (9, 3), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    y[0], y[4, 1], y[5, 0], y[8] = -100, -100, -100, torch.tensor([10, 10, 0], device=DEVICE)
    up, at = torch.linspace(-1, 2, 27, dtype=f64, device=DEVICE).view(9, 3), torch.linspace(0.3, 1, 9, dtype=f64, device=DEVICE)
    for how in (dict(temperature=0.7, logit_scale=1.5, softcap=3.0, entropy=True, mean_logits=True), dict(temperature=at + 0.2)):
        leaves = [t.clone().requires_grad_() for t in (x, w, b)]
        wanted = fl.linear_log_probs(*leaves[:2], y, linear_bias=leaves[2], **how)
        total = lambda found, up, at: (up * found.log_probs).sum() + (0 if found.entropy is None else (at * found.entropy).sum())
        exact = torch.autograd.grad(total(wanted, up, at), leaves)
        for ranks, mesh, rank in mine(meshes):
            for kind, here in (("plain", lambda t: t), ("own", lambda t: uneven(t, mesh))):
                own = [here(x).clone().requires_grad_(), spread(w, mesh).requires_grad_(), spread(b, mesh).requires_grad_()]
                given = {name: here(value) if isinstance(value, torch.Tensor) else value for name, value in how.items()}
                got = fl.sharded_linear_log_probs(*own[:2], here(y), linear_bias=own[2], backbone_reduction=None if kind == "plain" else "sum", **given)
                assert_close([*got], [None if t is None else here(t) for t in wanted])
                grads = torch.autograd.grad(total(got, here(up), here(at)), own)
                for a, e in zip(grads, (here(exact[0]), *exact[1:])):
                    assert_close(whole(a), e)
    for ranks, mesh, rank in mine(meshes):
        with torch.autocast(DEVICE, torch.bfloat16):
            cast = fl.sharded_linear_log_probs(x.float(), spread(w.float(), mesh), y), fl.linear_log_probs(x.float(), w.float(), y)
        assert_close(*cast, rtol=1e-5, atol=1e-5)
        call = lambda y=y, **how: fl.sharded_linear_log_probs(x, spread(w, mesh), y, **how)
        split = fl.sharded_linear_log_probs(spread(x, mesh), spread(w, mesh), spread(y, mesh))
        assert_close(split.log_probs, local(spread(fl.linear_log_probs(x, w, y).log_probs, mesh)))
        raises(ValueError, "target: expected at least one class a row", lambda: call(y[:, :0]))
        raises(ValueError, "target_rank: expected False beside several classes a row", lambda: call(target_rank=True))
        if DEVICE == "cpu":
            raises(IndexError, "expected 0 ≤ label < 11", lambda: call(torch.where(y == y[8, 0], 11, y)))
        if ranks > 1:
            raises(ValueError, "classes a row: expected the same on all ranks", lambda: call(y[:, :2] if rank else y))
        if ranks > 1 and DEVICE == "cpu":
            raises(ValueError, "target of K classes: expected the same on all ranks", lambda: call(torch.where(y == 10, 10 - rank, y)))


TOPK = dict(temperature=0.7, logit_scale=1.5, softcap=3.0)


@case
def classes_of_a_row_lie_otherwise_on_each_rank(meshes):
    "In PyTorch, and by kernels where they are interpreted"
    x, w, *_ = problem(9, 4, 11, dtype=f32)
    y, exact = torch.arange(27, device=DEVICE).view(9, 3) % 11, w.clone().requires_grad_()
    wanted = fl.linear_log_probs(x, exact, y).log_probs
    dw, = torch.autograd.grad(wanted[:, 1:].sum(), exact)
    for takes in (lambda t: False, lambda t: t.numel() > 0) if INTERPRETED and DEVICE == "cpu" else (None,):
        with pytest.MonkeyPatch.context() as patch:
            for module, name in ((triton, "has_kernel"), (products, "takes_kernel")) if takes else ():
                everywhere(patch, module, name, takes)
            for ranks, mesh, rank in mine(meshes):
                own = spread(w, mesh).requires_grad_()
                got = fl.sharded_linear_log_probs(x, own, y if rank % 2 else y.T.contiguous().T).log_probs
                assert_close(got, wanted)
                assert_close(whole(torch.autograd.grad(got[:, 1:].sum(), own)[0]), dw, rtol=1e-5, atol=1e-5)


@case
def topk_against_one_process(meshes):
    "Values, ties and gradients; k of one class, of more than a rank has, and of all; ranks without classes or tokens"
    for n, v, ks, how, each in ((9, 11, (1, 4, 11), TOPK, False), (9, 11, (1, 4), TOPK, True), (6, 3, (1, 2, 3), {}, False), (2, 10, (3, 9), {}, False)):
        heat = torch.linspace(0.4, 2, n, dtype=f64, device=DEVICE)
        with_heat = lambda part: how | (dict(temperature=part(heat)) if each else {})
        x, w, b = (t.round() for t in problem(n, 4, v)[:3])  # scores that are equal, and equal in every program
        w[-1], b[-1] = w[0], b[0]
        for k in ks:
            leaves = [t.clone().requires_grad_() for t in (x, w, b)]
            wanted = fl.linear_topk(*leaves[:2], k, linear_bias=leaves[2], **with_heat(lambda t: t))
            up, at = torch.linspace(-1, 2, n * k, dtype=f64, device=DEVICE).view(n, k), torch.linspace(0.3, 1, n, dtype=f64, device=DEVICE)
            exact = torch.autograd.grad((up * wanted.log_probs).sum() + (at * wanted.lse).sum(), leaves)
            for ranks, mesh, rank in mine(meshes):
                for kind, here in (("plain", lambda t: t), ("own", lambda t: uneven(t, mesh))):
                    own = [here(x).clone().requires_grad_(), spread(w, mesh).requires_grad_(), spread(b, mesh).requires_grad_()]
                    reduction = None if kind == "plain" else "mean"
                    got = fl.sharded_linear_topk(*own[:2], k, linear_bias=own[2], backbone_reduction=reduction, **with_heat(here))
                    assert_close([*got], [*map(here, wanted)])
                    grads = torch.autograd.grad((here(up) * got.log_probs).sum() + (here(at) * got.lse).sum(), own)
                    for a, e in zip(grads, (here(exact[0]) * (ranks if reduction else 1), *exact[1:])):
                        assert_close(whole(a), e)


@case
def topk_by_kernels(meshes):
    "Equal scores in tiles of several ranks, classes that cannot be, ranks with fewer tiles than k or none; all ranks together compute k tiles of a row again"
    if DEVICE == "cpu" and not INTERPRETED: return
    import fusedloss.topk as topk
    counted, listed = [], topk.launch_listed_scores
    def counting(x, w, bias, temperature, tiles, o, t):
        counted.append((tiles < -(-len(w) // t.BV)).sum(1))
        return listed(x, w, bias, temperature, tiles, o, t)
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu": everywhere(patch, products, "takes_kernel", lambda t: t.numel() > 0)
        everywhere(patch, topk, "launch_listed_scores", counting)
        for v, k, left, each in ((2100, 5, None, False), (2100, 70, None, False), (2100, 4, 3, False), (1500, 9, None, True), (3, 2, None, False)):
            x, w, b = (t.round().to(f32 if DEVICE == "cpu" else torch.bfloat16) for t in problem(4, 4, v)[:3])  # scores that are equal
            if left: b[torch.arange(v, device=DEVICE) % (v // left) != 7] = -math.inf  # fewer than k classes can be
            how = dict(temperature=torch.linspace(0.5, 2, 4, device=DEVICE)) if each else {}
            wanted = fl.linear_topk(x, w, k, linear_bias=b, **how)
            for ranks, mesh, rank in mine(meshes):
                counted.clear()
                got = fl.sharded_linear_topk(x, spread(w, mesh), k, linear_bias=spread(b, mesh), **how)
                assert_close([*got], [*wanted], rtol=1e-5, atol=1e-5)
                again = sum(counted, torch.zeros(4, dtype=torch.int64, device=DEVICE))
                dist.all_reduce(again, group=mesh.get_group())
                if k <= 9 < v: assert (again == k).all(), again


@case
def hostile_topk(meshes):
    "Classes that cannot be, an offset that all scores share, a row with a NaN, half precision, sequences, autocast, a learned scale"
    x, w, b, *_ = problem(6, 4, 9)
    for ranks, mesh, rank in mine(meshes):
        few = torch.where(torch.arange(9, device=DEVICE) % 4 == 1, b, -math.inf)  # two classes that can be
        pair = [find(x, place(w), 5, linear_bias=place(few)) for find, place in
                ((fl.linear_topk, lambda t: t), (fl.sharded_linear_topk, lambda t: spread(t, mesh)))]
        assert_close(*pair)
        far = fl.sharded_linear_topk(x, spread(w, mesh), 3, linear_bias=spread(b + 1e6, mesh))
        assert_close(far.log_probs, fl.linear_topk(x, w, 3, linear_bias=b).log_probs, rtol=1e-7, atol=1e-7)
        broken = x.clone()
        broken[2, 1] = math.nan
        found, alone = fl.sharded_linear_topk(broken, spread(w, mesh), 3), fl.linear_topk(x, w, 3)
        assert found.log_probs[2].isnan().all() and ((found.indices >= 0) & (found.indices < 9)).all()
        assert_close(found.log_probs[3:], alone.log_probs[3:])
        split = fl.sharded_linear_topk(spread(x.view(2, 3, 4), mesh, 1), spread(w, mesh), 2)
        assert_close(split.indices, local(spread(fl.linear_topk(x, w, 2).indices.view(2, 3, 2), mesh, 1)))
        each = x[:, 0].exp().view(2, 3)
        split = fl.sharded_linear_topk(spread(x.view(2, 3, 4), mesh, 1), spread(w, mesh), 2, temperature=spread(each, mesh, 1))
        assert_close(split.lse, local(spread(fl.linear_topk(x.view(2, 3, 4), w, 2, temperature=each).lse, mesh, 1)))
        for dtype in (torch.bfloat16, torch.float16):
            half = [t.to(dtype) for t in (x, w)]
            pair = fl.sharded_linear_topk(half[0], spread(half[1], mesh), 4), fl.linear_topk(*half, 4)
            assert_close(*pair, rtol=1e-5, atol=1e-5)
        with torch.autocast(DEVICE, torch.bfloat16):
            pair = fl.sharded_linear_topk(x.float(), spread(w.float(), mesh), 4), fl.linear_topk(x.float(), w.float(), 4)
        assert_close(*pair, rtol=1e-5, atol=1e-5)
        scales = [torch.tensor(1.3, dtype=f64, device=DEVICE, requires_grad=True) for _ in range(2)]
        pair = [fl.sharded_linear_topk(x, spread(w, mesh), 3, linear_bias=spread(b, mesh), logit_scale=scales[0]),
                fl.linear_topk(x, w, 3, linear_bias=b, logit_scale=scales[1])]
        assert_close(*(torch.autograd.grad(found.log_probs[:, 1:].sum(), scale) for found, scale in zip(pair, scales)))
        for none, of in ((x[:0], w), (x[:0].float(), w.float())): assert fl.sharded_linear_topk(none, spread(of, mesh), 3).indices.shape == (0, 3)


FILTERS = [dict(), dict(top_k=4), dict(top_p=0.7), dict(min_p=0.2), dict(top_k=7, top_p=0.8, min_p=0.05), dict(top_k=1)]


@case
def samples_against_one_process(meshes):
    "The same tokens for the same seeds, on any number of ranks; filters with thresholds among equal scores of several ranks"
    from fusedloss.core.options import LossOptions
    from fusedloss.samples import Filters, plain_samples
    for n, v in ((40, 11), (12, 3), (2, 10)):
        x, w, b, *_ = problem(n, 4, v)
        x, w, b = x.round(), w.round(), b.round()  # scores that are equal
        w[-1], b[-1] = w[0], b[0]
        each, draws = torch.linspace(0.5, 2, n, dtype=f64, device=DEVICE), lambda seed: torch.Generator(DEVICE).manual_seed(seed)
        for ranks, mesh, rank in mine(meshes):
            for f in FILTERS:
                f = {name: min(value, v) for name, value in f.items()}
                for heat in (0.7, each):
                    wanted = fl.linear_sample(x, w, linear_bias=b, temperature=heat, softcap=5.0, generator=draws(5), **f)
                    got = fl.sharded_linear_sample(x, spread(w, mesh), linear_bias=spread(b, mesh), temperature=heat, softcap=5.0, generator=draws(5 + rank), **f)
                    assert_close(got, wanted, msg=lambda m: f"{n, v, ranks, f}: {m}")
                # tokens of each rank's own, and seeds of its own
                sizes = [n * (r + 1)**2 // ranks**2 - n * r**2 // ranks**2 for r in range(ranks)]
                seeds = torch.cat([torch.randint(2**63 - 1, (size,), generator=draws(r), device=DEVICE) for r, size in enumerate(sizes)])
                filters = Filters(f.get("top_k", 0), f.get("top_p", 1.0), f.get("min_p", 0.0))
                wanted = plain_samples(x, w, seeds, b, each, LossOptions(), filters)
                got = fl.sharded_linear_sample(uneven(x, mesh), spread(w, mesh), linear_bias=spread(b, mesh), temperature=uneven(each, mesh),
                                               generator=draws(rank), backbone_reduction="sum", **f)
                assert_close([*got], [uneven(t, mesh) for t in wanted], msg=lambda m: f"own, {n, v, ranks, f}: {m}")


@case
def hostile_samples(meshes):
    "Classes that cannot be, a row with a NaN, half precision, sequences, no tokens"
    x, w, b, *_ = problem(6, 4, 9)
    draw = lambda call, *given, **how: call(*given, generator=torch.Generator(DEVICE).manual_seed(1), **how)
    for ranks, mesh, rank in mine(meshes):
        few = torch.where(torch.arange(9, device=DEVICE) % 4 == 1, b, -math.inf)
        broken = x.clone()
        broken[2, 1] = math.nan
        for f in FILTERS:
            pair = draw(fl.sharded_linear_sample, x, spread(w, mesh), linear_bias=spread(few, mesh), **f), draw(fl.linear_sample, x, w, linear_bias=few, **f)
            assert_close(*pair)
            found, alone = draw(fl.sharded_linear_sample, broken, spread(w, mesh), **f), draw(fl.linear_sample, x, w, **f)
            assert found.log_probs[2].isnan() and 0 <= found.tokens[2] < 9
            keep = [0, 1, 3, 4, 5]
            assert_close([t[keep] for t in found], [t[keep] for t in alone])
            far = draw(fl.sharded_linear_sample, x, spread(w, mesh), linear_bias=spread(b + 1e6, mesh), **f)
            assert torch.equal(far.tokens, draw(fl.linear_sample, x, w, linear_bias=b, **f).tokens)
            assert draw(fl.sharded_linear_sample, x[:0], spread(w, mesh), **f).tokens.shape == (0,)
        half = x.bfloat16(), w.bfloat16()
        with mock.patch.object(sharded, "BUDGET", 4 * 128 * -(-9 // ranks)):  # chunks of four rows and two
            pair = draw(fl.sharded_linear_sample, x, spread(w, mesh), **FILTERS[4]), draw(fl.linear_sample, x, w, **FILTERS[4])
        assert_close(*pair)
        with torch.autocast(DEVICE, torch.bfloat16):
            for given in (half, (x.float(), w.float())):
                pair = draw(fl.sharded_linear_sample, given[0], spread(given[1], mesh)), draw(fl.linear_sample, *given)
                assert_close(*pair, rtol=1e-5, atol=1e-5)
        split = fl.sharded_linear_sample(spread(x.view(2, 3, 4), mesh, 1), spread(w, mesh), top_k=1)
        assert torch.equal(split.tokens, local(spread((x @ w.T).argmax(1).view(2, 3), mesh, 1)))
        assert not fl.sharded_linear_sample(x.clone().requires_grad_(), spread(w, mesh).requires_grad_()).log_probs.requires_grad


ANSWER_BUGS = {
    "noise counted from a rank's first class": ("plain_gumbel(seeds, z.shape[1], z.dtype, start)", "plain_gumbel(seeds, z.shape[1], z.dtype)"),
    "each rank's own seeds": ("if b.shared: seeds = all_gather(seeds, s)[0]", "seeds = seeds"),
    "noise above maxima of each rank": ("(parts[2] + rise)", "parts[2]"),
    "thresholds of this rank alone": ("all_reduce(from_each.gather(1, torch.searchsorted(keys, key, right=above)), s)",
                                      "from_each.gather(1, torch.searchsorted(keys, key, right=above))"),
    "equal scores of lower ranks forgotten": ("[:s.rank].sum(0)", "[:0].sum(0)"),
    "candidates past a rank's last class": ("best_places(candidates, classes < 0,", "best_places(candidates, classes < -1,"),
    "candidates counted from a rank's first class": ("(found.indices + s.start)", "found.indices"),
    "the best classes without their temperatures": ("plain_topk(x, w, bias, temperature, o, here, budget)", "plain_topk(x, w, bias, None, o, here, budget)"),
    "the best classes' gradients without them": ("mine[:, 0].contiguous(), bias, None, temperature,", "mine[:, 0].contiguous(), bias, None, None,"),
    "logits of K classes from this rank alone": ("raw = all_reduce(raw, s)", "raw = raw"),
    "gradients of classes that others have": ("more._replace(gradients=more.gradients.masked_fill(more.classes < 0, 0.0))", "more"),
    "dx without the classes of a row": ("if listed: add_listed((total, None, None), (True, False, False), x, w, *more)", "pass"),
}


def answers_over_ranks(module, mesh):
    "Samples, the k best and K classes a row of a module over ranks, with gradients; and what they should be"
    x, w, b = (t.round() for t in problem(30, 4, 9)[:3])
    w[-1], b[-1], few = w[0], b[0], torch.where(torch.arange(9, device=DEVICE) == 8, b * 0, -math.inf)
    lists, g = torch.arange(90, device=DEVICE).remainder(9).view(30, 3), torch.linspace(-1, 2, 90, dtype=f64, device=DEVICE).view(30, 3)
    draws = lambda seed: torch.Generator(DEVICE).manual_seed(seed)
    for f in FILTERS[:3]:
        yield (module.sharded_linear_sample(x, spread(w, mesh), linear_bias=spread(b, mesh), temperature=3.0, generator=draws(mesh.get_local_rank()), **f),
               fl.linear_sample(x, w, linear_bias=b, temperature=3.0, generator=draws(0), **f))
    heat = torch.linspace(0.4, 2, 30, dtype=f64, device=DEVICE)
    for name, asked, bias, how in (("linear_topk", 3, b, {}), ("linear_topk", 7, few, {}), ("linear_topk", 3, b, {"temperature": heat}), ("linear_log_probs", lists, b, {})):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        wanted = getattr(fl, name)(*leaves, asked, linear_bias=bias, **how)
        own = [x.clone().requires_grad_(), spread(w, mesh).requires_grad_()]
        got = getattr(module, f"sharded_{name}")(*own, asked, linear_bias=spread(bias, mesh), **how)
        yield [t for t in got if t is not None], [t for t in wanted if t is not None]
        if bias is b:
            yield tuple([*map(whole, torch.autograd.grad((g * found.log_probs).sum(), of))] for found, of in ((got, own), (wanted, leaves)))


@case
def bugs_planted_in_answers_are_noticed(meshes):
    for ranks, mesh, rank in mine(meshes[1:2]):
        for bug, pairs in {None: unchanged(ANSWER_BUGS.values()), **ANSWER_BUGS}.items():
            with tempfile.TemporaryDirectory() as folder:
                pairs = [*answers_over_ranks(planted(sharded, Path(folder), *pairs), mesh)]
            off = [not torch.allclose(a, e, equal_nan=True) for got, wanted in pairs for a, e in zip(got, wanted)]
            found = torch.tensor(float(any(off)), device=DEVICE)
            dist.all_reduce(found, group=mesh.get_group())
            assert bool(found) == (bug is not None), bug


@case
def answers_that_ranks_disagree_on(meshes):
    "k, filters, options, shapes: every rank raises, and names what differs or which rank is wrong"
    x, w, b, *_ = problem(6, 4, 9)
    for ranks, mesh, rank in mine(meshes[1:]):
        last, weight = rank == ranks - 1, spread(w, mesh)
        topk = lambda k=2, x=x, **how: fl.sharded_linear_topk(x, weight, k, **how)
        draw = lambda x=x, **how: fl.sharded_linear_sample(x, weight, **how)
        wrong = lambda words, call: raises(ValueError, words if last else f"an error on rank {ranks - 1}: {words}", call)
        raises(ValueError, "k: expected the same on all ranks", lambda: topk(3 if last else 2))
        raises(ValueError, "top_k, top_p and min_p: expected the same on all ranks", lambda: draw(top_p=0.9 if last else 0.8))
        wrong("k: expected an integer from 1 to 9", lambda: topk(10 if last else 2))
        wrong("top_p: expected a number above 0", lambda: draw(top_p=1.5 if last else 0.5))
        wrong("top_k: expected an integer from 1 to the 9 classes", lambda: draw(top_k=10 if last else 9))
        wrong("generator: expected a torch.Generator", lambda: draw(generator=3 if last else None))
        wrong("temperature: expected a positive number", lambda: topk(temperature=-1.0 if last else 1.0))
        for call in (topk, draw):
            raises(ValueError, "options: expected the same on all ranks", lambda: call(softcap=3.0 if last else 2.0))
            raises(ValueError, "input: expected the same on all ranks", lambda: call(x=x[last:]))
            raises(ValueError, "linear_bias: expected the same on all ranks", lambda: call(linear_bias=weight[:, 0] if last else None))
            if DEVICE == "cpu":
                raises(ValueError, "input: expected the same on all ranks; for tokens of each rank's own", lambda: call(x=x + last))
        raises(ValueError, "linear_weight: expected [Shard(0)]", lambda: fl.sharded_linear_topk(x, spread(w, mesh, 1), 2))
        for call in (topk, draw):
            raises(ValueError, "numbers of tokens: expected the same on all ranks", lambda: call(temperature=x[:, 0].exp() if last else 1.0))
            wrong("temperature: expected a positive number, or a float tensor of the input's leading shape", lambda: call(temperature=x[:6 - last, 0].exp()))
            if DEVICE == "cpu": wrong("temperature: expected positive, finite numbers", lambda: call(temperature=x[:, 0].exp() - 9 * last))
        assert topk().indices.shape == (6, 2) and draw().tokens.shape == (6,)


@case
def answers_beside_a_mesh(meshes):
    "Rows of a rank, no DTensor; and how many messages"
    from torch.distributed.tensor.debug import CommDebugMode
    x, w, _, *_ = problem(9, 4, 10)
    shared = 1 + (DEVICE == "cuda")
    for ranks, mesh, rank in mine(meshes):
        here = dict(mesh=mesh, num_classes=10)
        rows = spread(w, mesh).to_local().requires_grad_()
        with CommDebugMode() as mode:
            found = fl.sharded_linear_topk(x, rows, 3, **here)
        assert counts(mode) == {"allgather_base": shared + 1}, counts(mode)
        assert_close(found, fl.linear_topk(x, w, 3))
        assert [g.shape for g in torch.autograd.grad(found.log_probs.sum(), [rows])] == [rows.shape]
        with CommDebugMode() as mode:
            drawn = fl.sharded_linear_sample(x, rows, generator=torch.Generator(DEVICE).manual_seed(2), **here)
        assert counts(mode) == {"allgather_base": shared + 2}, counts(mode)  # the seeds too
        assert_close(drawn, fl.linear_sample(x, w, generator=torch.Generator(DEVICE).manual_seed(2)))


@case
def ranks_that_differ_on_gpus_lose_their_result(meshes):
    "As where nobody waits for a GPU: tensors are compared after the call has begun"
    x, w, b, y, _, token_weight = problem(9, 4, 11)
    with mock.patch.object(core_ranks, "is_compared_later", lambda fact: isinstance(fact, torch.Tensor)):
        for ranks, mesh, rank in mine(meshes[1:]):
            scale, labels = torch.tensor(1.5, dtype=f64, device=DEVICE), (y + (rank == 0)) % 11
            off = dict(labels=(labels, {}), weights=(y, dict(token_weight=token_weight + rank)), scale=(y, dict(logit_scale=scale + rank)))
            for method in ("recompute", "product"):
                own = [x.clone().requires_grad_(), spread(w, mesh).requires_grad_()]
                loss = fl.linear_cross_entropy(*own, y, token_weight=token_weight, logit_scale=scale, method=method)
                assert_close(loss, fl.linear_cross_entropy(x, w, y, token_weight=token_weight, logit_scale=scale))
                for target, how in off.values():
                    loss = fl.linear_cross_entropy(*own, target, method=method, **how)
                    dx, dw = torch.autograd.grad(loss, own)
                    assert loss.isnan() and dx[target != -100].isnan().all() and whole(dw).isnan().all()
            assert fl.sharded_linear_log_probs(x, spread(w, mesh), labels).log_probs.isnan().all()
            assert fl.sharded_linear_divergence(x + rank, spread(w, mesh), x, spread(w, mesh)).isnan()
            assert fl.sharded_linear_topk(x + rank, spread(w, mesh), 2).log_probs.isnan().all()
            assert fl.sharded_linear_sample(x + rank, spread(w, mesh)).log_probs.isnan().all()


def two_models(n, v, dtype=f64):
    "Input, weight and bias of a student and of a teacher, and weights of tokens, of which some are 0"
    (x, w, b, *_), (t_x, t_w, t_b, *_, token_weight) = problem(n, 4, v, 0, dtype), problem(n, 3, v, 1, dtype)
    return (x, w, b), (t_x, t_w, t_b), torch.where(torch.arange(n, device=DEVICE) % 4 == 1, 0.0, token_weight)


def divergence_answers(module, mesh, lies, tokens, **how):
    "Loss and gradients of a module's divergence over ranks, and what they should be"
    student, (t_x, t_w, t_b), token_weight = two_models(9, 11)
    per_token, weight = how.get("reduction") == "none", token_weight if tokens != "equal" else None
    here = (lambda t: uneven(t, mesh)) if lies == "own" else lambda t: t
    leaves = [t.clone().requires_grad_() for t in student]
    each, learned = (how.pop(name, False) for name in ("each", "learned"))  # a temperature for each token; a scale with a gradient
    cool, scale = torch.linspace(0.5, 2, 9, device=DEVICE, dtype=f64), torch.tensor(1.3, device=DEVICE, dtype=f64, requires_grad=True)
    scales, more = [scale] * learned, (lambda part: (dict(temperature=part(cool)) if each else {}) | (dict(logit_scale=scale) if learned else {}))
    wanted = fl.linear_divergence(*leaves[:2], t_x, t_w, linear_bias=leaves[2], teacher_bias=t_b, token_weight=weight, **how, **more(lambda t: t))
    g = torch.linspace(-1, 2, wanted.numel(), dtype=f64, device=DEVICE).view(wanted.shape)
    dx, *others = torch.autograd.grad(wanted, leaves + scales, g)
    own = [here(student[0]).clone().requires_grad_(), *(spread(t, mesh).requires_grad_() for t in student[1:])]
    got = module.sharded_linear_divergence(*own[:2], here(t_x), spread(t_w, mesh), linear_bias=own[2], teacher_bias=spread(t_b, mesh),
                                           token_weight=None if weight is None else here(weight), memory_budget=3 * 16 * 8 * 4,
                                           backbone_reduction="mean" if lies == "own" else None, **how, **more(here))
    found = torch.autograd.grad(got, own + scales, here(g) if per_token else g)
    if learned and lies == "own":  # each rank has the part of its tokens, which a wrapper averages
        dist.all_reduce(found[-1].div_(mesh.size()), group=mesh.get_group())
    times = mesh.size() if lies == "own" else 1
    return [got, *map(whole, found)], [here(wanted) if per_token else wanted, here(dx) * times, *others]


DIVERGENCES = [("plain", "weighed", dict(kind="forward_kl", softcap=3.0, temperature=0.7)), ("own", "equal", dict(kind="forward_kl", reduction="none")),
               ("own", "equal", dict(kind="reverse_kl")), ("plain", "equal", dict(kind="reverse_kl", reduction="none", teacher_softcap=2.0)),
               ("own", "weighed", dict(kind="reverse_kl", each=True, learned=True, teacher_logit_scale=0.6)),
               ("plain", "weighed", dict(kind="jsd", reduction="none", each=True, logit_scale=1.4)),
               ("plain", "equal", dict(kind="forward_kl", each=True, learned=True)), ("own", "equal", dict(kind="jsd", each=True, reduction="none")),
               ("own", "weighed", dict(kind="jsd", beta=0.3, reduction="none", softcap=3.0)), ("plain", "weighed", dict(kind="jsd", beta=0.8, reduction="sum"))]


@case
def divergences_against_one_process(meshes):
    for ranks, mesh, rank in mine(some(meshes)):
        for how in DIVERGENCES:
            for a, e in zip(*divergence_answers(fl, mesh, *how[:2], **how[2])):
                assert_close(a, e)


@case
def divergences_of_ranks_without_classes_or_tokens(meshes):
    for ranks, mesh, rank in mine(meshes[1:]):
        (x, w, _), (t_x, t_w, _), token_weight = two_models(3, 2)
        nothing = token_weight == 0
        hidden = [t.masked_fill(nothing[:, None], math.nan) for t in (x, t_x)]  # what has no weight is not looked at
        leaves = [uneven(hidden[0], mesh).clone().requires_grad_(), spread(w, mesh).to_local().requires_grad_()]
        got = fl.sharded_linear_divergence(leaves[0], leaves[1], uneven(hidden[1], mesh), spread(t_w, mesh).to_local(), mesh=mesh, num_classes=2,
                                           token_weight=uneven(token_weight, mesh), kind="jsd", backbone_reduction="sum")
        exact = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        wanted = fl.linear_divergence(*exact, t_x, t_w, token_weight=token_weight, kind="jsd")
        dx, dw = torch.autograd.grad(wanted, exact)
        assert_close([got, *torch.autograd.grad(got, leaves)], [wanted, uneven(dx, mesh), spread(dw, mesh).to_local()])


@case
def wrong_divergences_raise_on_every_rank(meshes):
    for ranks, mesh, rank in mine(meshes[1:3]):
        (x, w, b), (t_x, t_w, _), token_weight = two_models(4, 12)
        loss = lambda *given, **how: fl.sharded_linear_divergence(*given, **how)
        head, teacher_head = spread(w, mesh), spread(t_w, mesh)
        raises(ValueError, "teacher_weight: expected the student's 12 classes", lambda: loss(x, head, t_x, spread(t_w[1:], mesh)))
        raises(ValueError, "teacher_weight: expected the student's", lambda: loss(x, head, t_x, t_w))
        raises(ValueError, "teacher_input: expected shape [4, 3]", lambda: loss(x, head, t_x[1:], teacher_head))
        raises(ValueError, "linear_bias: expected floats of shape", lambda: loss(x, head, t_x, teacher_head, linear_bias=b))
        raises(ValueError, "backbone_reduction: expected 'mean', 'sum' or None", lambda: loss(x, head, t_x, teacher_head, backbone_reduction="max"))
        raises(ValueError, "kind: expected", lambda: loss(x, head, t_x, teacher_head, kind="kl"))
        raises(ValueError, "input: expected bfloat16, float32 or float64", lambda: loss(x.half(), head.half(), t_x.half(), teacher_head.half()))
        raises(ValueError, "mesh: expected one dimension, and num_classes", lambda: loss(x, head.to_local(), t_x, teacher_head.to_local(), mesh=mesh))
        raises(ValueError, "temperature: expected a positive number, or floats that broadcast to [4]", lambda: loss(x, head, t_x, teacher_head, temperature=t_x[:3, 0]))
        if DEVICE == "cpu":
            raises(ValueError, "input: expected the same on all ranks", lambda: loss(x + rank, head, t_x, teacher_head))
            raises(ValueError, "temperature: expected the same on all ranks", lambda: loss(x, head, t_x, teacher_head, temperature=x[:, 0].exp() + rank))
            raises(ValueError, "logit_scale: expected the same on all ranks", lambda: loss(x, head, t_x, teacher_head, logit_scale=x[0, 0] * 0 + rank))


DIVERGENCE_BUGS = {
    "a rank's own softmax": ("    q_top, p_top = parts[:, 0].amax(0), parts[:, 2].amax(0)\n", "    parts = parts[:1]\n    q_top, p_top = parts[0, 0], parts[0, 2]\n"),
    "the mixture of the classes here alone": ("all_gather(mixture_numbers(z, t, at, c.o, cool), c.s).sum(0)", "mixture_numbers(z, t, at, c.o, cool)"),
    "sums of two ranks at maxima of their own": ("(parts[:, 4] + rise * parts[:, top + 1])", "(parts[:, 4])"),
    "dx of this rank's classes": ("home = None if dx is None else reduce_scatter_rows(dx, c.b, c.s)()", "home = None if dx is None else dx[c.b.token_slice(c.s)]"),
    "the first temperatures for all": ("make(i), part(rows.temperature, i)", "make(i), part(rows.temperature, slice(0, i.stop - i.start))"),
    "rows that pad have a weight": ("weight.masked_fill(y < 0, 0.0), temperature)", "weight, temperature)"),
}


def is_wrong_divergence(module, mesh):
    "Whether some rank gets another loss or gradient than one process; all ranks finish all calls"
    pairs = [divergence_answers(module, mesh, *how[:2], **how[2]) for how in (DIVERGENCES[0], DIVERGENCES[2], DIVERGENCES[4], DIVERGENCES[-1])]
    off = [a.shape != e.shape or not torch.allclose(a, e) for got, wanted in pairs for a, e in zip(got, wanted)]
    found = torch.tensor(float(any(off)), device=DEVICE)
    dist.all_reduce(found, group=mesh.get_group())
    return bool(found)


@case
def bugs_planted_in_a_divergence_are_noticed(meshes):
    for ranks, mesh, rank in mine(meshes[1:2]):
        for bug, pairs in {None: unchanged(DIVERGENCE_BUGS.values()), **DIVERGENCE_BUGS}.items():
            with tempfile.TemporaryDirectory() as folder:
                assert is_wrong_divergence(planted(sharded, Path(folder), *pairs), mesh) == (bug is not None), bug


@case
def labels_of_one_rank_or_none(meshes):
    for ranks, mesh, rank in mine(some(meshes)):
        for labels in (lambda y: torch.full_like(y, 9), lambda y: torch.zeros_like(y), lambda y: torch.full_like(y, -100)):
            for kind in ("plain", "rows", "own"):
                against_one(mesh, 6, 10, 3, OPTIONS[-1], "mean", kind, True, True, labels)


@case
def ignore_index_may_be_a_class(meshes):
    x, w, _, y, _, _ = problem(9, 4, 7)
    y = y % 7
    wanted = recompute_linear_cross_entropy(x, w, y, ignore_index=2)
    for ranks, mesh, rank in mine(meshes):
        assert_close(fl.linear_cross_entropy(x, spread(w, mesh), y, ignore_index=2), wanted)
        assert_close(fl.linear_cross_entropy(spread(x, mesh), spread(w, mesh), spread(y, mesh), ignore_index=2), wanted)


@case
def statistics(meshes):
    x, w, b, y, _, _ = problem(11, 4, 9)
    w[4] = w[2]  # a tie
    b[4] = b[2]
    y[1] = y[2] = 4
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    _, wanted = recompute_linear_cross_entropy(*leaves, y, linear_bias=b, z_loss=0.1, return_stats=True)
    exact = torch.autograd.grad((wanted.lse.square() + wanted.entropy.square()).sum(), leaves)
    for ranks, mesh, rank in mine(meshes):
        for kind in ("plain", "rows"):
            here = (lambda t: t) if kind == "plain" else lambda t: spread(t, mesh).to_local()
            mine_ = [x.clone().requires_grad_() if kind == "plain" else spread(x, mesh).requires_grad_(), spread(w, mesh).requires_grad_()]
            _, got = fl.linear_cross_entropy(*mine_, here(y), linear_bias=spread(b, mesh), z_loss=0.1, return_stats=True,
                                              backbone_reduction=None if kind == "plain" else "sum")
            for name, a, e in zip(wanted._fields, got, wanted):
                assert_close(a, here(e) if e.dim() else e, msg=f"{name} on {ranks} ranks, {kind}")
            grads = torch.autograd.grad((got.lse.square() + got.entropy.square()).sum(), mine_)
            for a, e in zip(grads, exact):
                assert_close(whole(a), e)


@case
def shifts(meshes):
    x, w, _, _, _, _ = problem(30, 4, 7)
    x, y = x.view(3, 10, 4), torch.arange(30).view(3, 10) % 7
    y[1, 4] = -100
    token_weight = torch.linspace(0.5, 2, 30, dtype=f64).view(3, 10)
    for ranks, mesh, rank in mine(some(meshes)):
        for dim in (None, 0, 1):
            for reduction in ("mean", "none"):
                for k in (0, 1, 4, 12) if FULL else (1, 12) if dim else (4,):
                    leaf = x.clone().requires_grad_()
                    wanted = fl.linear_cross_entropy(leaf, w, y, token_weight=token_weight, shift=k, reduction=reduction)
                    exact, = torch.autograd.grad(wanted.square().sum(), leaf)
                    here = (lambda t: t) if dim is None else lambda t: spread(t, mesh, dim).to_local()
                    leaf = x.clone().requires_grad_() if dim is None else spread(x, mesh, dim).requires_grad_()
                    got = fl.linear_cross_entropy(leaf, spread(w, mesh), here(y), token_weight=here(token_weight), shift=k, reduction=reduction,
                                                  backbone_reduction=None if dim is None else "sum")
                    if reduction == "none" and dim is not None:
                        full = torch.cat([wanted, wanted.new_zeros(3, min(k, 10))], 1)
                        rows = shard_range(10 if dim else 3, ranks, rank)
                        wanted = full[:, rows.start:min(rows.stop, max(10 - k, 0))] if dim else wanted[rows.start:rows.stop]
                    assert_close(got, wanted)
                    assert_close(whole(torch.autograd.grad(got.square().sum(), leaf)[0]), exact)


@case
def shifts_of_own_sequences(meshes):
    x, w, _, _, _, _ = problem(30, 4, 7)
    x, y = x.view(3, 10, 4), torch.arange(30, device=DEVICE).view(3, 10) % 7
    for ranks, mesh, rank in mine(meshes):
        leaf, own = x.clone().requires_grad_(), uneven(x, mesh).clone().requires_grad_()
        wanted = fl.linear_cross_entropy(leaf, w, y, shift=2)
        got = fl.linear_cross_entropy(own, spread(w, mesh), uneven(y, mesh), shift=2, backbone_reduction="sum")
        assert_close(got, wanted)
        assert_close(torch.autograd.grad(got, own)[0], uneven(torch.autograd.grad(wanted, leaf)[0], mesh))


UNIT = math.log2(math.e)

def as_the_kernels(module):
    "A module whose plain PyTorch takes the kernels' part, with their convention: maxima are multiplied by a unit"
    def sums(*args):
        made = module.plain_sums(*args[:7], 0, args[7])  # without a wish for the sum of scores, which is there
        made[module.ROW_MAX] *= UNIT
        return made
    def gradients(terms, *args):
        terms = terms.clone()
        terms[0] /= UNIT
        return module.plain_gradients(terms, *args[:-1])  # without the unit of fp16
    return mock.patch.multiple(module, takes_kernel=lambda x: len(x) > 0, log2_scale=lambda x: UNIT, kernel_sums=sums, kernel_gradients=gradients)


@case
def ranks_without_tokens_count_in_the_same_unit(meshes):
    with as_the_kernels(sharded):
        for ranks, mesh, rank in mine(meshes):
            for n in (1, 5, 9):  # 9 rows on 4 ranks are 3, 3, 3 and 0
                against_one(mesh, n, 11, n, OPTIONS[3], "mean", "rows", True, True)


@case
def half_precision_and_autocast(meshes):
    for ranks, mesh, rank in mine(meshes):
        for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float16, 3e-3), (f32, 1e-5)):
            x, w, _, y, _, _ = problem(9, 8, 11, dtype=f32)
            leaves = [x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()]
            exact = torch.autograd.grad(recompute_linear_cross_entropy(*(t.double() for t in leaves), y), leaves)
            split = [spread(leaves[0].detach(), mesh).requires_grad_(), spread(leaves[1].detach(), mesh).requires_grad_()]
            got = fl.linear_cross_entropy(*split, spread(y, mesh), backbone_reduction="sum")
            assert got.dtype == f32
            for name, a, e in zip(("dx", "dw"), torch.autograd.grad(got, split), exact):
                error = (whole(a) - e).norm() / e.norm()
                assert a.dtype == dtype and error < tolerance, f"{name} in {dtype} on {ranks} ranks: {error}"
        with torch.autocast(DEVICE, torch.bfloat16):
            loss, listed = fl.linear_cross_entropy(x, spread(w, mesh), y), fl.linear_cross_entropy(x, spread(w, mesh), y, softcap=9.0)
            apart = fl.sharded_linear_divergence(x, spread(w, mesh), 2 * x, spread(w.flip(0), mesh))
            alone = x.detach()
            pairs = fl.contrastive_loss(alone, 2 * alone, 0.3, mesh=mesh), fl.sigmoid_contrastive_loss(alone, 2 * alone, 0.3, -1.0, mesh=mesh)
        low = tuple(t.detach().bfloat16().double() for t in (x, w))
        assert_close(loss.double(), recompute_linear_cross_entropy(*low, y), rtol=1e-5, atol=1e-5)
        assert_close(listed.double(), recompute_linear_cross_entropy(*low, y, softcap=9.0), rtol=1e-5, atol=1e-5)
        close = 1e-5 if DEVICE == "cpu" else 2e-3  # on a GPU scores of a divergence are rounded to bf16, as a linear layer's
        assert_close(apart.double(), fl.linear_divergence(*low, 2 * low[0], low[1].flip(0)), rtol=close, atol=close)
        many = low[0].repeat(ranks, 1)
        exact = fl.contrastive_loss(many, 2 * many, 0.3), fl.sigmoid_contrastive_loss(many, 2 * many, 0.3, -1.0)
        for found, e in zip(pairs, exact): assert_close(found.double(), e, rtol=1e-5, atol=1e-5)
        own = [x.detach().requires_grad_(), spread(w.detach(), mesh).requires_grad_()]
        answers = {"loss": lambda: fl.linear_cross_entropy(*own, y, softcap=9.0), "top": lambda: fl.sharded_linear_topk(*own, 3).log_probs.sum(),
                   "log-probabilities": lambda: fl.sharded_linear_log_probs(*own, y).log_probs.sum(),
                   "divergence": lambda: fl.sharded_linear_divergence(*own, 2 * x.detach(), spread(w.detach().flip(0), mesh), reduction="none").sum(),
                   "contrast": lambda: fl.contrastive_loss(own[0], 2 * alone, 0.3, mesh=mesh, backbone_reduction="sum")}
        for name, answer in answers.items():
            leaves = own[:1] if name == "contrast" else own
            with torch.autocast(DEVICE, torch.bfloat16):
                of = answer()
                inside = torch.autograd.grad(of, leaves, retain_graph=True)
            for a, e in zip(inside, torch.autograd.grad(of, leaves)): assert torch.equal(whole(a), whole(e)), f"{name}: a backward pass under autocast"


@case
def rows_beside_a_mesh(meshes):
    x, w, b, y, _, _ = problem(9, 4, 10)
    wanted = recompute_linear_cross_entropy(x, w, y, linear_bias=b)
    for ranks, mesh, rank in mine(meshes):
        part, bias = (spread(t, mesh).to_local().requires_grad_() for t in (w, b))
        loss = sharded_linear_cross_entropy(x, part, y, linear_bias=bias, mesh=mesh, num_classes=10)
        assert_close(loss, wanted)
        assert [g.shape for g in torch.autograd.grad(loss, [part, bias])] == [part.shape, bias.shape]


def counts(mode):
    "Collectives by the last part of their names"
    return {str(k).split(".")[-1].strip("_"): v for k, v in mode.get_comm_counts().items()}


@case
def collectives_are_counted(meshes):
    from torch.distributed.tensor.debug import CommDebugMode
    x, w, _, y, _, _ = problem(9, 4, 10)
    shared = 1 + (DEVICE == "cuda")  # what each was given; and numbers made of the labels, where they are compared on a GPU
    for ranks, mesh, rank in mine(meshes):
        weight = spread(w, mesh).requires_grad_()
        with CommDebugMode() as mode:
            fl.linear_cross_entropy(x.clone().requires_grad_(), weight, y, label_smoothing=0.1).backward()
        assert counts(mode) == {"allgather_base": shared + 1, "allreduce": 1}, counts(mode)
        tokens = spread(x, mesh).requires_grad_()
        with CommDebugMode() as mode:
            fl.linear_cross_entropy(tokens, weight, spread(y, mesh), backbone_reduction="sum").backward()
        assert counts(mode) == {"allgather_base": 3, "reduce_scatter_base": 1}, counts(mode)
        with CommDebugMode() as mode:  # plain tokens: their number comes with what each was given
            fl.linear_cross_entropy(uneven(x, mesh).requires_grad_(), weight, uneven(y, mesh), backbone_reduction="mean").backward()
        assert counts(mode) == {"allgather_base": 3, "reduce_scatter_base": 1}, counts(mode)
        head = ShardedPartialFC(10, 4, mesh=mesh, sample_rate=0.5, equal_batch=True)
        features = torch.randn(3, 4, device=DEVICE, requires_grad=True)
        with CommDebugMode() as mode:
            head(features, torch.arange(3, device=DEVICE)).backward()
        assert counts(mode) == {"allgather_base": 2, "reduce_scatter_base": 1}, counts(mode)
        with CommDebugMode() as mode:  # nobody asks for dx: nobody reduces
            fl.linear_cross_entropy(x, weight, y).backward()
        assert counts(mode) == {"allgather_base": shared + 1}, counts(mode)


@contextlib.contextmanager
def a_kernel_within(launched, clock):
    "Both passes of the plain path choose a variant by a clock, as on a GPU a launch does"
    kernel = mock.Mock(cache_key="source", __name__="a_kernel")
    def choosing(fn):
        def wrapped(*args):
            launched.append(tuning.fastest_variant(kernel, torch.empty(0), (2, 2), (1, 8), lambda: [(1, 8), (2, 8), (3, 8)], None, BY=fn.__name__))
            return fn(*args)
        return wrapped
    with pytest.MonkeyPatch.context() as patch:
        for name in ("plain_sums", "plain_gradients"):
            everywhere(patch, sharded, name, choosing(getattr(sharded, name)))
        everywhere(patch, core_ranks, "is_timed", lambda *args: True)
        everywhere(patch, tuning, "variant_milliseconds", clock)
        yield


@case
def ranks_take_the_same_variants(meshes):
    "Their clocks and caches differ; the last of three ranks has no classes, and chooses nothing"
    x, w, _, y, _, _ = problem(6, 4, 4)
    for ranks, mesh, rank in mine(meshes[1:3]):
        weight, launched, folder = spread(w, mesh).requires_grad_(), [], tempfile.mkdtemp()
        clock = lambda run, variant: float(variant[0] != (2, 3, 1)[rank])  # each has a favourite
        with a_kernel_within(launched, clock), mock.patch.dict(os.environ, FUSEDLOSS_CACHE_DIR=folder), mock.patch.object(tuning, "_chosen", tuning._Chosen()):
            for _ in range(3):
                fl.linear_cross_entropy(x.clone().requires_grad_(), weight, y).backward()
            kept = len(tuning.store.read("tuning"))
            for scale in (2.0, 2.0, 3.0, 4.0, 4.0):  # as a temperature that is learnt
                fl.linear_cross_entropy(x.clone().requires_grad_(), weight, y, logit_scale=scale).backward()
            more = len(tuning.store.read("tuning")) - kept
        assert more == (0 if rank else 2), "agreements, whatever the scale"
        assert launched[-4:] == [(2, 8)] * 4 * bool(len(weight.to_local())), launched
        assert launched[:2] == [(1 if rank else 2, 8)] * 2 * bool(launched), "at first, only one may ask the clock"
        assert kept == (0 if rank else 4), "two variants and two agreements"


def pairs_of(n, h, rank=None, seed=0, dtype=f64):
    "Features of two sides, of all ranks' pairs or of one rank's n"
    g = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(4 * n, h, generator=g, dtype=f64).to(DEVICE, dtype) for _ in range(2))
    return [(t if rank is None else t[rank * n:(rank + 1) * n]).clone().requires_grad_() for t in (x, y)]


def ring_answers(module, mesh, n, how, reduction):
    "Loss and gradients of this rank's pairs, and those of one process with all pairs; of 150 there are two blocks a side, the last not full"
    ranks, rank = mesh.size(), mesh.get_local_rank()
    x, y = (t.detach()[:ranks * n].requires_grad_() for t in pairs_of(n, 6))
    own_x, own_y = pairs_of(n, 6, rank)
    scales = [torch.tensor(3.0, dtype=f64, device=DEVICE, requires_grad=True) for _ in range(2)]
    wanted = fl.contrastive_loss(x, y, scales[0], reduction=reduction)
    got = module.contrastive_loss(own_x, own_y, scales[1], reduction=reduction, memory_budget=2**19, mesh=mesh, backbone_reduction=how)
    part, factor = slice(rank * n, (rank + 1) * n), ranks if how == "mean" else 1
    g = torch.linspace(-1, 2, wanted.numel(), dtype=f64, device=DEVICE).view(wanted.shape)
    of_mine = (lambda t: t[part]) if reduction == "none" else lambda t: t
    dx, dy, dscale = torch.autograd.grad(wanted, (x, y, scales[0]), g)
    *found, total = torch.autograd.grad(got, (own_x, own_y, scales[1]), of_mine(g))
    dist.all_reduce(total, group=mesh.get_group())
    return [got.detach(), *found, total], [of_mine(wanted.detach()), factor * dx[part], factor * dy[part], factor * dscale]


@case
def contrast_by_a_ring(meshes):
    for ranks, mesh, rank in mine(some(meshes)):
        for how in ((3, "mean", "mean"), (150, "sum", "none"), (5, "sum", "sum")):
            assert_close(*ring_answers(fl, mesh, *how))


def own_positives(rows, ranks, n, m):
    "Rows of y of the row's own rank, up to three, some of them twice"
    at = torch.stack([rows % m, (rows * 5 + 1) % m, torch.where(rows % 3 == 0, rows % m, -1)], 1)
    return torch.where(at < 0, -1, at + (rows // n * m)[:, None])


POSITIVES = {  # rows of all ranks' y, by numbers of rows of x, ranks, and rows of x and y that each of them has
    "own": own_positives,
    "the next rank's": lambda rows, ranks, n, m: (rows // n + 1) % ranks * m + rows % m,
    "rows that many name, and rows that none names": lambda rows, ranks, n, m: torch.stack([rows % 2, torch.where(rows % 4 == 1, ranks * m - 1, -1)], 1),
    "one row of the last rank": lambda rows, ranks, n, m: torch.full_like(rows, ranks * m - 2)[:, None],
}
OTHER_LOSSES = {"contrastive_loss": (exact_positives, (3.0,)), "sigmoid_contrastive_loss": (exact_sigmoid, (2.0, -1.0))}  # the definition, scale and bias


def answers_of_positives(module, name, mesh, n, m, named, how, reduction):
    "Loss and gradients of this rank's rows, n of x and m of y, and those that the definition has for all ranks' rows"
    (ranks, rank), (exact, numbers) = (mesh.size(), mesh.get_local_rank()), OTHER_LOSSES[name]
    x, y = pairs_of(n, 6)[0].detach()[:ranks * n].requires_grad_(), pairs_of(m, 6, seed=1)[1].detach()[:ranks * m].requires_grad_()
    positives = POSITIVES[named](torch.arange(ranks * n, device=DEVICE), ranks, n, m) if named else None
    of_rows, of_columns, factor = slice(rank * n, (rank + 1) * n), slice(rank * m, (rank + 1) * m), ranks if how == "mean" else 1
    own_x, own_y = (t.detach()[part].clone().requires_grad_() for t, part in ((x, of_rows), (y, of_columns)))
    theirs, ours = ([torch.tensor(v, dtype=f64, device=DEVICE, requires_grad=True) for v in numbers] for _ in range(2))
    wanted = exact(x, y, *theirs, positives=positives, reduction=reduction)
    got = getattr(module, name)(own_x, own_y, *ours, positives=positives if named is None else positives[of_rows], reduction=reduction,
                                memory_budget=2**19, mesh=mesh, backbone_reduction=how)
    g = torch.linspace(-1, 2, wanted.numel(), dtype=f64, device=DEVICE).view(wanted.shape)
    of_mine = (lambda t: t[of_rows]) if reduction == "none" else lambda t: t
    dx, dy, *rest = torch.autograd.grad(wanted, (x, y, *theirs), g)
    own_dx, own_dy, *totals = torch.autograd.grad(got, (own_x, own_y, *ours), of_mine(g))
    for total in totals: dist.all_reduce(total, group=mesh.get_group())
    return [got.detach(), own_dx, own_dy, *totals], [of_mine(wanted.detach()), *(factor * t for t in (dx[of_rows], dy[of_columns], *rest))]


@case
def positives_by_a_ring(meshes):
    for ranks, mesh, rank in mine(meshes):
        for k, named in enumerate(POSITIVES):
            for name in OTHER_LOSSES:
                for reduction in ("none", "mean", "sum"):
                    assert_close(*answers_of_positives(fl, name, mesh, 4, (7, 3)[k % 2], named, ("mean", "sum")[k % 2], reduction))
        assert_close(*answers_of_positives(fl, "sigmoid_contrastive_loss", mesh, 5, 5, None, "mean", "mean"))
    for ranks, mesh, rank in mine(some(meshes)):  # of 150 there are two blocks, the last not full
        for name in OTHER_LOSSES: assert_close(*answers_of_positives(fl, name, mesh, 150, 140, "own", "sum", "none"))


RING_BUGS = {  # of contrasts over ranks: what is wrong, the text of the source, what stands in its place
    "each step has a diagonal": ("blocks, blocks, own, fresh=own", "blocks, blocks, True, fresh=own"),
    "a wrapper that averages is forgotten": ('s.ranks if call.backbone_reduction == "mean" else 1', "1"),
    "dy stays where it is": ("yield owner\n    if sums: grads.dy, = sums", "yield owner"),
    "y of the neighbour stays": ("if step < s.ranks - 1 else lambda: own", "if step < s.ranks - 1 else lambda: given"),
    "each rank has a unit of its own": ("t if s.ranks == 1 else all_gather(t.reshape(1), s).amax()", "t"),
    "a mean over this rank's pairs": ("losses.mean() / s.ranks", "losses.mean()"),
    "upstream gradients do not travel": ("tuple(given[1:]), blocks, blocks", "(given[1], coef), blocks, blocks"),
    "each step begins anew": ("*sums, blocks, blocks, owner == s.rank)", "*sums, blocks, blocks, True)"),
    "each rank's terms replace those before": ("owner * y.shape[0], losses, owner == s.rank)", "owner * y.shape[0], losses, True)"),
    "y alone travels": ("return came", "return [came[0], *tensors[1:]]"),
    "each rank has a mean over its own columns": ("counts[-1:] if s.ranks == 1 else all_reduce(counts[-1:].clone(), s)", "counts[-1:]"),
    "columns are counted from each rank's first": ("row_share, each), owner * y.shape[0]", "row_share, each), 0"),
    "columns take the upstream gradients of this rank's rows alone": ("send(coef, n, owner * y.shape[0]", "send(coef, n, s.rank * y.shape[0]"),
    "positives of this rank alone": ("scores(x, *given, scale, n, owner * y.shape[0]", "scores(x, *given, scale, n, s.rank * y.shape[0]"),
    "positives forget a wrapper that averages": ("*needs, factor, s)", "*needs, 1.0, s)"),
    "SigLIP's columns are counted from each rank's first": ("part(at, i), owner * y.shape[0] + j.start", "part(at, i), j.start"),
    "SigLIP's pairs are the first rank's": ("BlockTargets(owner == s.rank and i == j)", "BlockTargets(owner == 0 and i == j)"),
}


@case
def bugs_planted_in_the_ring_are_noticed(meshes):
    for ranks, mesh, rank in mine(meshes[1:2]):
        for bug, pairs in {None: unchanged(RING_BUGS.values()), **RING_BUGS}.items():
            with tempfile.TemporaryDirectory() as folder:
                module, off = planted(contrast, Path(folder), *pairs), []
                answers = [ring_answers(module, mesh, *how) for how in ((5, "mean", "mean"), (4, "sum", "none"))]
                answers += [answers_of_positives(module, name, mesh, 5, 7, "own", "mean", how) for name in OTHER_LOSSES for how in ("mean", "none")]
                answers += [answers_of_positives(module, "sigmoid_contrastive_loss", mesh, 5, 5, None, "sum", "sum")]
                off += [not torch.allclose(a, e) for pair in answers for a, e in zip(*pair)]
            found = torch.tensor(float(any(off)), device=DEVICE)
            dist.all_reduce(found, group=mesh.get_group())
            assert bool(found) == (bug is not None), bug


@case
def contrast_in_half_precision(meshes):
    "Features in fp16, and a loss without gradients, over ranks"
    for ranks, mesh, rank in mine(meshes):
        x, y = (t[:ranks * 5] for t in pairs_of(5, 6, dtype=torch.float16))
        mine_x, mine_y = pairs_of(5, 6, rank, dtype=torch.float16)
        with torch.no_grad(): assert_close(fl.contrastive_loss(mine_x, mine_y, 2.0, mesh=mesh), fl.contrastive_loss(x, y, 2.0))
        fl.contrastive_loss(mine_x, mine_y.detach(), 2.0, mesh=mesh, backbone_reduction="mean").backward()
        wanted, = torch.autograd.grad(fl.contrastive_loss(x, y, 2.0), x)
        assert_close(mine_x.grad, ranks * wanted[rank * 5:][:5], rtol=1e-2, atol=1e-3)
        positives, few = torch.arange(5 * ranks, device=DEVICE), [y[5 * k:5 * k + 4] for k in range(ranks)]  # four rows of y a rank
        positives = positives % (4 * ranks)
        for loss in (fl.contrastive_loss, functools.partial(fl.sigmoid_contrastive_loss, logit_bias=-1.0)):
            with torch.no_grad(): assert_close(loss(mine_x, mine_y[:4], logit_scale=2.0, positives=positives[rank * 5:][:5], mesh=mesh),
                                               loss(x, torch.cat(few), logit_scale=2.0, positives=positives))


@case
def contrast_of_ranks_that_disagree(meshes):
    for ranks, mesh, rank in mine(meshes[1:]):
        x, y = (t.detach() for t in pairs_of(6, 4, rank))
        last = rank == ranks - 1
        call = lambda x=x, y=y, scale=2.0, **how: fl.contrastive_loss(x, y, scale, mesh=mesh, **how)
        raises(ValueError, "shape of x: expected the same on all ranks", lambda: call(x[last:], y[last:]))
        raises(ValueError, "dtype of x: expected the same", lambda: call(*(t.float() if last else t for t in (x, y))))
        raises(ValueError, "logit_scale: expected the same", lambda: call(scale=3.0 if last else 2.0))
        raises(ValueError, "reduction: expected the same", lambda: call(reduction="sum" if last else "mean"))
        raises(ValueError, "memory_budget: expected the same", lambda: call(memory_budget=2**20 if last else None))
        raises(ValueError, "requires_grad", lambda: call(x.clone().requires_grad_(last), backbone_reduction="sum"))
        raises(ValueError, "y: expected x's shape" if last else f"an error on rank {ranks - 1}: y: expected", lambda: call(x, y[last:]))
        raises(ValueError, "backbone_reduction: expected 'mean' where", lambda: call(x.clone().requires_grad_()))
        raises(ValueError, "backbone_reduction: expected None without a mesh", lambda: fl.contrastive_loss(x, y, 2.0, backbone_reduction="mean"))
        assert call().isfinite(), "and ranks are in step again"


@case
def positives_of_ranks_that_disagree(meshes):
    for ranks, mesh, rank in mine(meshes[1:]):
        x, y = pairs_of(4, 3)[0].detach()[:4], pairs_of(7, 3)[1].detach()[:7]
        last, of_last = rank == ranks - 1, f"an error on rank {ranks - 1}: "
        positives = rank * 7 + torch.arange(4, device=DEVICE)
        for loss in (fl.contrastive_loss, functools.partial(fl.sigmoid_contrastive_loss, logit_bias=-1.0)):
            call = lambda positives=positives, x=x, y=y, **how: loss(x, y, logit_scale=2.0, positives=positives, mesh=mesh, **how)
            raises(ValueError, "shape of y: expected the same on all ranks", lambda: call(positives - rank * 7, y=y[last:]))
            raises(ValueError, "shape of x: expected the same on all ranks", lambda: call(positives[last:], x[last:]))
            raises(ValueError, "positives: expected the same on all ranks", lambda: call(None if last else positives - rank * 7, y=y[:4]))
            raises(ValueError, "backbone_reduction: expected 'mean' where", lambda: call(x=x.clone().requires_grad_()))
            raises(ValueError, "positives: expected int64" if last else of_last + "positives: expected int64", lambda: call(positives.double() if last else positives))
            raises(ValueError, "positives: expected shape [4] or" if last else of_last + "positives", lambda: call(positives[:3] if last else positives))
            outside = torch.where(torch.arange(4, device=DEVICE) == 2, ranks * 7, positives) if last else positives
            if DEVICE == "cpu":
                words = f"positives: expected 0 ≤ row of y < {ranks * 7} ({ranks} ranks of 7 rows), or -1 for none, got {ranks * 7} in row 2"
                raises(IndexError if last else ValueError, words if last else of_last + words, lambda: call(outside))
            else: assert call(outside).isnan()
            several = torch.stack([positives] * (rank + 1), 1)  # ranks may name as many as they like
            assert_close(call(several), call())
        if DEVICE == "cpu":
            without = torch.full_like(positives, -1) if last else positives
            raises(ValueError, "positives: expected at least one in each row" if last else of_last, lambda: fl.contrastive_loss(x, y, 2.0, positives=without, mesh=mesh))
            assert fl.sigmoid_contrastive_loss(x, y, 2.0, -1.0, positives=without, mesh=mesh).isfinite()
        raises(ValueError, "logit_bias: expected the same on all ranks", lambda: fl.sigmoid_contrastive_loss(x, y[:4], 2.0, -1.0 - last, mesh=mesh))
        raises(ValueError, "backbone_reduction: expected None without a mesh", lambda: fl.sigmoid_contrastive_loss(x, y[:4], 2.0, -1.0, backbone_reduction="sum"))
        raises(RuntimeError, "contrastive_loss over ranks", lambda: torch.func.grad(lambda t: fl.contrastive_loss(t, y, 2.0, positives=positives, mesh=mesh, backbone_reduction="sum"))(x))


@case
def a_contrast_has_the_same_bits_on_all_ranks(meshes):
    for ranks, mesh, rank in mine(meshes):
        for seed in range(8):
            x, y = pairs_of(5, 6, rank, seed)
            losses = [loss(x, y, *numbers, mesh=mesh, backbone_reduction="sum", reduction=reduction)
                      for loss, numbers in ((fl.contrastive_loss, (3.0,)), (fl.sigmoid_contrastive_loss, (2.0, -1.0))) for reduction in ("mean", "sum")]
            found = core_ranks.all_gather(torch.stack(losses).detach(), core_ranks.shards_on(mesh, ranks))
            assert torch.equal(found, found[:1].expand_as(found)), found


@case
def contrasts_of_nothing_over_ranks(meshes):
    "No rows, or no features"
    for ranks, mesh, rank in mine(meshes):
        for n, m, h in ((0, 3, 4), (0, 0, 4), (3, 2, 0)):
            for loss in (fl.contrastive_loss, functools.partial(fl.sigmoid_contrastive_loss, logit_bias=-1.0)):
                x, y = torch.zeros(n, h, device=DEVICE, requires_grad=True), torch.zeros(m, h, device=DEVICE, requires_grad=True)
                for reduction in ("mean", "sum", "none"):
                    found = loss(x, y, logit_scale=2.0, positives=torch.zeros(n, 1, dtype=torch.long, device=DEVICE), reduction=reduction, mesh=mesh, backbone_reduction="mean")
                    grads = torch.autograd.grad(found.sum(), (x, y))
                    assert found.isfinite().all() and all(g.shape == t.shape and not g.any() for g, t in zip(grads, (x, y)))


@case
def bad_input_raises_on_every_rank(meshes):
    x, w, b, y, class_weight, _ = problem(8, 4, 10)
    for ranks, mesh, rank in mine(meshes):
        weight, tokens, labels = spread(w, mesh), spread(x, mesh), spread(y, mesh).to_local().clone()
        if rank == 0:
            labels[0] = 10  # on one rank alone, and yet all raise
        raises(IndexError, "expected 0 ≤ label < 10", lambda: fl.linear_cross_entropy(tokens, weight, labels))
        raises(ValueError, "linear_weight: expected [Shard(0)]", lambda: fl.linear_cross_entropy(x, spread(w, mesh, 1), y))
        raises(ValueError, "input: expected", lambda: fl.linear_cross_entropy(spread(x, mesh, 1), weight, y))
        raises(ValueError, "input: expected", lambda: fl.linear_cross_entropy(x[:, :3], weight, y))
        raises(ValueError, "target: expected", lambda: fl.linear_cross_entropy(x, weight, y[:5]))
        raises(ValueError, "linear_bias: expected", lambda: fl.linear_cross_entropy(x, weight, y, linear_bias=b.new_zeros(17)))
        raises(ValueError, "weight: expected", lambda: fl.linear_cross_entropy(x, weight, y, weight=class_weight[:3]))
        raises(ValueError, "label_smoothing: expected", lambda: fl.linear_cross_entropy(x, weight, y, label_smoothing=2.0))
        raises(ValueError, "method: expected", lambda: fl.linear_cross_entropy(x, weight, y, method="chunks"))
        raises(ValueError, "filter_eps: expected", lambda: fl.linear_cross_entropy(x, weight, y, filter_eps=0.1))
        raises(ValueError, "shift: expected", lambda: fl.linear_cross_entropy(x, weight, y, shift=-1))
        raises(ValueError, "linear_weight: expected", lambda: sharded_linear_cross_entropy(x, w[:0], y, mesh=mesh, num_classes=10))
        raises(ValueError, "mesh: expected", lambda: sharded_linear_cross_entropy(x, w, y, mesh=mesh))
        raises(ValueError, "backbone_reduction", lambda: ShardedPartialFC(10, 4, mesh=mesh, backbone_reduction="max"))
        raises(ValueError, "sample_rate", lambda: ShardedPartialFC(10, 4, mesh=mesh, sample_rate=1.5))
        head = ShardedPartialFC(10, 4, mesh=mesh)
        raises(ValueError, "features: expected", lambda: head(torch.randn(2, 5), torch.zeros(2, dtype=torch.int64)))
        raises(ValueError, "target: expected", lambda: head(torch.randn(2, 4), torch.zeros(2)))
        raises(IndexError, "expected 0 ≤ label < 10", lambda: head(torch.randn(2, 4), torch.tensor([0, 11 if rank == 0 else 1])))
        raises(ValueError, "mesh: expected", lambda: head.extend(3))
        if ranks == 4:
            raises(ValueError, "num_classes: expected a multiple", lambda: ShardedPartialFC(10, 4, mesh=mesh, margin=SubCenter(3)))


@case
def half_precision_heads(meshes):
    for ranks, mesh, rank in mine(meshes):
        for options in (dict(), dict(sample_rate=0.5)):
            head = ShardedPartialFC(300, 16, mesh=mesh, margin=CosFace(0.2, 8.0), backbone_reduction="sum", **options)
            one = PartialFC(300, 16, device=DEVICE, dtype=f64, margin=CosFace(0.2, 8.0), **options)
            one.weight.data.copy_(whole(head.weight))
            g = torch.Generator().manual_seed(1)
            x, y = torch.randn(8 * ranks, 16, generator=g).to(DEVICE), torch.randint(300, (8 * ranks,), generator=g).to(DEVICE)
            x = x.bfloat16().requires_grad_()
            wanted = one(x.double(), y)
            own = part_of(x.detach(), [8] * ranks, rank).clone().requires_grad_()
            got = head(own, part_of(y, [8] * ranks, rank))
            assert_close(got.double(), wanted, rtol=1e-2, atol=1e-2)
            (dx,), (exact,) = torch.autograd.grad(got, [own]), torch.autograd.grad(wanted, [x])
            exact = part_of(exact, [8] * ranks, rank)
            assert dx.dtype == torch.bfloat16 and (dx - exact).norm() < 0.02 * exact.norm()


# --- the class head ---

SIZES = {1: [[9], [0]], 2: [[7, 2], [0, 9]], 3: [[4, 4, 1], [0, 0, 5]], 4: [[7, 0, 4, 1], [12, 0, 0, 0], [3, 3, 3, 3]]}
HEADS = [dict(), dict(margin=ArcFace()), dict(margin=Circle()), dict(sample_rate=0.3), dict(sample_rate=0.5, margin=ArcFace()),
         dict(sample_rate="positives"), dict(conflict=0.3), dict(conflict=0.3, conflict_mode="zero", sample_rate=0.5)]


def two_heads(v, mesh, log_q=False, **options):
    "`PartialFC` on one process and over ranks, with one weight"
    samplers = [NegativeSampler(0.4, 3, log_q=True) if log_q else None for _ in range(2)]
    one = PartialFC(v, 6, dtype=f64, device=DEVICE, sampler=samplers[0], **options)
    many = ShardedPartialFC(v, 6, dtype=f64, mesh=mesh, sampler=samplers[1], seed=5, **options)
    with torch.no_grad():
        one.weight.copy_(100 * whole(many.weight))
        many.weight.mul_(100)
    return one, many


def batch_of(sizes, v, seed=0):
    "Rows and labels of all ranks together"
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(sum(sizes), 6, generator=g, dtype=f64), torch.randint(v, (sum(sizes),), generator=g)
    return x.to(DEVICE), y.masked_fill(torch.arange(len(y)) % 5 == 2, -1).to(DEVICE)


def part_of(t, sizes, rank):
    "A rank's rows"
    return t[sum(sizes[:rank]):sum(sizes[:rank + 1])]


@case
def heads_match_one_process(meshes):
    for ranks, mesh, rank in mine(some(meshes)):
        for number, options in enumerate([*HEADS, dict(log_q=True)]):
            tried = list(zip((2, 11, 300) if number % 2 else (1, 5, 300), SIZES[ranks] * 3))
            for v, sizes in tried if FULL else (tried[number % 2], tried[2]):
                one, many = two_heads(v, mesh, **options)
                x, y = batch_of(sizes, v, number)
                leaf, own = x.clone().requires_grad_(), part_of(x, sizes, rank).clone().requires_grad_()
                (wanted, told), (got, seen) = one(leaf, y, return_stats=True), many(own, part_of(y, sizes, rank), return_stats=True)
                assert_close(got, wanted)
                exact, (dx, dw) = torch.autograd.grad(wanted, [leaf, one.weight]), torch.autograd.grad(got, [own, many.weight])
                assert_close(dx, ranks * part_of(exact[0], sizes, rank))
                rows = shard_range(v, ranks, rank)
                dw = dw.to_dense()[rows.start:rows.stop] if dw.is_sparse else dw.to_local()
                assert_close(dw, exact[1].to_dense()[rows.start:rows.stop])
                for name in ("accuracy", "n_valid", "n_scored"):
                    assert_close(getattr(seen, name), getattr(told, name), msg=name)
                assert_close(seen.cos, part_of(told.cos, sizes, rank))


@case
def a_method_that_cannot_be_raises_on_ranks_without_a_class(meshes):
    for ranks, mesh, rank in mine(meshes):
        head = ShardedPartialFC(1, 4, mesh=mesh, method="recompute", dtype=f64)
        raises(ValueError, "method: expected 'tiles'", lambda: head(torch.ones(2, 4, dtype=f64, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)))


@case
def a_compiled_model_keeps_its_head_between_graphs(meshes):
    for ranks, mesh, rank in mine(meshes[:2]):
        for options in ({}, dict(sample_rate=0.5, return_stats=True)):
            stats, body = options.pop("return_stats", False), torch.nn.Linear(6, 4, dtype=f64, device=DEVICE)
            head = fl.ShardedPartialFC(9, 4, mesh=mesh, dtype=f64, seed=1, **options)
            model = lambda x, y: head(torch.tanh(body(x)), y, stats)
            torch._dynamo.reset(), torch._dynamo.utils.counters.clear()
            compiled = torch.compile(model, backend="aot_eager")
            for n in (3, 5, 4):
                x, y = torch.randn(n, 6, dtype=f64, device=DEVICE), torch.arange(n, device=DEVICE) + rank
                (wanted, *_), (got, *_) = (found if stats else (found,) for found in (model(x, y), compiled(x, y)))
                assert_close(got, wanted)
                for a, e in zip(torch.autograd.grad(got, [*body.parameters()]), torch.autograd.grad(wanted, [*body.parameters()])): assert_close(a, e)
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4
            assert_close(torch.compile(head.logits, backend="eager")(x[:, :4]), head.logits(x[:, :4]))
            raises(Exception, "ShardedPartialFC: expected no fullgraph=True", lambda: torch.compile(model, backend="eager", fullgraph=True)(x, y))


@case
def heads_whose_scale_is_learned(meshes):
    for ranks, mesh, rank in mine(some(meshes)):
        for number, (margin, v) in enumerate(((CosFace, 11), (ArcFace, 3), (lambda scale: SubCenter(2, CosFace(scale=scale)), 12))):
            scales = [nn.Parameter(torch.tensor(6.0, dtype=f64, device=DEVICE)) for _ in range(2)]
            one = PartialFC(v, 6, dtype=f64, device=DEVICE, margin=margin(scale=scales[0]))
            for how in ("mean", "sum"):
                many = ShardedPartialFC(v, 6, dtype=f64, mesh=mesh, margin=margin(scale=scales[1]), seed=5, backbone_reduction=how)
                one.weight.data.copy_(whole(many.weight))
                sizes = SIZES[ranks][0]
                x, y = batch_of(sizes, v, number)
                leaf, own = x.clone().requires_grad_(), part_of(x, sizes, rank).clone().requires_grad_()
                wanted, got = one(leaf, y), many(own, part_of(y, sizes, rank))
                assert_close(got, wanted)
                exact, found = torch.autograd.grad(wanted, [leaf, scales[0], one.weight]), torch.autograd.grad(got, [own, scales[1], many.weight])
                assert_close(found[0], (ranks if how == "mean" else 1) * part_of(exact[0], sizes, rank))
                assert_close(found[1], exact[1], msg=lambda m: f"each rank's is that of all rows: {m}")
                assert_close(whole(found[2]), exact[2])


@case
def heads_with_weights_and_lengths(meshes):
    "Weights of all ranks count in the mean, the losses of each row stay at home, and a length's gradient is there once"
    for ranks, mesh, rank in mine(meshes[1::2]):
        sizes = SIZES[ranks][0]
        x, y = batch_of(sizes, 11)
        of_class, of_row = torch.linspace(0.2, 1, 11, dtype=f64, device=DEVICE), torch.linspace(0, 2, len(y), dtype=f64, device=DEVICE)
        for reduction in ("mean", "sum", "none"):
            one, many = two_heads(11, mesh, margin=MagFace(), sample_rate=0.5, reduction=reduction, class_weight=of_class)
            leaf, own = x.clone().requires_grad_(), part_of(x, sizes, rank).clone().requires_grad_()
            wanted, got = one(leaf, y, token_weight=of_row), many(own, part_of(y, sizes, rank), token_weight=part_of(of_row, sizes, rank))
            each = reduction == "none"
            assert_close(got, part_of(wanted, sizes, rank) if each else wanted)
            up = 1 + of_row if each else torch.tensor(1.5, dtype=f64, device=DEVICE)
            exact = torch.autograd.grad(wanted, [leaf, one.weight], up)
            dx, dw = torch.autograd.grad(got, [own, many.weight], part_of(up, sizes, rank) if each else up)
            assert_close(dx, ranks * part_of(exact[0], sizes, rank))
            rows = shard_range(11, ranks, rank)
            assert_close(dw.to_dense()[rows.start:rows.stop], exact[1].to_dense()[rows.start:rows.stop])
        raises(ValueError, "token_weight given", lambda: many(own, part_of(y, sizes, rank), token_weight=None if rank else part_of(of_row, sizes, rank)))


@case
def sub_centres_and_adaface(meshes):
    for ranks, mesh, rank in mine(meshes):
        sizes, v = SIZES[ranks][0], 12
        x, y = batch_of(sizes, v)
        one, many = two_heads(v, mesh, margin=SubCenter(3))
        assert_close(many(part_of(x, sizes, rank), part_of(y, sizes, rank)), one(x, y))
        one, many = PartialFC(v, 6, dtype=f64, margin=AdaFace()), ShardedPartialFC(v, 6, dtype=f64, margin=AdaFace(), mesh=mesh)
        one.weight.data.copy_(whole(many.weight))
        for _ in range(3):
            assert_close(many(part_of(x, sizes, rank), part_of(y, sizes, rank)), one(x, y))
            many.margin.advance(), one.margin.advance()
        assert_close(many.margin.mean, one.margin.mean)
        assert_close(many.margin.std, one.margin.std)


@case
def a_head_that_is_recomputed(meshes):
    "By activation checkpointing, with two micro-batches before both go back: bit for bit what it is without, and one step of state"
    from torch.utils.checkpoint import checkpoint
    for ranks, mesh, rank in mine(meshes[1:3] if FULL else meshes[2:3]):
        for equal_batch, use_reentrant in ((False, False), (True, True)):
            found = []
            for call in (lambda f, *args: checkpoint(f, *args, use_reentrant=use_reentrant), lambda f, *args: f(*args)):
                torch.manual_seed(rank)
                head = ShardedPartialFC(12, 4, mesh=mesh, sample_rate=0.4, margin=AdaFace(momentum=0.5), equal_batch=equal_batch)
                optimizer, told = ShardedRowSparse(torch.optim.SGD, head.parameters(), lr=0.1), []
                for _ in range(2):
                    xs = [torch.randn(3, 4).requires_grad_() for _ in range(2)]
                    losses = [call(head, x, torch.arange(3) + 3 * rank) for x in xs]
                    for loss in losses:
                        loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    told += [*losses, *(x.grad for x in xs), whole(head.weight).clone(), *(t.clone() for t in head.buffers())]
                assert head.sampler.step == 2
                found.append(told)
            assert_close(*found, rtol=0, atol=0)


@case
def a_head_that_is_deferred(meshes):
    "To meta, by the device or the default one; its rows are those of its seed"
    for ranks, mesh, rank in mine(meshes):
        exact = ShardedPartialFC(11, 6, mesh=mesh, seed=3, sample_rate=0.5, margin=AdaFace())
        for device in ("meta", None):
            with torch.device("cpu" if device else "meta"):
                head = ShardedPartialFC(11, 6, mesh=mesh, seed=3, sample_rate=0.5, margin=AdaFace(), device=device)
            assert head.weight.is_meta and head.sampler.step.is_meta
            head.to_empty(device=DEVICE)
            for module in head.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
            same = [torch.equal(whole(t), whole(exact.state_dict()[name])) for name, t in head.state_dict().items()]
            assert all(same) and len(same) == 5, same


@case
def nan_features_of_ignored_rows(meshes):
    for ranks, mesh, rank in mine(meshes):
        head = ShardedPartialFC(10, 4, mesh=mesh)
        x, y = torch.full((2, 4), math.nan), torch.tensor([-1, -1])
        x[1], y[1] = 1.0, 3
        x.requires_grad_()
        loss = head(x, y)
        loss.backward()
        assert loss.isfinite() and whole(head.weight.grad).isfinite().all() and (x.grad[0] == 0).all()


def apart(params):
    "Two groups of parameters: on GPUs PyTorch's optimizers take a group's tensors together, and DTensors with no others"
    return [dict(params=[p for p in params if isinstance(p, DTensor) == spread_]) for spread_ in (False, True)]


OPTIMIZERS = {"sgd": lambda p: ShardedRowSparse(torch.optim.SGD, p, lr=0.1, momentum=0.9, weight_decay=1e-3),
              "nesterov": lambda p: ShardedRowSparse(torch.optim.SGD, p, lr=0.1, momentum=0.9, nesterov=True),
              "dense": lambda p: ShardedRowSparse(torch.optim.SGD, p, lr=0.1, momentum=0.9, mode="dense"),
              "damped": lambda p: ShardedRowSparse(torch.optim.SGD, p, lr=0.1, momentum=0.9, dampening=0.5),
              "adamw": lambda p: ShardedRowSparse(torch.optim.AdamW, p, lr=0.05),
              "row-wise adagrad": lambda p: ShardedRowSparse(torch.optim.Adagrad, p, rowwise=True, lr=0.1, lr_decay=0.1, weight_decay=1e-3),
              "torch sgd": lambda p: torch.optim.SGD(apart(p), lr=0.1, momentum=0.9),
              "torch adamw": lambda p: torch.optim.AdamW(apart(p), lr=0.05)}


def curve(mesh, rank, sizes, make, rate, steps=4, clip=None, v=11):
    "Losses of a short training, and the weight at its end"
    many = ShardedPartialFC(v, 6, dtype=f64, mesh=mesh, sample_rate=rate, seed=2, margin=CosFace(0.2, 8.0))
    layer = nn.Linear(6, 6, dtype=f64, device=DEVICE)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1, 1, 36).view(6, 6))
        layer.bias.zero_()
    optimizer, losses = make([*layer.parameters(), *many.parameters()]), []
    for step in range(steps):
        x, y = batch_of([12], v, step)
        optimizer.zero_grad()
        loss = many(layer(part_of(x, sizes, rank)), part_of(y, sizes, rank))
        loss.backward()
        for p in layer.parameters():  # as DDP does
            dist.all_reduce(p.grad, group=mesh.get_group())
            p.grad /= mesh.size()
        if clip:
            losses.append(optimizer.clip_grad_norm_(clip).item())
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses), whole(many.weight).detach()


SPLITS = {1: [12], 2: [5, 7], 3: [12, 0, 0], 4: [7, 0, 4, 1]}


@case
def curves_do_not_know_the_ranks(meshes):
    for name, make in OPTIMIZERS.items():
        for rate in (1.0,) if name.startswith("torch") else (1.0, 0.4) if name in ("sgd", "adamw") else (0.4,):
            clip = 0.5 if name in ("sgd", "adamw") else None
            runs = [curve(mesh, rank, SPLITS[ranks], make, rate, clip=clip) for ranks, mesh, rank in mine(meshes if FULL else [*meshes[:2], *meshes[3:]])]
            gathered = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, [t.cpu() for t in runs[-1]])
            for losses, weight in [*runs[1:], (gathered[-1][0], gathered[-1][1].to(DEVICE))]:
                assert_close(losses, runs[0][0], rtol=1e-7, atol=1e-9, msg=name)
                assert_close(weight, runs[0][1], rtol=1e-6, atol=1e-8)


@case
def sampled_gradients_need_no_sorting(meshes):
    from fusedloss.row_sparse import live_rows
    for ranks, mesh, rank in mine(meshes):
        head = ShardedPartialFC(300, 4, mesh=mesh, sample_rate=0.2)
        for _ in range(2):
            head.weight.grad = None
            head(torch.randn(3, 4), torch.arange(3)).backward()
            g, s = head.weight.grad, head.shards
            assert g.is_sparse and g.shape == (300, 4)
            assert live_rows(head.weight, g)[0] is head.weight.grad_rows.rows  # as they came: nothing is coalesced
            index = g._indices()[0]
            assert (index >= s.start).all() and (index < s.stop).all()
        head(torch.randn(3, 4), torch.arange(3)).backward()  # accumulated: rows are there twice, and summed
        optimizer = ShardedRowSparse(torch.optim.SGD, [head.weight], lr=0.1)
        before, dense = head.weight.to_local().detach().clone(), head.weight.grad.to_dense()[s.start:s.stop]
        optimizer.step()
        assert_close(head.weight.to_local().detach(), before - 0.1 * dense)


@case
def draws_do_not_know_the_ranks(meshes):
    drawn = {}
    for ranks, mesh, rank in mine(meshes):
        head = ShardedPartialFC(1000, 4, mesh=mesh, sampler=NegativeSampler(0.1, 7))
        s = head.shards
        here = head.sampler(s.stop, s.start)
        parts = [None] * ranks
        dist.all_gather_object(parts, here[here >= 0].tolist(), group=s.group)
        drawn[ranks] = sorted(c for part in parts for c in part)
    assert all(d == drawn[4] for d in drawn.values()) and len(drawn[4]) > 50


@case
def backbones_of_ddp_and_fsdp(meshes):
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    for ranks, mesh, rank in mine(meshes):
        if ranks == 1:
            continue
        sizes = SPLITS[ranks]
        x, y = batch_of(sizes, 11)
        one, plain = two_heads(11, mesh)[0], nn.Linear(6, 6, dtype=f64)
        with torch.no_grad():
            plain.weight.copy_(torch.linspace(-1, 1, 36).view(6, 6))
            plain.bias.fill_(0.1)
        wanted = torch.autograd.grad(one(plain(x), y), [plain.weight, plain.bias])
        for engine in ("ddp", "fsdp mean", "fsdp sum", "none"):
            head = ShardedPartialFC(11, 6, dtype=f64, mesh=mesh, backbone_reduction="mean" if engine in ("ddp", "fsdp mean") else "sum")
            head.weight.data.copy_(spread(one.weight.detach(), mesh))
            layer = nn.Linear(6, 6, dtype=f64)
            layer.load_state_dict(plain.state_dict())
            module = layer
            if engine == "ddp":
                module = DistributedDataParallel(layer, process_group=mesh.get_group())
            elif engine != "none":
                module = fully_shard(layer, mesh=mesh)
                if engine == "fsdp sum":
                    layer.set_gradient_divide_factor(1.0)
                    layer.set_force_sum_reduction_for_comms(True)
            head(module(part_of(x, sizes, rank)), part_of(y, sizes, rank)).backward()
            for p, e in zip((layer.weight, layer.bias), wanted):
                g = whole(p.grad)
                if engine == "none":
                    dist.all_reduce(g, group=mesh.get_group())
                assert_close(g, e, msg=lambda m: f"{engine}, {ranks} ranks: {m}")


# --- scores, clipping, files and wrappers of others ---

@case
def scores_do_not_know_the_ranks(meshes):
    for ranks, mesh, rank in mine(some(meshes)):
        for number, (options, v) in enumerate([(dict(sample_rate=0.3), 11), (dict(margin=Circle()), 1), (dict(margin=SubCenter(2)), 12), (dict(), 300)]):
            if options.get("margin") and v % ranks and v > 1:
                continue
            one, many = two_heads(v, mesh, **options)
            for sizes in SIZES[ranks]:
                x, _ = batch_of(sizes, v, number)
                own, z = part_of(x, sizes, rank), one.logits(x)
                got, k = many.logits(own), min(v, 4)
                assert_close(got, part_of(z, sizes, rank))
                assert not got.requires_grad and many.eval()(own).shape == (len(own), v)
                best = many.topk(own, k)
                assert_close(best.values, got.topk(k)[0])
                assert_close(got.gather(1, best.indices), best.values)
                assert torch.equal(many.topk(own, v).indices.sort(1)[0], torch.arange(v).expand(len(own), v))


class Identities(nn.Module):
    "A backbone and its head, in one module"
    def __init__(self, head):
        super().__init__()
        self.body, self.head = nn.Linear(6, 6, dtype=f64), head
        with torch.no_grad():
            self.body.weight.copy_(torch.linspace(-1, 1, 36).view(6, 6))
            self.body.bias.fill_(0.1)

    def forward(self, x, y):
        return self.head(self.body(x), y)


def of_all_ranks(head):
    "The gradient of a head's whole weight; a rank without classes has a dense one where others have rows"
    s, grad = head.shards, head.weight.grad
    dense = grad.to_dense() if grad.is_sparse else torch.zeros(grad.shape, dtype=grad.dtype)
    if not grad.is_sparse:
        dense[s.start:s.stop] = grad.to_local()
    dist.all_reduce(dense, group=s.group)
    return dense


@case
def ddp_around_backbone_and_head(meshes):
    from torch.nn.parallel import DistributedDataParallel
    for ranks, mesh, rank in mine(meshes[1:2]):
        sizes, wanted = [7, 5], None
        for rate in (1.0, 0.5):
            one, many = two_heads(11, mesh, sample_rate=rate)
            alone, x, y = Identities(one), *batch_of(sizes, 11)
            raises(RuntimeError, "", lambda: DistributedDataParallel(Identities(ShardedPartialFC(12, 6, dtype=f64, mesh=mesh)), process_group=mesh.get_group()))
            model = fl.ignore_in_ddp(Identities(many))
            assert model._ddp_params_and_buffers_to_ignore == ["head.weight"]
            ddp = DistributedDataParallel(model, process_group=mesh.get_group())
            optimizers = [ShardedRowSparse(torch.optim.SGD, m.parameters(), lr=0.1, momentum=0.9) for m in (alone, ddp)]
            for step in range(3):
                x, y = batch_of(sizes, 11, step)
                wanted, got = alone(x, y), ddp(part_of(x, sizes, rank), part_of(y, sizes, rank))
                assert_close(got, wanted)
                for optimizer, loss in zip(optimizers, (wanted, got)):
                    optimizer.zero_grad()
                    loss.backward()
                assert_close(ddp.module.body.weight.grad, alone.body.weight.grad)
                assert_close(of_all_ranks(many), one.weight.grad.to_dense())
                fl.clip_grad_value_(ddp.parameters(), 0.1), fl.clip_grad_value_(alone.parameters(), 0.1)
                assert_close(fl.clip_grad_norm_(ddp.parameters(), 0.5), fl.clip_grad_norm_(alone.parameters(), 0.5))
                [optimizer.step() for optimizer in optimizers]
            assert_close(whole(many.weight), one.weight)


@case
def plain_heads_inside_ddp(meshes):
    from torch.nn.parallel import DistributedDataParallel
    for ranks, mesh, rank in mine(meshes[1:2]):
        raises(ValueError, "module: expected heads over ranks (ShardedPartialFC with a mesh), or with sparse=False", lambda: fl.ignore_in_ddp(
            Identities(PartialFC(11, 6, sample_rate=0.5, dtype=f64))))
        head = PartialFC(11, 6, sample_rate=0.5, sparse=False, dtype=f64)
        each = [copy.deepcopy(Identities(head)) for _ in range(2)]
        ddp = DistributedDataParallel(fl.ignore_in_ddp(Identities(copy.deepcopy(head))), process_group=mesh.get_group())
        dist.broadcast(head.weight.data, 0, group=mesh.get_group())
        batches = [batch_of([4], 11, seed) for seed in range(2)]
        for model, (x, y) in zip(each, batches):
            model.head.weight.data.copy_(head.weight)
            model(x, y).backward()
        ddp(*batches[rank]).backward()
        assert_close(ddp.module.head.weight.grad, (each[0].head.weight.grad + each[1].head.weight.grad) / 2)


@case
def clipping_by_any_norm(meshes):
    for ranks, mesh, rank in mine(meshes):
        for rate, v in ((1.0, 5), (0.5, 2), (0.5, 11)):
            one, many = two_heads(v, mesh, sample_rate=rate)
            layers = [nn.Linear(2, 3, dtype=f64) for _ in range(2)]
            x, y = batch_of(SPLITS[ranks], v)
            for head, rows, labels in ((one, x, y), (many, part_of(x, SPLITS[ranks], rank), part_of(y, SPLITS[ranks], rank))):
                head(rows, labels).backward()
            for layer in layers:
                for i, p in enumerate(layer.parameters()):
                    p.grad = torch.linspace(-1, 2 + i, p.numel(), dtype=f64).view(p.shape)
            for norm_type in (math.inf, 2.0, 1.0, 3.0):
                params = [[*layer.parameters(), *head.parameters()] for layer, head in zip(layers, (one, many))]
                wanted, got = (fl.clip_grad_norm_(p, 0.4, norm_type) for p in params)
                assert_close(got, wanted, msg=lambda m: f"{norm_type}, {ranks} ranks: {m}")
                assert_close(layers[1].weight.grad, layers[0].weight.grad)
                assert_close(of_all_ranks(many), one.weight.grad.to_dense())


@case
def files_of_insightface_on_other_ranks(meshes):
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)
        for v in (2, 11):
            for ranks, mesh, rank in mine(meshes[2:3]):
                head = ShardedPartialFC(v, 6, mesh=mesh, seed=3)
                for files, kind in ((1, "weight"), (3, "checkpoint"), (4, "weight")):
                    folder = f"{shared[0]}/{v} {files}"
                    paths = fl.save_insightface(head, folder, files, kind=kind)
                    assert len(paths) == files and all(p.exists() for p in paths)
            dist.barrier()
            exact = PartialFC(v, 6)
            fl.load_insightface(exact, f"{shared[0]}/{v} 1")
            for ranks, mesh, rank in mine(meshes):
                for files in (1, 3, 4):
                    head = ShardedPartialFC(v, 6, mesh=mesh, seed=8)
                    fl.load_insightface(head, f"{shared[0]}/{v} {files}")
                    assert torch.equal(whole(head.weight), exact.weight)
        dist.barrier()


@case
def files_that_one_rank_cannot_take(meshes):
    "An error of one rank is every rank's, at once; no row has changed, and no file"
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)
        for ranks, mesh, rank in mine(meshes[2:3]):
            head, folder = ShardedPartialFC(11, 6, mesh=mesh, seed=3), Path(shared[0])
            paths = fl.save_insightface(head, folder, 2)
            before, held = [p.read_bytes() for p in paths], whole(head.weight).clone()
            error = "files: expected" if rank == 1 else "error on rank 1"
            raises(ValueError, error, lambda: fl.load_insightface(ShardedPartialFC(11, 6, mesh=mesh), paths[:2 - (rank == 1)]))
            save = torch.save
            def full(*args):
                raise OSError("no space left")
            torch.save = full if rank == 0 else save
            try:
                raises(OSError if rank == 0 else ValueError, "no space left", lambda: fl.save_insightface(head, folder, 2))
            finally:
                torch.save = save
            raises(ValueError, "folder: expected" if rank == 2 else "error on rank 2", lambda: fl.save_insightface(head, 3 if rank == 2 else folder, 2))
            dist.barrier(mesh.get_group())
            assert [p.read_bytes() for p in paths] == before and sorted(folder.iterdir()) == paths
            fl.load_insightface(head, folder)
            assert torch.equal(whole(head.weight), held)
        dist.barrier()


@case
def a_whole_weight_is_loaded_by_every_rank(meshes):
    layer = nn.Linear(6, 11, bias=False, dtype=f64)
    dist.broadcast(layer.weight.data, 0)
    for ranks, mesh, rank in mine(meshes):
        head = ShardedPartialFC(11, 6, mesh=mesh, sample_rate=0.5)
        with pytest.warns(UserWarning, match="sampler.seed, sampler.step keep"):
            head.load_state_dict(layer.state_dict())
        assert_close(whole(head.weight), layer.weight.float()) and isinstance(head.weight, DTensor)
        before = whole(head.weight).clone()
        raises(RuntimeError, "size mismatch", lambda: head.load_state_dict({**head.state_dict(), "weight": torch.zeros(12, 6)}))
        assert torch.equal(whole(head.weight), before)


@case
def foreign_optimizers_say_who_takes_rows(meshes):
    for ranks, mesh, rank in mine(meshes):
        head = ShardedPartialFC(11, 6, mesh=mesh, sample_rate=0.5)
        head(*(t.to(head.weight.dtype) if t.is_floating_point() else t for t in batch_of([4], 11))).backward()
        before = whole(head.weight).clone()
        for kind in (torch.optim.AdamW, torch.optim.SGD):
            if ranks > 1 or kind is torch.optim.AdamW:
                raises(ValueError, "fl.ShardedRowSparse over ranks", kind(head.parameters(), lr=0.1).step)
        assert torch.equal(whole(head.weight), before)


@case
def a_whole_state_goes_on_over_ranks(meshes):
    "PyTorch's state of one process, and this library's, each loaded over ranks: each rank takes its rows"
    from fusedloss.row_sparse import RowSparse
    kinds = (torch.optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.5)), (torch.optim.AdamW, dict(lr=0.05)), (torch.optim.Adagrad, dict(lr=0.1, rowwise=True))
    for (kind, options), (ranks, mesh, rank), begins in itertools.product(kinds, mine(some(meshes)), ("theirs", "ours")):
        if begins == "theirs" and "rowwise" in options:
            continue
        grads = [torch.randn(11, 3, generator=torch.Generator().manual_seed(k), dtype=f64).to(DEVICE) for k in range(5)]
        one = nn.Parameter(torch.ones(11, 3, dtype=f64, device=DEVICE))
        alone = kind([one], **options) if begins == "theirs" else RowSparse(kind, [one], **options)
        def go_on(p, optimizer, steps):
            for g in steps:
                p.grad = spread(g, mesh) if isinstance(p, DTensor) else g.clone()
                optimizer.step()
        go_on(one, alone, grads[:2])
        p = nn.Parameter(spread(one.detach(), mesh))
        optimizer = ShardedRowSparse(kind, [p], **options)
        state = alone.state_dict()
        optimizer.load_state_dict(state)
        go_on(one, alone, grads[2:]), go_on(p, optimizer, grads[2:])
        assert_close(whole(p).detach(), one.detach())
        if ranks > 1:
            raises(ValueError, "plain tensors, as the parameter", lambda: alone.load_state_dict(optimizer.state_dict())) if begins == "ours" else None
            raises(ValueError, "params: expected", lambda: RowSparse(kind, [p], **options))


# --- checkpoints ---

def head_and_optimizer(mesh, v, adam, seed=0, rate=0.5):
    "A head and an optimizer that have made three steps, or none with another seed"
    head = ShardedPartialFC(v, 3, mesh=mesh, sample_rate=rate, seed=seed, margin=CosFace(0.2, 8.0))
    kind, options = (torch.optim.AdamW, dict(lr=0.05)) if adam else (torch.optim.SGD, dict(lr=0.1, momentum=0.9))
    return head, ShardedRowSparse(kind, head.parameters(), **options)


def train(head, optimizer, v, rank, steps, start=0):
    "Some steps, all rows the first rank's; their losses"
    losses = []
    for step in range(start, start + steps):
        g = torch.Generator().manual_seed(step)
        x, y = torch.randn(5, 3, generator=g), torch.randint(v, (5,), generator=g)
        optimizer.zero_grad()
        loss = head(*((x, y) if rank == 0 else (x[:0], y[:0])))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def state_of(pairs):
    "What a checkpoint of heads and optimizers holds"
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    return {str(i): {"head": head.state_dict(), "optimizer": get_optimizer_state_dict(head, optimizer)} for i, (head, optimizer) in enumerate(pairs)}


def tensors_of(state, found=None, path=""):
    "All tensors of a nested state, whole, by their paths"
    found = {} if found is None else found
    for key, value in state.items():
        if isinstance(value, dict):
            tensors_of(value, found, f"{path}/{key}")
        elif isinstance(value, torch.Tensor):
            found[f"{path}/{key}"] = whole(value).clone()
    return found


def trained_pairs(mesh, v, rank, optimizers, steps, start=0, seed=0, rate=0.5):
    "Heads and their optimizers after some steps"
    pairs = [head_and_optimizer(mesh, v, adam, seed, rate) for adam in optimizers]
    for head, optimizer in pairs:
        train(head, optimizer, v, rank, steps, start)
    return pairs


def resharded(meshes, v, optimizers, folder, targets, rate=0.5):
    "Save on each number of ranks, load on others: the same bits"
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
    for ranks, mesh, rank in mine(meshes):
        state = state_of(trained_pairs(mesh, v, rank, optimizers, 3, rate=rate))
        dcp.save(state, checkpoint_id=f"{folder}/{ranks}", process_group=mesh.get_group())
        saved = tensors_of(state)
        assert {"/0/head/weight", "/0/head/sampler.step", "/0/optimizer/state/weight/momentum_buffer"} <= saved.keys()
        if rank == 0:
            torch.save(saved, f"{folder}/{ranks}.pt")
    dist.barrier()
    for ranks, mesh, rank in mine(meshes):
        pairs = trained_pairs(mesh, v, rank, optimizers, 1, start=50, seed=9, rate=rate)  # other numbers, and a state to load into
        for source in targets:
            state = state_of(pairs)
            dcp.load(state, checkpoint_id=f"{folder}/{source}", process_group=mesh.get_group())
            for (head, optimizer), part in zip(pairs, state.values()):
                head.load_state_dict(part["head"])
                set_optimizer_state_dict(head, optimizer, part["optimizer"])
            saved, loaded = torch.load(f"{folder}/{source}.pt", weights_only=True), tensors_of(state_of(pairs))
            assert saved.keys() == loaded.keys(), (saved.keys(), loaded.keys())
            for key, t in saved.items():
                assert torch.equal(t, loaded[key]), f"{key}, {source} to {ranks} ranks, {v} classes"


@case
def checkpoints_reshard(meshes):
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)
        for v in (2, 5, 11) if FULL else (2, 11):
            Path(folder := f"{shared[0]}/{v}").mkdir(exist_ok=True)
            resharded(meshes, v, (False, True), folder, (1, 2, 3, 4) if FULL else (1, 4) if v == 2 else (3,))
        Path(folder := f"{shared[0]}/many").mkdir(exist_ok=True)
        resharded(meshes[1::2], 1000003 if FULL else 100003, (False,), folder, (2, 4) if FULL else (2,), 0.001)
        dist.barrier()


@case
def a_run_goes_on_after_resharding(meshes):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
    with tempfile.TemporaryDirectory() as own:
        shared, rank = [own], dist.get_rank()
        dist.broadcast_object_list(shared)
        pairs = trained_pairs(meshes[3], 11, rank, (False, True), 3)
        dcp.save(state_of(pairs), checkpoint_id=f"{shared[0]}/one")
        wanted = [train(*pair, 11, rank, 3, start=3) for pair in pairs]
        if rank < 2:
            pairs = trained_pairs(meshes[1], 11, rank, (False, True), 1, seed=4)
            state = state_of(pairs)
            dcp.load(state, checkpoint_id=f"{shared[0]}/one", process_group=meshes[1].get_group())
            for (head, optimizer), part, losses in zip(pairs, state.values(), wanted):
                head.load_state_dict(part["head"])
                set_optimizer_state_dict(head, optimizer, part["optimizer"])
                assert_close(train(head, optimizer, 11, rank, 3, start=3), losses, rtol=1e-6, atol=0)  # fp32, by ranks of other sizes
        dist.barrier()


@case
def another_class_count_is_refused(meshes):
    import torch.distributed.checkpoint as dcp
    mesh = meshes[3]
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)
        dcp.save({"head": head_and_optimizer(mesh, 11, False)[0].state_dict()}, checkpoint_id=f"{shared[0]}/one")
        head, _ = head_and_optimizer(mesh, 13, False, seed=3)
        before = whole(head.weight).clone()
        state = {"head": head.state_dict()}
        try:
            dcp.load(state, checkpoint_id=f"{shared[0]}/one")
        except BaseException as e:  # the error of all ranks is no Exception
            assert "Size mismatch" in str(e), str(e)
        else:
            raise AssertionError("a checkpoint of 11 classes went into a head of 13")
        assert torch.equal(before, whole(head.weight))
        dist.barrier()


@case
def disagreement_is_detected(meshes):
    os.environ["FUSEDLOSS_DEBUG"] = "1"
    try:
        for ranks, mesh, rank in mine(meshes):
            if ranks == 1:
                continue
            x, w, _, y, class_weight, _ = problem(8, 4, 10)
            weight = spread(w, mesh)
            fl.linear_cross_entropy(x, weight, y)  # all agree
            raises(RuntimeError, f"input: ranks [1] of {ranks}", lambda: fl.linear_cross_entropy(x + (rank == 1), weight, y))
    finally:
        del os.environ["FUSEDLOSS_DEBUG"]


@case
def tokens_that_are_not_the_same(meshes):
    for ranks, mesh, rank in mine(meshes[1:]):
        x, w, _, y, _, _ = problem(8, 4, 10, seed=rank)  # each rank has its own, and says it with plain tensors
        weight = spread(problem(8, 4, 10)[1], mesh)
        refused_or_nan("give backbone_reduction", lambda: fl.linear_cross_entropy(x, weight, y))


@case
def ranks_that_disagree(meshes):
    "Every rank raises, at once, and names what differs; afterwards the ranks are in step"
    for ranks, mesh, rank in mine(meshes[1:]):
        x, w, _, y, class_weight, token_weight = problem(8, 4, 10)
        weight, last = spread(w, mesh), rank == ranks - 1
        call = lambda x=x, y=y, **how: fl.linear_cross_entropy(x, weight, y, **how)
        differs = lambda what, **how: raises(ValueError, f"{what}: expected the same on all ranks", lambda: call(**how))
        differs("target", y=(y + last) % 10)
        differs("shape of input", x=x[last:], y=y[last:])
        raises(ValueError, "torch.float32", lambda: call(x=x.float() if last else x))  # of the rank itself, or as the others heard it
        differs("options", logit_scale=3.0 if last else 2.0)
        differs("options", ignore_index=3 if last else -100)
        differs("reduction", reduction="sum" if last else "mean")
        differs("weight", weight=class_weight + last)
        differs("token_weight", token_weight=token_weight * (1 + last))
        differs("linear_bias", linear_bias=weight[:, 0] if last else None)
        differs("memory_budget", memory_budget=2**20 if last else None)
        differs("requires_grad of input, linear_weight and linear_bias", x=x.detach().clone().requires_grad_(not last))
        differs("requires_grad of logit_scale", logit_scale=torch.tensor(2.0, dtype=f64, device=DEVICE, requires_grad=last))
        differs("return_stats", return_stats=last)
        raises(ValueError, "target: expected" if last else f"an error on rank {ranks - 1}: target: expected", lambda: call(y=y[last:]))
        own = lambda **how: call(x[rank:], y[rank:], backbone_reduction="sum", **how)
        raises(ValueError, "options: expected the same", lambda: own(label_smoothing=0.1 * last))
        assert own().isfinite() and call().isfinite()


@case
def what_is_wrong_on_one_rank_raises_on_all(meshes):
    "Refused before ranks talk of the call, by options, modules or a head: the others hear of it, and all are in step again"
    for ranks, mesh, rank in mine(meshes[1:]):
        x, w, _, y, _, _ = problem(8, 4, 10, dtype=f32)
        weight, last = spread(w, mesh), rank == ranks - 1
        here = dict(mesh=mesh, num_classes=10)
        module, head = fl.LinearCrossEntropyLoss(4, 10), ShardedPartialFC(10, 4, mesh=mesh)
        module.weight = nn.Parameter(weight)
        scores = head.eval().logits(x)

        def fails(words, call, **wrong):
            raises(ValueError, words if last else f"an error on rank {ranks - 1}: {words}", lambda: call(**wrong if last else {}))
        loss = functools.partial(fl.linear_cross_entropy, x, weight, y)
        fails("label_smoothing: expected", loss, label_smoothing=2.0)
        fails("logit_scale: expected", loss, logit_scale="2")
        fails("method: expected", loss, method="chunks")
        fails("accumulate: expected", loss, accumulate="float16")
        fails("target_weight: expected", loss, target_weight=torch.ones(1))
        fails("max_valid: expected", functools.partial(module, x, y), max_valid=3)
        fails("label_smoothing: expected", functools.partial(sharded_linear_cross_entropy, x, weight.to_local(), y, **here), label_smoothing=2.0)
        fails("temperature: expected", functools.partial(fl.sharded_linear_log_probs, x, weight, y), temperature=-1.0)
        fails("kind: expected", functools.partial(fl.sharded_linear_divergence, x, weight, x, weight), kind="kl")
        fails("teacher_weight: expected", lambda teacher_weight=weight: fl.sharded_linear_divergence(x, weight, x, teacher_weight), teacher_weight=3)
        fails("k: expected", lambda k=2: head.topk(x, k), k=0)
        assert torch.equal(head.logits(x), scores) and loss().isfinite()


@case
def one_dimension_of_a_mesh(meshes):
    from torch.distributed.device_mesh import init_device_mesh
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, w, _, y, _, _ = problem(8, 4, 9)
    half = slice(0, 4) if mesh["dp"].get_local_rank() == 0 else slice(4, 8)  # each pair has tokens of its own
    assert_close(fl.linear_cross_entropy(x[half], spread(w, mesh["tp"]), y[half]), recompute_linear_cross_entropy(x[half], w, y[half]))
    try:
        ShardedPartialFC(10, 4, mesh=mesh)
    except ValueError as e:
        assert "mesh: expected one dimension" in str(e)
    else:
        raise AssertionError("a mesh of two dimensions went through")


@case
def a_module_whose_weight_is_spread(meshes):
    x, w, _, y, _, _ = problem(8, 4, 9, dtype=f32)
    for ranks, mesh, rank in mine(meshes):
        module = fl.LinearCrossEntropyLoss(4, 9, label_smoothing=0.1)
        module.weight = nn.Parameter(spread(w, mesh))
        assert_close(module(x, y), recompute_linear_cross_entropy(x, w, y, label_smoothing=0.1))


@case
def a_skipped_step_skips_the_head_on_every_rank(meshes):
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    for ranks, mesh, rank in mine(meshes):
        head = ShardedPartialFC(10, 4, mesh=mesh, sample_rate=0.5, backbone_reduction="sum")
        layer = nn.Linear(4, 4)
        optimizer = ShardedRowSparse(torch.optim.SGD, [*layer.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
        scaler = ShardedGradScaler(device="cpu", init_scale=8.0, process_group=mesh.get_group())
        for bad in (False, True):
            before = [whole(p).detach().clone() for p in (layer.weight, head.weight)]
            optimizer.zero_grad()
            scaler.scale(head(layer(torch.randn(3, 4)), torch.arange(3))).backward()
            if bad and rank == ranks - 1:
                layer.weight.grad[0, 0] = math.inf  # on one rank alone
            scaler.step(optimizer)
            scaler.update()
            moved = [not torch.equal(b, whole(p)) for b, p in zip(before, (layer.weight, head.weight))]
            assert moved == [not bad] * 2, (moved, bad)


@case
def memory_has_no_scores(meshes):
    from workbook.measure import peak_memory
    mesh, n, h, v = meshes[3], 64, 8, 40000
    x, w, y = torch.randn(n, h), torch.randn(v, h), torch.randint(v, (n,))
    part = spread(w, mesh).to_local().requires_grad_()
    x.requires_grad_()
    run = lambda: torch.autograd.grad(sharded_linear_cross_entropy(x, part, y, mesh=mesh, num_classes=v, memory_budget=2**20), [x, part])
    peak = peak_memory(run)
    assert peak < 4 * n * v / 4, f"{peak} bytes, all scores here are {4 * n * v // 4}"


@case
def budgets_have_room_for_autocasts_copies(meshes):
    "Chunks are then those of operands in 16 bits; those of a divergence, which talk, are alike on ranks with other numbers of tokens and classes"
    import fusedloss.divergence as divergence
    import fusedloss.topk as topk
    n, h, v, low = 300, 32, 131, torch.bfloat16
    x, w, t, u, y = torch.randn(n, h), torch.randn(v, h), torch.randn(n, h), torch.randn(v, h), torch.randint(v, (n,))
    for ranks, mesh, rank in mine(meshes):
        most, rows, y_here = -(-v // ranks), n - n * (ranks - 1)**2 // ranks**2, uneven(y, mesh)
        given = [uneven(x, mesh), spread(w, mesh).to_local(), uneven(t, mesh), spread(u, mesh).to_local()]
        student, how = 2 * h * (rows + most), dict(mesh=mesh, num_classes=v, backbone_reduction="sum")
        best = lambda b, x, w, *_: fl.sharded_linear_topk(x, w, 2, memory_budget=b, **how).log_probs
        calls = {"loss": (lambda b, x, w, *_: sharded_linear_cross_entropy(x, w, y_here, memory_budget=b, **how), 10 * 4 * most * 40, student),
                 "log-probabilities": (lambda b, x, w, *_: fl.sharded_linear_log_probs(x, w, y_here, memory_budget=b, **how).log_probs, 10 * 4 * most * 40, student),
                 "top-k": (best, 10 * 4 * most * 40, student),
                 "divergence": (lambda b, *of: fl.sharded_linear_divergence(*of, memory_budget=b, **how), 2 * 2 * 8 * -(-most // 8) * 40, 2 * student)}
        cuts, by_tokens, by_plan = [], sharded.plain_chunks, divergence.plan_chunks
        record = lambda of: lambda *sizes: cuts.append(of(*sizes)) or cuts[-1]
        with mock.patch.object(sharded, "plain_chunks", record(by_tokens)), mock.patch.object(topk, "plain_chunks", record(by_tokens)), mock.patch.object(divergence, "plan_chunks", record(by_plan)):
            for name, (call, budget, copies) in calls.items():
                with torch.autocast("cpu", low): found = call(budget + copies, *given)
                assert torch.equal(found, call(budget, *(of.to(low) for of in given))) and cuts[-1] == cuts[-2], f"{name} on {ranks} ranks"
        least = 2 * 2 * 8 * -(-most // 8) + 2 * student
        with torch.autocast("cpu", low):
            calls["divergence"][0](least, *given)
            raises(ValueError, f"memory_budget: expected an integer of at least {least} bytes here", lambda: calls["divergence"][0](least - 1, *given))
            for name in ("loss", "log-probabilities", "top-k"):
                raises(ValueError, f"memory_budget: expected more than the {student} bytes of autocast's", lambda: calls[name][0](student, *given))


# --- wrappers of whole models: every parameter's gradient against one process ---

class Model(nn.Module):
    "A backbone, a head, and the loss in forward, where FSDP2 and DDP reduce gradients"
    def __init__(self, **options):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), nn.Linear(6, 11)
        self.to(DEVICE, f64).options = options
        numbers = torch.Generator().manual_seed(0)
        for p in self.parameters():
            p.data.copy_(torch.randn(p.shape, generator=numbers, dtype=f64))  # the same on every rank

    def forward(self, x, y):
        return fl.linear_cross_entropy(self.body(x), self.head, y, **self.options)


def shared_batch(mesh):
    "All ranks' rows and labels, and this rank's; ranks have other numbers of rows and of valid labels"
    x, y = batch_of([3, 7], 11)
    y[y < 0], y[:2] = -100, -100
    return (x, y), tuple(part_of(t, [3, 7], mesh.get_local_rank()) for t in (x, y))


def single(batches):
    "Gradients of one process, of the mean over `batches` of each one's mean"
    model = Model()
    (sum(model(*batch) for batch in batches) / len(batches)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def same_gradients(model, wanted):
    "Raise unless every parameter has the gradient of one process"
    found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    assert found.keys() == wanted.keys()
    for name, g in found.items():
        assert_close(whole(g), wanted[name], msg=lambda m: f"{name}: {m}")


def wrapped_apart(mesh, how, root):
    "FSDP2 around the backbone and the head, each apart, and maybe around both; told to average or to add"
    from torch.distributed.fsdp import fully_shard
    model = Model(backbone_reduction=how)
    for module in (model.body, model.head, *([model] if root else [])):
        fully_shard(module, mesh=mesh)
        if how == "sum":
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


@case
def fsdp_with_its_head_apart(meshes):
    for ranks, mesh, rank in mine(meshes[1:2]):
        together, own = shared_batch(mesh)
        wanted = single([together])
        for how in ("mean", "sum"):
            for root in (False, True):
                model = wrapped_apart(mesh, how, root)
                loss = model(*own)
                loss.backward()
                assert_close(loss, Model()(*together))
                same_gradients(model, wanted)
                assert isinstance(model.head.weight, DTensor)


@case
def fsdp_at_the_root(meshes):
    from torch.distributed.fsdp import fully_shard
    for ranks, mesh, rank in mine(meshes[1:2]):
        together, own = shared_batch(mesh)
        count = (together[1] >= 0).sum()
        each = [[part_of(t, [3, 7], r) for t in together] for r in range(2)]
        model = fully_shard(Model(), mesh=mesh)
        model(*own).backward()  # a mean of each rank's mean
        same_gradients(model, single(each))
        model = fully_shard(Model(reduction="sum"), mesh=mesh)
        (model(*own) * ranks / count).backward()  # the mean over all ranks' tokens
        same_gradients(model, single([together]))


@case
def ddp_through_its_forward(meshes):
    from torch.nn.parallel import DistributedDataParallel
    for ranks, mesh, rank in mine(meshes[1:2]):
        together, own = shared_batch(mesh)
        each, count = [[part_of(t, [3, 7], r) for t in together] for r in range(2)], (together[1] >= 0).sum()
        ddp = DistributedDataParallel(Model(), process_group=mesh.get_group())
        ddp(*own).backward()
        same_gradients(ddp, single(each))
        ddp = DistributedDataParallel(Model(reduction="sum"), process_group=mesh.get_group())
        (ddp(*own) * ranks / count).backward()
        same_gradients(ddp, single([together]))
        ddp = DistributedDataParallel(Model(), process_group=mesh.get_group())
        ddp.module(*own).backward()  # past DDP's forward nothing is reduced, as page 10 says
        same_gradients(ddp, single(each[rank:rank + 1]))


@case
def a_weight_cast_to_its_inputs_dtype(meshes):
    for ranks, mesh, rank in mine(meshes[1:2]):
        x, w, _, y, _, _ = problem(9, 8, 11, dtype=f32)
        weight = spread(w, mesh).requires_grad_()  # as FSDP2's mixed precision leaves it
        own = uneven(x, mesh).bfloat16().requires_grad_()
        fl.linear_cross_entropy(own, weight.to(own.dtype), uneven(y, mesh), backbone_reduction="mean").backward()
        whole_x, whole_w = x.bfloat16().double().requires_grad_(), w.bfloat16().double().requires_grad_()
        recompute_linear_cross_entropy(whole_x, whole_w, y).backward()
        assert weight.grad.dtype == f32 and own.grad.dtype == torch.bfloat16
        assert_close(whole(weight.grad).double(), whole_w.grad, rtol=2e-2, atol=2e-3)
        assert_close(own.grad.double(), ranks * uneven(whole_x.grad, mesh), rtol=2e-2, atol=2e-3)


@case
def ddp_and_a_head_over_ranks(meshes):
    from torch.nn.parallel import DistributedDataParallel
    for ranks, mesh, rank in mine(meshes[1:2]):
        together, (x, y) = shared_batch(mesh)
        model, wanted = Model(), single([together])
        body = DistributedDataParallel(model.body, process_group=mesh.get_group())
        head = fl.LinearCrossEntropyLoss(6, 11, bias=True, backbone_reduction="mean", device=DEVICE)
        head.weight, head.bias = (nn.Parameter(spread(p.detach(), mesh)) for p in (model.head.weight, model.head.bias))
        head(body(x), y).backward()
        found = {**{f"body.{n}": p.grad for n, p in model.body.named_parameters()}, "head.weight": head.weight.grad, "head.bias": head.bias.grad}
        for name, g in wanted.items():
            assert_close(whole(found[name]), g, msg=lambda m: f"{name}: {m}")


@case
def tensor_parallel(meshes):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module, RowwiseParallel
    for ranks, mesh, rank in mine(meshes[1:2]):
        together, _ = shared_batch(mesh)
        for styles in ({}, {"body.0": ColwiseParallel(), "body.2": RowwiseParallel()}):
            model = Model()
            if styles:
                parallelize_module(model, mesh, styles)
            model.head.weight, model.head.bias = (nn.Parameter(spread(p.detach(), mesh)) for p in (model.head.weight, model.head.bias))
            loss = model(*together)  # the same tokens on all ranks
            loss.backward()
            assert_close(loss, Model()(*together))
            same_gradients(model, single([together]))


@case
def sequence_parallel(meshes):
    for ranks, mesh, rank in mine(meshes[1:2]):
        (x, y), model = shared_batch(mesh)[0], Model(backbone_reduction="sum")
        model.head.weight, model.head.bias = (nn.Parameter(spread(p.detach(), mesh)) for p in (model.head.weight, model.head.bias))
        for module in model.body:
            for name, p in list(module.named_parameters()):
                setattr(module, name, nn.Parameter(DTensor.from_local(p.detach(), mesh, [Replicate()])))
        model(spread(x, mesh), spread(y, mesh)).backward()
        same_gradients(model, single([(x, y)]))


@case
def wrong_reductions_raise(meshes):
    from torch.distributed.fsdp import fully_shard
    for ranks, mesh, rank in mine(meshes[1:2]):
        (x, y), own = shared_batch(mesh)
        w = Model().head.weight.detach()
        weight, tokens = spread(w, mesh).requires_grad_(), spread(x, mesh).requires_grad_()
        ask = lambda x, w, how, y=y: lambda: fl.linear_cross_entropy(x, w, y, backbone_reduction=how)
        same = DTensor.from_local(x, mesh, [Replicate()])
        raises(ValueError, "backbone_reduction: expected 'mean', 'sum' or None, got 'average'", ask(x, weight, "average"))
        raises(ValueError, "backbone_reduction: expected 'mean', 'sum' or None, got 'average'", ask(x, w, "average"))
        raises(ValueError, "backbone_reduction: expected 'mean' where", ask(tokens, weight, None, spread(y, mesh)))
        raises(ValueError, "backbone_reduction: expected None for an input that is the same", ask(same, weight, "mean"))
        raises(ValueError, "backbone_reduction: expected None for a weight that is whole", ask(x, w, "mean"))
        model = fully_shard(Model(backbone_reduction="mean"), mesh=mesh)  # in its forward the weight is whole
        raises(ValueError, "backbone_reduction: expected None for a weight that is whole", lambda: model(x, y))
        raises(ValueError, "input: expected a whole, local tensor", ask(tokens, w, "mean"))
        refused_or_nan("give backbone_reduction: 'mean'", ask(x, weight, None, y.roll(rank)))
        assert weight.grad is None and tokens.grad is None
        with torch.no_grad():
            ask(tokens, weight, None, spread(y, mesh))()  # nothing goes back: nothing to know


# --- every argument of the front door, for a weight over ranks ---

def arguments(x, w, b, y, class_weight, token_weight):
    "Of each argument: values that give one process's loss, and values that raise an error that names it"
    return dict(
        input=([x], [x.tolist(), x[:, :3], x.long()]), target=([y.int(), y[:, None]], [y.tolist(), y[:3], y.double(), y == 1, y[:, None].repeat(1, 3)]),
        linear_weight=([w], [w[0], w.float(), w.long()]), linear_bias=([b, None], [b[:3], b.tolist(), b.float()]),
        weight=([class_weight, None], [class_weight[:3], class_weight.long(), class_weight.tolist()]),
        token_weight=([token_weight, None], [token_weight[:3], token_weight.long(), token_weight.tolist()]), target_weight=([None], [class_weight[:3]]),
        reduction=(["mean", "sum", "none"], ["average", None]), ignore_index=([-100, 3], [None, 1.5]), shift=([0, 1], [-1, 1.5, None]),
        label_smoothing=([0.2], [2.0, -1.0, "much"]), logit_scale=([0.5], [0.0, -1.0, "much"]), softcap=([3.0, None], [0.0, "much"]),
        z_loss=([0.01], [-1.0, "much"]), method=(["auto", "product", "recompute"], ["eager", "tiles", "chunks", "best", None]),
        memory_budget=([None, 2**20], [0, -1, 1.5, "1GB"]), accumulate=(["auto", "float32", "native"], ["nonsense", None]),
        filter_eps=([None], [0.1, 0.0, "much"]), max_valid=([None], [9, -1]), backbone_reduction=([None], ["average", 1]), return_stats=([False], []),
        matmul_dtype=([None], [torch.float8_e4m3fn, torch.float16, "fp8"]), forward_dtype=([None], [torch.float8_e4m3fn, "fp8"]))


@case
def every_argument_works_or_raises(meshes):
    x, w, b, y, class_weight, token_weight = problem(9, 4, 11)
    y = y.clamp(min=0)
    table = arguments(x, w, b, y, class_weight, token_weight)
    for ranks, mesh, rank in mine(meshes[1:2]):
        over_ranks = lambda name, t: spread(t, mesh) if name.startswith("linear_") and isinstance(t, torch.Tensor) else t
        def ask(name, value, place=over_ranks):
            given = {**dict(input=x, linear_weight=w, target=y), name: value}
            return fl.linear_cross_entropy(**{key: place(key, t) for key, t in given.items()})
        for name, (good, bad) in table.items():
            for value in good:
                assert_close(ask(name, value), ask(name, value, lambda key, t: t), msg=lambda m: f"{name}={value}: {m}")
            for value in bad:
                raises(ValueError, f"{name}: expected", lambda: ask(name, value))
        for change in (dict(chunk_size=4), dict(max_valid=5)):
            module = fl.LinearCrossEntropyLoss(4, 11, dtype=f64, chunk_size=change.get("chunk_size"))
            module.weight = nn.Parameter(spread(w, mesh))
            raises(ValueError, f"{[*change][0]}: expected None", lambda: module(x, y, max_valid=change.get("max_valid")))


# --- planted bugs that one process cannot see ---

BUGS = {
    "the average of a wrapper forgotten": ("out[:b.own] if b.factor == 1 else out[:b.own].mul_(b.factor)", "out[:b.own]"),
    "times R before a sum too": ('.numel(), s.ranks if backbone_reduction == "mean" else 1', ".numel(), s.ranks"),
    "a mean over this rank's tokens": ("total_weight(y, weight, weights,", "total_weight(y[b.token_slice(s)], weight, None if weights is None else weights[b.token_slice(s)],"),
    "another rank's tokens": ("start = 0 if self.shared else s.rank * self.rows", "start = 0 if self.shared else (s.ranks - 1 - s.rank) * self.rows"),
    "upstream gradients of this rank alone": ("return all_gather(padded, s).flatten(0, 1), None, None", "return padded.repeat(s.ranks, *[1] * (g.dim() - 1)), None, None"),
    "rows that pad are tokens": ("own.labels[len(x) :] = y, ignore_index", "own.labels[len(x) :] = y, 0"),
    "input's gradient by this rank's classes": ("if s.group is None or not total.numel()", "if b.shared or s.group is None or not total.numel()"),
    "maxima merged in another unit": ("merge_sums(sums, log2_scale, masses)", "merge_sums(sums, 1.0, masses)"),
    "a unit of this rank's tokens": ("sums_log2_scale(x_all)  #", "sums_log2_scale(x)  #"),
    "a scale by this rank's biases": ("all_reduce(g.clone(), s) if b.shared else g * b.factor", "g * b.factor"),
    "a scale of biases that a wrapper divides": ("all_reduce(g.clone(), s) if b.shared else g * b.factor", "all_reduce(g.clone(), s) if b.shared else g"),
}


def answers(module, mesh, kind, reduction, how, n=7):
    "Loss and gradients of a module over ranks, and what they should be"
    x, w, b, y, _, token_weight = problem(n, 4, 11)
    here = lambda t: t if t is None or kind == "plain" else uneven(t, mesh)
    token_weight = None if reduction == "mean" else token_weight  # a weight of 0 would hide rows that pad
    leaves = [t.requires_grad_() for t in (x, w, b, torch.tensor(1.3, dtype=f64, device=DEVICE))]
    wanted = recompute_linear_cross_entropy(*leaves[:2], y, linear_bias=b, logit_scale=leaves[3], token_weight=token_weight, reduction=reduction)
    g = torch.linspace(-1, 2, wanted.numel(), dtype=f64, device=DEVICE).view(wanted.shape)
    dx, dw, db, ds = torch.autograd.grad(wanted, leaves, g)
    own = [here(x.detach()).clone(), spread(w.detach(), mesh), spread(b.detach(), mesh), leaves[3].detach().clone()]
    own = [t.requires_grad_() for t in own]
    got = module.sharded_linear_cross_entropy(*own[:2], here(y), linear_bias=own[2], logit_scale=own[3], token_weight=here(token_weight), reduction=reduction, backbone_reduction=how)
    per_token = here if reduction == "none" else lambda t: t
    *found, of_scale = torch.autograd.grad(got, own, per_token(g))
    factor = mesh.size() if how == "mean" else 1
    if kind == "own": dist.all_reduce(of_scale, group=mesh.get_group())
    return [got, *map(local, found), of_scale], [per_token(wanted), here(dx) * factor, *(spread(t, mesh).to_local() for t in (dw, db)), ds * factor]


def is_wrong(module, mesh):
    "Whether some rank gets another loss or gradient than one process; all ranks finish all calls"
    pairs = [answers(module, mesh, *how) for how in (("own", "mean", "mean"), ("own", "none", "sum"), ("plain", "mean", None))]
    with as_the_kernels(module):
        pairs.append(answers(module, mesh, "own", "sum", "sum", 3))  # the first rank has none
    off = [a.shape != e.shape or not torch.allclose(a, e) for got, wanted in pairs for a, e in zip(got, wanted)]
    found = torch.tensor(float(any(off)), device=DEVICE)
    dist.all_reduce(found, group=mesh.get_group())
    return bool(found)


@case
def peers_over_ranks_say_what_pytorch_says(meshes):
    from workbook.peers import peers_over_ranks
    mesh = meshes[-1]  # of all: Megatron's groups are
    steps, missing = peers_over_ranks(mesh)
    assert "PyTorch, loss_parallel" in steps, missing
    x, w, _, y, _, _ = problem(9, 4, 12, dtype=f32)
    y, leaves = y.clamp(min=0), [x.requires_grad_(), w.requires_grad_()]
    log_p = (x @ w.T).log_softmax(1)
    loss, entropy = nn.functional.nll_loss(log_p, y), -(log_p.exp() * log_p).sum(1).mean()
    for name, step in steps.items():
        wanted = loss + entropy if name.endswith("log-probs") else loss
        rounded = {} if name.startswith("PyTorch") else dict(rtol=2e-2, atol=2e-3)  # others take bf16 somewhere
        found = step(x, spread(w.detach(), mesh).requires_grad_(), y)
        assert_close((found[0], found[1], whole(found[2])), (wanted, *torch.autograd.grad(wanted, leaves, retain_graph=True)), **rounded)


@case
def the_example_measures_in_turn(meshes):
    mesh = meshes[-1 if DEVICE == "cuda" else 1]  # of all GPUs: Megatron's groups are
    if mesh.get_coordinate() is None:
        return
    program, traced = example_module("many_gpus"), mock.patch("in_turn.peak_memory", lambda step, device: step() or 0)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(program, "RESULTS", Path(folder) / "many.json"):
        program.language_model(mesh, Shape(24, 16, 24), f32, rounds=2, calls=1)
        program.beside_peers(mesh, Shape(26, 16, 24), f32, rounds=2, calls=1)
        with contextlib.nullcontext() if DEVICE == "cuda" else traced:  # on a CPU sparse gradients are not traced
            program.class_head(mesh, 40, 12, "a head", h=16, dtype=f32, rounds=2, calls=1)
        program.choices(mesh, Shape(24, 16, 80), f32, rounds=2, calls=1)
        for name, candidates in (("pairs", 1), ("hard negatives", 3)): program.contrast(mesh, 24, name, h=16, dtype=f32, candidates=candidates, rounds=2, calls=1)
        records = load_results(program.RESULTS)
    found, beside = ({r["name"]: r["figures"] for r in records if (r["shape"]["N"] == 26) == of} for of in (False, True))
    if mesh.get_local_rank():
        assert not found
        return
    for name in ("one GPU", "tokens on all", "tokens spread", "tokens spread, product", "PyTorch, loss_parallel"):
        assert all(0 <= beside[name][kind] < 1e-5 for kind in ("loss error", "dx error", "dw error")), (name, beside[name])
    alone = {f"{of}one GPU" for of in ("", "log-probs, ", "divergence, ")}
    apart = {f"{of}tokens {where}{how}" for where in ("on all", "spread") for of, how in (("", ""), ("", ", product"), ("log-probs, ", ""), ("divergence, ", ""))}
    heads = {r["shape"]["R"]: r["shape"]["V"] for r in records if r["name"] == "a head"}
    assert heads == {1: 40, mesh.size(): 40 * mesh.size()}
    assert alone | apart | {"PyTorch, loss_parallel", "a head", "pairs", "pairs, one GPU", "hard negatives", "hard negatives, one GPU", "top-k, tokens on all", "top-k, tokens spread", "sample, tokens on all"} <= found.keys() and found["pairs"]["linear"] > 0
    for name in alone | apart | {"PyTorch, loss_parallel"}:
        for f in (found[name], found[f"{name}, one by one"]):
            assert f["seconds"] > 0 and f["peak"] > 0 and ("linear" in f) == (name not in alone), (name, f)
    assert all(f.keys() & {"seconds", "reason"} for f in found.values())


@case
def planted_bugs_are_noticed(meshes):
    for ranks, mesh, rank in mine(meshes[1:2]):
        for bug, pairs in {None: unchanged(BUGS.values()), **BUGS}.items():
            with tempfile.TemporaryDirectory() as folder:
                assert is_wrong(planted(sharded, Path(folder), *pairs), mesh) == (bug is not None), bug
