"""Every Triton kernel that the library may launch is compiled for six architectures without a GPU: it fits their shared memory and their registers."""
import json
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

import fusedloss.filter as with_filter
from fusedloss import (
    clusters, contrast, fp8, kernels, lattices, linear_ctc, logprobs, product as stage_9, recompute, row_sparse, samples, scans, sharded_product, topk, transducer)
from fusedloss.core import column_sums, cosine, pairs, sampling, score_product
from fusedloss.core.devices import GPUS
from fusedloss.core.hopper import IN_TURN
from fusedloss.core.options import LossOptions, statistics_of
from fusedloss.core.tiling import is_busy, tiling_of
from grids import FULL, thorough_but
from offline import cuda, lines_of, triton_kernels
from typed_launches import lowerer
from workbook.support import ONE_EACH as DEVICES  # by architecture

f16, bf16, f32, f64, i64 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64
REGISTERS = 255  # a thread, on all of them
OPTIONS = {"plain": (LossOptions(), False), "busy": (LossOptions(label_smoothing=0.1, logit_scale=2.0, softcap=30.0, z_loss=1e-4), True),
           "scaled": (LossOptions(logit_scale=2.0), False)}


def matrix(rows, width, dtype):
    "One that descriptors take if its width is a multiple of eight; else its strides are no constants"
    return cuda(rows, width, dtype=dtype) if width % 8 == 0 else cuda(rows, 2 * width, dtype=dtype)[:, ::2]


def vector(size):
    "An upstream gradient whose stride is no constant"
    return cuda(size, 3)[:, 1]


def rows(V, dtype, how):
    "Cross entropy of logits [4096,V]"
    o, stats = OPTIONS[how]
    M = 4096
    z, g = matrix(M, V, dtype)[:, None], vector(M)
    y, w, w_t = cuda(M, dtype=i64), cuda(V), cuda(M)
    w, w_t = (w, w_t) if stats else (None, None)
    losses, _, entropy, stored = kernels.launch_scan(z, y, w, w_t, o, statistics_of(stats), denominator=cuda())
    kernels.launch_bwd(g, g if stats else None, g if stats else None, z, torch.empty_like(z), y, w, w_t, stored, entropy, o, cuda())
    clusters.launch_turnaround(z, y, w, w_t, cuda(), o)
    clusters.launch_scale(z, z, g, None)
    clusters.launch_scale(z, torch.empty_like(z), g, cuda())


def divergences(dtype, V, kind):
    "Of rows of a student's logits from a teacher's [4096,V], whole and with their classes over ranks; and their gradient"
    z, p = (cuda(4096, V + 1, dtype=dtype)[:, :V] for _ in "qp")
    capped = kind == "jsd"
    each = cuda(4096) if V in (100, 128256) else None  # a temperature for each row
    o = pairs.DivergenceOptions(kind, 0.5, 0.5, 0.25, 30.0 * capped, 50.0 * capped)
    for turn in (False, True):
        pairs.launch_divergence(z, p, cuda(4096) if capped else None, cuda(), o, turn, dtype == f16, each)
    numbers, rows = pairs.pair_numbers(z, p, o, each), cuda(4096)
    if kind == "jsd": pairs.mixture_numbers(z, p, numbers[:4], o, each)
    pairs.put_joined_gradient(z, p, pairs.JoinedPairs(numbers[:4], rows, rows), rows, o, each)


def against_probabilities(dtype, V, how):
    "Cross entropy of logits [64,64,V] whose classes come first, and of logits [4096,V]; its gradient, too"
    o, stats = OPTIONS[how]
    w, w_t = (cuda(V), cuda(4096)) if stats else (None, None)
    for z in (cuda(64, V, 64, dtype=dtype).transpose(1, 2), cuda(4096, 1, V, dtype=dtype)):
        for dz in (None, torch.empty_like(z), z):
            pairs.launch_soft(z, cuda(*z.shape), dz, w, w_t, cuda(), o, dtype == f16)


def several_labels(dtype, V, how, labels=3):
    "Cross entropy of logits [4096,V] against several labels a row; its gradient, too"
    o, stats = OPTIONS[how]
    w, share = (cuda(V), cuda(4096, labels)) if stats else (None, None)
    z, y = cuda(4096, V + V % 8, dtype=dtype)[:, :V], cuda(4096, labels, dtype=i64)
    for dz in (None, torch.empty_like(z), z):
        pairs.launch_labels(z, y, dz, w, share, cuda(), o, dtype == f16)


def linear(dtype, how, width, V=65536, bias=False):
    "The recomputed loss of x [8192,width], forward and backward"
    o, stats = OPTIONS[how]
    N = 8192
    x, w, y, g = matrix(N, width, dtype), matrix(V, width, dtype), cuda(N, dtype=i64), vector(N)
    b, w_v, w_t = (cuda(V, dtype=dtype), cuda(V), cuda(N)) if stats else (None, None, None)
    _, _, entropy, stored = recompute.launch_lse(x, w, y, b, w_v, w_t, None, o, statistics_of(stats))
    recompute.kernel_bwd((g, None, g if stats else None), x, w, y, b, w_v, w_t, None, stored, entropy, o, 0, (True, True, stats))


def best_classes(dtype, width, how, V=65536, N=2048, k=20):
    "The k largest scores of x [2048,width], in few rows and in many, in tiles of both widths; and gradients of listed classes"
    o, stats = OPTIONS[how]
    o = LossOptions(logit_scale=o.logit_scale, softcap=o.softcap)
    w, b = matrix(V, width, dtype), cuda(V, dtype=dtype) if stats else None
    for rows in (64, N):
        x, each = matrix(rows, width, dtype), cuda(rows) if stats else None  # a temperature for each row
        t = tiling_of(x, w, is_busy(o, False))
        for cut in (t, t._replace(BV=IN_TURN.narrow)):
            maxima, tiles = cuda(-(-V // cut.BV), rows).T, cuda(rows, k, dtype=i64)
            topk.launch_best(maxima, k)
            topk.launch_best(topk.launch_listed_scores(x, w, b, each, tiles, o, cut), k)
        recompute.launch_sums(x, w, cuda(rows, dtype=i64), b, None, o, tiling=t, temperature=each, run=1, unscaled=True)
    recompute.launch_listed(matrix(N, 4096, dtype), recompute.ListedGradients(cuda(N, k, dtype=i64), cuda(N, k)), 8)


def exponentials(width, V=65536, B=4096):
    "What Triton does of a chunk of tokens whose product leaves exponentials, and of stage 7's rows by that product"
    x, w, y = matrix(B, width, bf16), matrix(V, width, bf16), cuda(B, dtype=i64)
    out = stage_9.Rows(cuda(B), cuda(B), cuda(B), cuda(B), cuda(dtype=torch.int32))
    for o, b in ((OPTIONS["plain"][0], None), (LossOptions(softcap=30.0), cuda(V, dtype=bf16)), (LossOptions(label_smoothing=0.1), cuda(V, dtype=bf16))):
        k = stage_9.work_of(x, w, y, cuda(V), cuda(B), cuda(), o, B, None, score_product.IN_TURN, b)
        k = k._replace(room=k.room._replace(e=matrix(B, V, bf16)))
        stage_9.launch_rows(out, k.room, *k.labels, out.failed)
        stage_9.launch_better_offsets(k, cuda(k.tiles, B, 2), out.failed)
    stage_9.launch_scaled(matrix(B, width, bf16), x, out.coefs, out.at_target, y, w, k.spread.pull, k.spread.mean)
    for factors in (out.coefs, None): column_sums.launch_column_sums(matrix(B, V, bf16), factors)
    stage_9.launch_targets(cuda(V)[:, None], cuda(B)[:, None], y, out.at_target)
    stage_9.launch_scaled(matrix(B, width, bf16), x, out.coefs, out.at_target, y, w)
    stage_9.launch_targets(matrix(V, width, bf16), x, y, out.at_target)
    score_product.merge_statistics(cuda(7, B), cuda(k.tiles, B, 2), None, y, V, 1.0)
    score_product.merge_statistics(cuda(7, B), cuda(k.tiles, B, 2), cuda(k.tiles, B), y, V, 1.0)
    score_product.put_targets(matrix(B, V, bf16), cuda(6, B), cuda(B), y, 1.0)
    score_product.put_targets(matrix(B, V, bf16), cuda(6, B), cuda(B), y, 1.0, True)


def listed(dtype, width, classes, V=65536, N=8192):
    "Scores of several classes a row of x [8192,width], and what they bring to the gradients"
    x, w, y, d = matrix(N, width, dtype), matrix(V, width, dtype), cuda(N, classes, dtype=i64), cuda(N, classes)
    logprobs.launch_class_scores(x, w, cuda(V, dtype=dtype), y)
    stage_9.launch_scaled(x, x, cuda(N), d, y, w)
    stage_9.launch_targets(w, x, y, d)
    stage_9.launch_targets(cuda(V, dtype=dtype)[:, None], cuda(N)[:, None], y, d)


def eight_bits(width, V=65536, B=4096):
    "The heavy entries of a chunk of exponentials, and their sums"
    x, w, y, e = matrix(B, width, bf16), matrix(V, width, bf16), cuda(B, dtype=i64), matrix(B, V, bf16)
    rows = stage_9.Rows(cuda(B), cuda(B), cuda(B), cuda(B), cuda(dtype=torch.int32))
    heavy, found = cuda(B, V // fp8.TILE, dtype=torch.uint8), fp8.Entries(*(cuda(B, fp8.LISTED, dtype=dtype) for dtype in (torch.int32, f32)), cuda(B, dtype=torch.int32))
    fp8.launch_entries(found, e, y, rows, cuda(B), heavy, fp8.TILE)
    fp8.launch_row_sums(x, cuda(B, width), rows, w, found)
    factors = fp8.RowFactors(cuda(B), cuda(B), cuda(B))
    fp8.launch_row_factors(factors, rows, x)
    fp8.launch_divided(factors)
    for dtype in (bf16, f32): fp8.launch_class_sums(cuda(V, width, dtype=dtype), x, found)


def over_ranks(ranks, V=16384, B=4096):
    "What Triton does of a chunk of tokens whose classes are over ranks, with and without weights"
    x, w, y = matrix(B, 2048, bf16), matrix(V, 2048, bf16), cuda(B, dtype=i64)
    k = stage_9.work_of(x, w, y, None, None, None, OPTIONS["plain"][0], B, None, score_product.IN_TURN)
    k = k._replace(room=k.room._replace(sums=cuda(k.tiles, B)))
    for wanted in (None, cuda(dtype=torch.int32)):
        sharded_product.launch_numbers(cuda(3, B), cuda(dtype=torch.int32), k, wanted)
    out = sharded_product.Merged(cuda(B), cuda(B), cuda(B))
    for weights in ((None, None, None), (cuda(ranks * V), cuda(B), cuda())):
        sharded_product.launch_merge(out, cuda(ranks, 3, B), 0, sharded_product.Tokens(x, y, y, *weights, OPTIONS["plain"][0], ranks * V))


def filtered(dtype, how, width, V=65536):
    "The same with a filter"
    o, stats = OPTIONS[how]
    o = o._replace(label_smoothing=0.0)
    N = 8192
    x, w, y, g = matrix(N, width, dtype), matrix(V, width, dtype), cuda(N, dtype=i64), vector(N)
    b = cuda(V, dtype=dtype) if stats else None
    _, _, entropy, stored, classes, tokens, *kept = with_filter.filtered_fwd(x, w, y, b, None, None, None, o, statistics_of(stats), 0, 1e-3)
    order = with_filter.Order(classes, tokens)
    with_filter.filtered_kernel_bwd((g, None, g if stats else None), x, w, y, b, None, None, None, stored, entropy, o, 0, (True, True, stats), order, *kept)


def heads(dtype, width, V=65536, conflict=2.0):
    "PartialFC: sampling, unit rows, scores and their gradient, the optimizer"
    N = 1024
    x, w, y, g = matrix(N, width, dtype), matrix(V, width, dtype), cuda(N, dtype=i64), cuda(N)
    seed, step = cuda(1, dtype=i64), cuda(1, dtype=i64)
    c = sampling.launch_columns(y, seed, step, sampling.Strata(10, 100, 7), 0, V, -1, 0.0, f32)
    sampling.draw(seed, step, sampling.Strata(10, 100, 7), 0, V)
    ux, xi, uw, _ = cosine.unit_rows_of_two(x, c.x_rows, w, c.w_rows, dtype, 1e-12)
    o = cosine.HeadConfig(eps=1e-12, conflict=conflict, conflict_score=0.0)
    for margin in (None, cosine.AffineMargin(64.0, -0.35)):
        cosine.launch_negatives_lse(ux, uw, c.target_column, c.shift, o, margin=margin, loss_weight=None if margin is None else g)
    cosine.launch_negatives_lse(ux, uw, c.target_column, None, o)
    dz, t = cuda(N, len(uw), dtype=dtype), tiling_of(ux, uw)
    cosine.launch_cosine_dz(ux, uw, dz, c.target_column, c.shift, (g, g, g), 0, o, t)
    cosine.to_tangent(cuda(N, width), ux, xi, None, cuda(N, width, dtype=dtype))
    cosine.to_tangent(cuda(N, width), ux, xi, cuda(), cuda(N, width))


def optimizers(dtype, width=512, V=4096):
    "Row-sparse updates"
    p, g, rows, times = cuda(V, width, dtype=dtype), cuda(1024, width), cuda(1024, dtype=i64), cuda(V, dtype=i64)
    for adam, nesterov in ((True, False), (False, True), (False, False)):
        u = row_sparse.Update(adam, 0.1, 0.01, 0.9, 0.999, 1e-8, nesterov, 1.0)
        second = cuda(V, width) if adam else None
        row_sparse.launch_update(p, cuda(V, width), second, times, g, rows, None, u, 1 if dtype == bf16 else None)
        row_sparse.launch_update(p, cuda(V, width), second, None, g, None, cuda(V, dtype=i64), u, None)
    for rowwise in (False, True):
        u = row_sparse.Update(False, 0.1, 0.01, 0.1, 0.0, 1e-8, False, 1.0, True, rowwise)
        row_sparse.launch_update(p, cuda(V) if rowwise else cuda(V, width), None, times, g, rows, None, u, 1 if dtype == bf16 else None)
        row_sparse.launch_update(p, cuda(V) if rowwise else cuda(V, width), None, None, g, None, cuda(V, dtype=i64), u, None)


def contrasts(dtype, width, N=8192):
    "Blocks of scores of pairs: their sums, and their gradient on the diagonal and beside it"
    x, y, s = matrix(N, width, dtype), matrix(N, width, dtype), cuda(1)
    contrast.launch_statistics(x, y, s, cuda(2, N), cuda(2, N))
    contrast.launch_statistics(x, y, s, cuda(2, N), cuda(2, N), (True, True))
    contrast.launch_pair_losses(x, y, s, cuda(2, N), cuda(2, N))
    contrast.launch_pair_losses(x, y, s, cuda(2, N), cuda(2, N), *contrast.launch_parts(x, y, s))
    marks = [contrast.Positives(cuda(N, P, dtype=i64), cuda(N), cuda(N), cuda(N)) for P in (1, 3)]
    for g, top, count in ((vector(N), None, None), (cuda(N), cuda(1), cuda(1, dtype=i64))): contrast.launch_upstream(g, top, s, 0.5, count, N)
    for positives, fresh in zip(marks, (True, False)):
        P, counts, sums = positives.index.shape[1], cuda(N + 1, dtype=i64), cuda(2, N, dtype=i64)
        named = contrast.Named(positives.index, 2 * N, 2 * N, counts[-1:] if fresh else None)
        contrast.launch_scores(x, y, s, named, N, cuda(N, P), counts)
        contrast.launch_losses(cuda(N, P), named, cuda(2, N), cuda(2, N), counts, N, cuda(N), fresh)
        contrast.launch_shares(cuda(N), named, N, cuda(3, N), sums, fresh)
        contrast.launch_column_terms(sums, counts, 2 * N, cuda(N))
    for paired, positives, need_scale in ((True, None, True), (False, None, True), (False, None, False), (False, marks[0], True), (False, marks[1], False)):
        contrast.launch_dz(x, y, s, (cuda(2, N), cuda(N)), (cuda(2, N), cuda(N)), paired, positives, 0, need_scale, matrix(N, N, dtype))
    for targets in (contrast.BlockTargets(True), contrast.BlockTargets(False), *(contrast.BlockTargets(False, m.index, 0, N) for m in marks)):
        contrast.launch_sigmoid_losses(x, y, s, s, targets, cuda(N), targets.paired)
        for need_numbers in (True, False): contrast.launch_sigmoid_dz(x, y, s, s, targets, cuda(N), need_numbers, matrix(N, N, dtype))


def sampled(dtype, width, N, how, V=65536):
    "Samples of rows from all classes, and from those that filters keep"
    o, more = OPTIONS[how]
    o, x, w, seeds = o._replace(label_smoothing=0.0), matrix(N, width, dtype), matrix(V, width, dtype), cuda(N, dtype=i64)
    b, t = (cuda(V, dtype=dtype), cuda(N)) if more else (None, None)
    for f in (samples.Filters(), samples.Filters(top_k=50), samples.Filters(top_p=0.9), samples.Filters(20, 0.9, 0.1)):
        samples.launch_samples(x, w, seeds, b, t, o, f)
    for start in (6, 7):  # a rank's shard
        samples.shard_samples(x, w, seeds, b, t, o, start)
        samples.launch_draw(matrix(N, V, torch.float32), seeds, cuda(7, N), cuda(N), cuda(N, dtype=torch.int32), V, -3.0, start)


def tiles_of_softmax(dtype, width, V=5000):
    "Linear CTC's product and softmax"
    x, w = matrix(8192, width, dtype), matrix(V, width, dtype)
    linear_ctc.tiled_softmax(x, w, None)(x)
    linear_ctc.tiled_softmax(x, w, cuda(V, dtype=dtype))(x)


def joints(dtype, width, activation):
    "Hidden values of a transducer's nodes, and sums of their gradients"
    e, p, lengths = cuda(4, 100, width, dtype=dtype), cuda(4, 31, width, dtype=dtype), cuda(4, dtype=i64)
    a = transducer.Packed(lattices.Grids(cuda(5, dtype=i64), lengths, lengths, 100, 30), cuda(4, 31, dtype=i64), lengths > 0, 12400)
    k, layer = transducer.Joint(e, p, a, 0, activation), transducer.Layer(cuda(70, width, dtype=dtype), cuda(70), False)
    h, _ = transducer.launch_join(k, slice(1000, 9192), layer, cuda(8192))
    transducer.launch_weighted(k, slice(1000, 9192), transducer.Upstream(cuda(2, 12400), cuda(2, 12400), cuda(4), 1.5), transducer.new_buffers(e, 8192, 70, True))
    transducer.launch_sums_of_nodes(cuda(*h.shape, dtype=bf16 if dtype == bf16 else f32), h, a, slice(1000, 9192), activation, cuda(*e.shape), cuda(*p.shape))


def scan(dtype, states):
    "The page's scan in Triton"
    scans.scan_fwd_triton(cuda(100, 4, states, 5, dtype=dtype), cuda(states, 5, dtype=torch.int32), cuda(4, states, dtype=dtype), cuda(4, dtype=i64))


def grids(dtype, V, T=250, U=100, N=16):
    "A transducer's lattice, and its logits: scores and gradient"
    z, lengths = matrix(N * T * (U + 1), V, dtype).view(N, T, U + 1, V), cuda(N, dtype=i64)
    p = lattices.Nodes(cuda(N, U, dtype=i64), lengths, lengths, cuda(N, dtype=torch.bool))
    for fused in (True, False):
        table = lattices.launch_scores(z, p, 1, fused)
        lattices.launch_grad(vector(N), z, p, table, 0, 0.5)
    a = lattices.Grids(cuda(N + 1, dtype=i64), lengths, lengths, T, U)
    for best in (True, False):
        for flows in ((cuda(len(table[0])),) * 2, (None, None)):
            for labels in (U, 4095):
                lattices.launch_lattice((table[0], table[1], cuda(N), *flows), a._replace(max_labels=labels), best)
    for durations, labels in ((5, U), (1, U), (3, 4095)):
        arcs, flow = cuda(len(table[0]), durations), cuda(len(table[0]))
        for flows in ((flow, flow, arcs, arcs), (flow, None, None, None)):
            lattices.launch_durations((flow, flow, arcs), cuda(durations, dtype=i64), a._replace(max_labels=labels), (cuda(N), *flows))


CALLS = {f"linear {dtype} {how} {width}": lambda dtype=dtype, how=how, width=width: linear(dtype, how, width)
         for dtype in (bf16, f16) for how in OPTIONS for width in (2048, 1001)}
CALLS |= {f"exponentials {width}": lambda width=width: exponentials(width) for width in (2048, 1000)}
CALLS |= {f"eight bits {width}": lambda width=width: eight_bits(width) for width in (2048, 1008)}
CALLS |= {f"lists {dtype} {width} {classes}": lambda dtype=dtype, width=width, classes=classes: listed(dtype, width, classes)
          for dtype, width, classes in ((bf16, 2048, 8), (f32, 1000, 3))}
CALLS |= {f"classes over {ranks} ranks": lambda ranks=ranks: over_ranks(ranks) for ranks in (2, 8)}
CALLS |= {f"filtered {dtype} {how} {width}": lambda dtype=dtype, how=how, width=width: filtered(dtype, how, width)
          for dtype, how, width in ((bf16, "plain", 2048), (bf16, "busy", 2048), (f16, "plain", 1001))}
CALLS |= {f"heads {dtype} {width} {conflict}": lambda dtype=dtype, width=width, conflict=conflict: heads(dtype, width, conflict=conflict)
          for dtype, width, conflict in ((bf16, 512, 2.0), (f16, 512, 0.5), (bf16, 511, 2.0))}
CALLS |= {f"contrasts {dtype} {width}": lambda dtype=dtype, width=width: contrasts(dtype, width) for dtype, width in ((bf16, 512), (f16, 511))}
CALLS |= {f"best classes {dtype} {width} {how}": lambda dtype=dtype, width=width, how=how: best_classes(dtype, width, how)
          for dtype, width, how in ((bf16, 2048, "plain"), (f16, 1001, "busy"))}
CALLS |= {f"samples {dtype} {width} {n} {how}": lambda dtype=dtype, width=width, n=n, how=how: sampled(dtype, width, n, how)
          for dtype, width, n, how in ((bf16, 2048, 64, "plain"), (bf16, 2048, 4096, "plain"), (f16, 1001, 64, "busy"))}
CALLS |= {f"softmax tiles {dtype} {width}": lambda dtype=dtype, width=width: tiles_of_softmax(dtype, width)
          for dtype in (bf16, f16) for width in (1024, 1001)}
CALLS |= {f"rows {V} {dtype} {how}": lambda V=V, dtype=dtype, how=how: rows(V, dtype, how)
          for V, dtype, how in ((100, f32, "plain"), (1000, bf16, "busy"), (1024, f16, "scaled"), (5000, bf16, "plain"), (8192, f32, "busy"),
                                (32768, bf16, "plain"), (32768, f32, "busy"), (128256, bf16, "busy"), (128256, f32, "plain"), (50257, f16, "scaled"))}
CALLS |= {f"divergences {dtype} {V} {kind}": lambda dtype=dtype, V=V, kind=kind: divergences(dtype, V, kind)
          for dtype, V, kind in ((bf16, 100, "forward_kl"), (f16, 1000, "jsd"), (f32, 32768, "reverse_kl"), (bf16, 128256, "jsd"))}
CALLS |= {f"probabilities {dtype} {V} {how}": lambda dtype=dtype, V=V, how=how: against_probabilities(dtype, V, how)
          for dtype, V, how in ((bf16, 100, "plain"), (f16, 1000, "busy"), (f32, 32768, "scaled"), (bf16, 128256, "busy"))}
CALLS |= {f"labels {dtype} {V} {how}": lambda dtype=dtype, V=V, how=how, labels=labels: several_labels(dtype, V, how, labels)
          for dtype, V, how, labels in ((bf16, 100, "plain", 3), (f16, 1000, "busy", 40), (f32, 32768, "busy", 5), (bf16, 128256, "plain", 3),
                                        (bf16, 50257, "busy", 2))}
CALLS |= {f"optimizers {dtype}": lambda dtype=dtype: optimizers(dtype) for dtype in (bf16, f32)}
CALLS |= {f"joints {dtype} {width} {activation}": lambda dtype=dtype, width=width, activation=activation: joints(dtype, width, activation)
          for dtype, width, activation in ((bf16, 640, "tanh"), (f16, 513, "relu"), (f32, 640, "none"))}
CALLS |= {f"grids {dtype} {V}": lambda dtype=dtype, V=V: grids(dtype, V) for dtype, V in ((bf16, 1024), (f16, 29), (f32, 8198), (f32, 60))}
CALLS |= {f"scan {dtype} {states}": lambda dtype=dtype, states=states: scan(dtype, states) for dtype, states in ((f32, 64), (f64, 1024))}


def misfits(call, arch: int, monkeypatch) -> list[str]:
    "Launches of a call that an architecture cannot run, in words"
    device, wrong = GPUS[DEVICES[arch]], []
    for line in lines_of(call, device, monkeypatch):
        name, *_, flags = json.loads(line)
        found = lowerer().usage(line, arch)
        if isinstance(found, str):
            wrong.append(f"{name[1]} {flags}: {found}")
        elif found["shared"] > device.shared_memory or found["registers"] > REGISTERS:
            wrong.append(f"{name[1]} {flags}: {found} of {device}")
    return wrong


def test_strides_are_multiplied_in_64_bits(monkeypatch):
    "Of every kernel of the library, by pointers: where neither a descriptor nor a stride of 1 hides a product"
    lines = {}
    for call in CALLS.values():
        for line in lines_of(call, GPUS["A100"], monkeypatch):
            kernel, types, *_ = json.loads(line)
            constants = sorted(k for k, (t, _) in types.items() if t == "constexpr")
            lines.setdefault(kernel[1], {}).setdefault((len(constants), *constants), line)
    assert set(lines) == set(triton_kernels()), "a kernel is left out"
    chosen = [(kernel, line) for kernel, found in lines.items() for _, line in sorted(found.items())[:None if FULL else 1]]
    wrong = {kernel: found for kernel, line in chosen if (found := lowerer().narrow_products(line))}
    assert not wrong


@pytest.mark.parametrize("dtype, V", [(f16, 64), (bf16, 48)])
def test_transducers_of_few_classes_compile(dtype, V, monkeypatch):
    "Triton 3.6 and 3.7 could not compile an earlier kernel of the gradient at these sizes"
    assert not misfits(lambda: grids(dtype, V), 90, monkeypatch)


GRID = [(arch, call) for arch in DEVICES for call in CALLS if arch >= 89 or not call.startswith("eight bits")]
LINEAR = "linear torch.bfloat16 plain 2048"
WITHOUT_PRODUCT = list(product((100, 120), (LINEAR, "exponentials 2048")))  # where Triton serves until a product is written by hand


@pytest.mark.parametrize("arch, call", GRID if FULL else thorough_but(WITHOUT_PRODUCT, (100, LINEAR), (120, LINEAR)))
def test_what_is_chosen_for_a_gpu_fits_it(arch, call, monkeypatch):
    wrong = misfits(CALLS[call], arch, monkeypatch)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("found", [dict(shared=101377, registers=255, stack=0), dict(shared=0, registers=256, stack=0), "no such type"], ids=str)
def test_what_does_not_fit_is_noticed(found, monkeypatch):
    monkeypatch.setattr(type(lowerer()), "usage", lambda self, line, arch: found)
    wrong = misfits(CALLS["optimizers torch.float32"], 120, monkeypatch)
    assert wrong and all(str(found) in text for text in wrong)
