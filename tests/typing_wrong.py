"""Calls that a type checker rejects: each line that is marked, and no other."""
import torch
from torch import Tensor, nn

import fusedloss as fl

x, w, y = torch.zeros(4, 8), torch.zeros(16, 8), torch.zeros(4, dtype=torch.long)

fl.cross_entropy(x, y, reduction="avg")  # rejected
fl.cross_entropy(x, y, return_stats=True).sum()  # rejected
fl.cross_entropy(x, [1, 2, 3, 4])  # rejected
fl.linear_cross_entropy(x, w, y, method="chunked")  # rejected
fl.linear_cross_entropy(x, w, y, accumulate="fp32")  # rejected
fl.linear_cross_entropy(x, w, y, backbone_reduction="avg")  # rejected
fl.linear_cross_entropy(x, w, y, bias=None)  # rejected
fl.linear_cross_entropy(x, w, y, None)  # rejected
fl.linear_cross_entropy(x, w, y).entropy  # rejected
fl.chunked_linear_cross_entropy(x, w, y, reduction="none")  # rejected
loss, stats = fl.recompute_linear_cross_entropy(x, w, y, return_stats=True)
stats.perplexity  # rejected
fl.tiled_linear_cross_entropy(x, w, y, reduction="max")  # rejected
fl.plan(8192, 65536)  # rejected
fl.plan(8192, 65536, 2048, stats="all")  # rejected
fl.LinearCrossEntropyLoss(8, 16, method="fast")  # rejected
fl.LinearCrossEntropyLoss(8, 16, reduction="avg")  # rejected
fl.LinearCrossEntropyLoss(8, 16, smoothing=0.1)  # rejected
fl.margin_cross_entropy(x, w, y, margin="cosface")  # rejected
fl.margin_cross_entropy(x, w, y, margin=fl.margins.CosFace(), method="chunks")  # rejected
fl.margins.Circle(grad="fast")  # rejected
fl.PartialFC(16, 8, sample_rate="all")  # rejected
fl.PartialFC(16, 8, conflict_mode="keep")  # rejected
fl.PartialFC(16, 8, reduction="avg")  # rejected
fl.PartialFC(16, 8)(x, y, return_stats=True).sum()  # rejected
fl.PartialFC(16, 8)(x, y, weight=x)  # rejected
fl.CTCLoss()(x[None], [1, 2])  # rejected
fl.LinearCrossEntropyLoss(8, 16)(x)  # rejected
fl.ShardedPartialFC(16, 8, mesh=2)  # rejected
fl.ShardedPartialFC(16, 8, conflict_mode="keep")  # rejected
fl.RowSparse(torch.optim.SGD, [w], mode="eager", lr=0.1)  # rejected
fl.NegativeSampler("none")  # rejected
fl.PartialFC(16, 8).topk(x)  # rejected
fl.save_insightface(fl.PartialFC(16, 8), "weights", 4, kind="pickle")  # rejected
fl.load_insightface(nn.Linear(8, 16), "weights")  # rejected
fl.CTCLoss(reduction="batch")  # rejected
fl.ctc_loss(x[None], y, 9, (3,))  # rejected
fl.ctc_loss(x[None], y, (9,), (3,), gradient="none")  # rejected
fl.logz(x, x, x, x, fl.semirings.Log, method="fast")  # rejected
fl.nothing  # rejected
pair: tuple[Tensor, Tensor] = fl.cross_entropy(x, y)  # rejected
