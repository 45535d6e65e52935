"""A head over two-dimensional meshes, on four processes of a CPU: how far each gradient is from one process that has all tokens.

    torchrun --nproc-per-node 4 examples/meshes.py
"""
import copy
import os
from types import MethodType

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # FSDP2 would give each process a GPU of its own, if there are any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import distribute_tensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module, RowwiseParallel, SequenceParallel

import fusedloss as fl

CLASSES, PADDED, FEATURES, ROWS, TOKENS = 101, 128, 8, 4, 6
IGNORED = 7  # labels at the start of the batch: ranks have different numbers of valid tokens


class LanguageModel(nn.Module):
    "An embedding, two layers, a norm and an output layer; the loss is in forward, where FSDP2 prepares to reduce gradients"
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, FEATURES)
        self.up, self.down = nn.Linear(FEATURES, 2 * FEATURES, bias=False), nn.Linear(2 * FEATURES, FEATURES, bias=False)
        self.norm = nn.LayerNorm(FEATURES)
        self.lm_head = nn.Linear(FEATURES, CLASSES, bias=False)
        self.options, self.factor = {}, 1.0

    def states(self, ids):
        return self.norm(self.down(self.up(self.embed(ids)).relu()))

    def forward(self, ids, labels):
        return self.factor * fl.linear_cross_entropy(self.states(ids), self.lm_head.weight, labels, **self.options)


def part(t, mesh, dim):
    "This rank's part of a tensor that the ranks of a mesh share along a dimension"
    return t.chunk(mesh.size(), dim)[mesh.get_local_rank()]


def over_classes(weight, mesh):
    "A parameter with its rows over the ranks of a mesh"
    return nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))


def data_tensor(model, mesh, ids, labels):
    "Classes over the mesh's second dimension; FSDP2 over the first, whose ranks have other tokens"
    data, tensor = mesh["data"], mesh["inner"]
    model.lm_head.weight = over_classes(model.lm_head.weight, tensor)
    fully_shard(model, mesh=data)
    model.options |= dict(reduction="sum")  # of this data rank's tokens; FSDP2 averages over data
    model.factor = data.size() / (labels != -100).sum().item()
    return model(part(ids, data, 0), part(labels, data, 0))


def same_tokens_twice(model, mesh, ids, labels):
    "The mistake: the word for tokens of a rank's own, where ranks of `inner` have the same ones"
    model.options = dict(backbone_reduction="mean")
    return data_tensor(model, mesh, ids, labels)


def head_apart(model, mesh, ids, labels):
    "The output layer in a group of its own: in the model's forward its weight is sharded on both dimensions"
    model.lm_head.weight = over_classes(model.lm_head.weight, mesh["inner"])
    fully_shard(model.lm_head, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model(part(ids, mesh["data"], 0), part(labels, mesh["data"], 0))


def loss_of_the_head(model, mesh, ids, labels):
    "The remedy: the loss in a method of the output layer, around which FSDP2 gathers its weight over `data`"
    def loss(self, states, labels):
        return fl.linear_cross_entropy(states, self.weight, labels, **model.options)

    model.lm_head.loss = MethodType(loss, model.lm_head)
    model.forward = lambda ids, labels: model.factor * model.lm_head.loss(model.states(ids), labels)
    model.lm_head.weight = over_classes(model.lm_head.weight, mesh["inner"])
    fully_shard(model.lm_head, mesh=mesh["data"])
    register_fsdp_forward_method(model.lm_head, "loss")
    fully_shard(model, mesh=mesh["data"])
    model.options = dict(reduction="sum")
    model.factor = mesh["data"].size() / (labels != -100).sum().item()
    return model(part(ids, mesh["data"], 0), part(labels, mesh["data"], 0))


def sequence_plan(model, tensor):
    "Layers over the ranks of `tensor`, and a norm that sees a part of each sequence: its output is Shard(1)"
    return parallelize_module(model, tensor, dict(
        embed=RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        up=ColwiseParallel(input_layouts=Shard(1)),
        down=RowwiseParallel(output_layouts=Shard(1)),
        norm=SequenceParallel(),
        lm_head=ColwiseParallel()))


def sequence_parallel(model, mesh, ids, labels, how="sum"):
    "As `data_tensor`, but each rank has the hidden states of a part of each sequence"
    data, tensor = mesh["data"], mesh["inner"]
    fully_shard(sequence_plan(model, tensor), mesh=data)
    model.options = dict(reduction="sum", backbone_reduction=how)
    model.factor = data.size() / (labels != -100).sum().item()
    return model(part(ids, data, 0), part(part(labels, data, 0), tensor, 1))


def sequence_parallel_mean(model, mesh, ids, labels):
    "The mistake: nobody averages over `inner`, where DTensors add up"
    return sequence_parallel(model, mesh, ids, labels, "mean")


def context_at_the_root(model, mesh, ids, labels):
    "Sequences are split over the second dimension; FSDP2 over all ranks, and the weight whole in forward"
    fully_shard(model)
    model.options = dict(reduction="sum")
    model.factor = mesh.size() / (labels != -100).sum().item()
    return model(*(part(part(t, mesh["data"], 0), mesh["inner"], 1) for t in (ids, labels)))


def context_head_apart(model, mesh, ids, labels):
    "The same, and the weight is never whole: its classes lie over all ranks, and the loss is of all their tokens"
    fully_shard(model.lm_head)
    fully_shard(model)
    model.options = dict(backbone_reduction="mean")
    return model(*(part(part(t, mesh["data"], 0), mesh["inner"], 1) for t in (ids, labels)))


def shifted_after_the_split(model, mesh, ids, labels):
    "The mistake: each part loses the label of its last token, which lies on the next rank"
    last = labels.shape[1] // mesh["inner"].size() - 1
    lost = labels.clone()
    lost[:, last] = -100
    return context_head_apart(model, mesh, ids, lost)


def counted_over_ranks(model, mesh, ids, labels):
    "Each rank knows the labels of its own parts of two batches: the number of valid ones is added up over all ranks before the first loss"
    fully_shard(model)
    mine = [part(part(t, mesh["data"], 0), mesh["inner"], 1) for t in (ids, labels)]
    valid = (mine[1] != -100).sum()  # of both batches
    dist.all_reduce(valid)  # over the ranks that have other tokens: data and context, not tensor
    model.options, model.factor = dict(reduction="sum"), mesh.size() / valid.item()
    return sum(model(*batch) for batch in zip(*(t.chunk(2) for t in mine)))


def mean_of_parts(model, mesh, ids, labels):
    "The mistake: the mean over a rank's own part, of which FSDP2 takes the average, whatever the parts' numbers of valid tokens"
    fully_shard(model)
    return model(*(part(part(t, mesh["data"], 0), mesh["inner"], 1) for t in (ids, labels)))


def torchtitan(model, mesh, ids, labels):
    "Norm and output layer in one group of FSDP2, which divides no gradient; the loss is outside of the model"
    data, tensor = mesh["data"], mesh["inner"]
    sequence_plan(model, tensor)
    fully_shard([model.norm, model.lm_head], mesh=data, reshard_after_forward=False)
    fully_shard(model, mesh=data)
    for module in (model.norm, model):
        module.set_gradient_divide_factor(1.0)
    model.forward = lambda ids: model.states(ids).redistribute(placements=[Replicate()])
    states, valid = model(part(ids, data, 0)), (labels != -100).sum().item()
    model.norm.unshard()
    return fl.linear_cross_entropy(states, model.lm_head.weight, part(labels, data, 0), reduction="sum") / valid


def fsdp_actor_of_verl(model, mesh, ids, labels):
    "Log-probabilities in a method of the output layer, whose weight FSDP2 gathers; each rank has tokens of its own"
    def log_probs(self, states, labels):
        return fl.linear_log_probs(states, self.weight, labels).log_probs

    model.lm_head.log_probs = MethodType(log_probs, model.lm_head)
    model.forward = lambda ids, labels: model.lm_head.log_probs(model.states(ids), labels)
    fully_shard(model.lm_head)
    register_fsdp_forward_method(model.lm_head, "log_probs")
    fully_shard(model)
    found = model(*(part(part(t, mesh["data"], 0), mesh["inner"], 1) for t in (ids, labels)))
    return -found.sum() * mesh.size() / (labels != -100).sum().item()


WAYS = (data_tensor, same_tokens_twice, head_apart, loss_of_the_head, sequence_parallel, sequence_parallel_mean,
        context_at_the_root, context_head_apart, shifted_after_the_split, counted_over_ranks, mean_of_parts, torchtitan, fsdp_actor_of_verl)


def distance(found, wanted):
    "The largest relative difference of any gradient"
    whole = lambda g: g.full_tensor() if hasattr(g, "full_tensor") else g
    return max(((whole(p.grad) - q.grad).norm() / q.grad.norm()).item() for p, q in zip(found.parameters(), wanted.parameters()))


def rows_of_megatron(mesh, hide_padding):
    "Rows of a padded vocabulary, hidden states [s,b,H] split along s: losses [s,b] and gradients against one process"
    made = torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=made)
    states, whole, labels = draw(TOKENS, ROWS, FEATURES), draw(PADDED, FEATURES), torch.randint(CLASSES, (TOKENS, ROWS), generator=made)
    weighed = draw(TOKENS, ROWS)  # the upstream gradients: a loss mask over a number of tokens
    bias = torch.zeros(PADDED, dtype=torch.float64)
    if hide_padding:
        bias[CLASSES:] = -torch.inf

    x, w = states.clone().requires_grad_(), whole.clone().requires_grad_()
    losses = nn.functional.cross_entropy((x @ w.T + bias).flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    (losses * weighed).sum().backward()

    here, rows = (part(t, mesh, 0).clone().requires_grad_() for t in (states, whole))
    own = fl.sharded_linear_cross_entropy(
        here, rows, part(labels, mesh, 0), linear_bias=part(bias, mesh, 0) if hide_padding else None,
        reduction="none", backbone_reduction="sum", mesh=mesh, num_classes=PADDED)
    (own * part(weighed, mesh, 0)).sum().backward()
    pairs = (own, losses), (here.grad, x.grad), (rows.grad, w.grad)
    return max((a - part(b, mesh, 0)).abs().max().item() for a, b in pairs)


class Gathered(torch.autograd.Function):
    "The rows of all ranks; backward adds the ranks' gradients and takes this rank's rows, or takes them alone"
    @staticmethod
    def forward(ctx, x, mesh, adds):
        ctx.how = mesh, adds
        parts = [torch.empty_like(x) for _ in range(mesh.size())]
        dist.all_gather(parts, x, group=mesh.get_group())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, g):
        mesh, adds = ctx.how
        g = g.clone()
        if adds:
            dist.all_reduce(g, group=mesh.get_group())
        return part(g, mesh, 0), None, None


def gathered_first(mesh, adds, own=False):
    "Hidden states gathered before the loss, which is given all, or this rank's own: the error of their gradient"
    made = torch.Generator().manual_seed(4)
    states, whole = (torch.randn(n, FEATURES, dtype=torch.float64, generator=made) for n in (TOKENS, PADDED))
    labels = torch.randint(CLASSES, (TOKENS,), generator=made)
    x = states.clone().requires_grad_()
    nn.functional.cross_entropy(x @ whole.T, labels).backward()

    here = part(states, mesh, 0).clone().requires_grad_()
    tokens = Gathered.apply(here, mesh, adds), labels
    if own:
        tokens = [part(t, mesh, 0) for t in tokens]
    fl.sharded_linear_cross_entropy(tokens[0], part(whole, mesh, 0), tokens[1], backbone_reduction="sum" if own else None,
                                    mesh=mesh, num_classes=PADDED).backward()
    return ((here.grad - part(x.grad, mesh, 0)).norm() / part(x.grad, mesh, 0).norm()).item()


def megatron_actor_of_verl(mesh, temperature=0.7):
    "Log-probabilities and entropies of an actor whose output layer is rows, and their gradients, against one process"
    made = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=made)
    states, whole, labels = draw(ROWS, TOKENS, FEATURES), draw(PADDED, FEATURES), torch.randint(CLASSES, (ROWS, TOKENS), generator=made)

    x, w = states.clone().requires_grad_(), whole.clone().requires_grad_()
    all_log_probs = (x @ w.T / temperature).log_softmax(-1)
    log_probs = all_log_probs.gather(-1, labels[..., None])[..., 0]
    entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
    (log_probs.square() + 0.1 * entropy).sum().backward()

    here, rows = states.clone().requires_grad_(), part(whole, mesh, 0).clone().requires_grad_()
    found = fl.sharded_linear_log_probs(here, rows, labels, temperature=temperature, entropy=True, mesh=mesh, num_classes=PADDED)
    (found.log_probs.square() + 0.1 * found.entropy).sum().backward()
    pairs = (found.log_probs, log_probs), (found.entropy, entropy), (here.grad, x.grad), (rows.grad, part(w.grad, mesh, 0))
    return max((a - b).abs().max().item() for a, b in pairs)


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "inner"))
    torch.manual_seed(0)
    start = LanguageModel().double()
    made = torch.randint(CLASSES, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    ids, labels = made[:, :-1], made[:, 1:].clone()  # shifted before anything is split
    labels.view(-1)[:IGNORED] = -100
    one = copy.deepcopy(start)
    one(ids, labels).backward()

    def told(name, line):
        if dist.get_rank() == 0:
            print(f"{name}: {line}", flush=True)

    for way in WAYS:
        model = copy.deepcopy(start)
        try:
            way(model, mesh, ids, labels).backward()
            told(way.__name__, f"{distance(model, one):.0e} from one process")
        except ValueError as error:
            told(way.__name__, f"ValueError: {error}")
    tensor = mesh["inner"]
    for name, adds, own in (("gathered_and_split", False, False), ("gathered_and_added", True, False), ("own_rows_of_gathered", True, True)):
        told(name, f"{gathered_first(tensor, adds, own):.0e} from one process")
    told("rows_of_megatron", f"{max(rows_of_megatron(tensor, hide) for hide in (False, True)):.0e} from one process")
    told("megatron_actor_of_verl", f"{megatron_actor_of_verl(tensor):.0e} from one process")
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that has done its work


if __name__ == "__main__":
    main()
