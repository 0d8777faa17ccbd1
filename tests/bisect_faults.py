"""Programs that are not this library's, with faults: sequence parallelism x FSDP2, and others."""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sweeps import today
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from scaletorch.bisect import record
from scaletorch.dist.functional import copy, reduce

sys.path.extend({str(Path(__file__).parent.parent / "examples" / "bisect")}.difference(sys.path))

from small import HIDDEN, build, loss_sum
from with_dtensor import SHARED, SHARED_LAYER

LAYOUTS = [(4, 1), (2, 2), (1, 4)]  # dp x tp with sequence parallelism
ROWS, MICRO_BATCHES = 8, 2
SCALED = "times the right values"
FAULTS = {  # the program's fault -> direction, a module, the tensor's name, words of it
    "mean": ("forward", "loss", "", SCALED),
    "dropped": ("backward", "loss", "head", "all zeros"),
    "twice": ("synchronisation", "", "embed.weight", "values that differ"),
    "clip": ("synchronisation", "", "embed.weight", SCALED),
    "stale": ("update", "weights", "embed.weight", "does the optimizer hold other tensors"),
    "start": ("start", "layers.1.mlp.up_proj", "layers.1.mlp.up_proj.weight", "times the right"),
}
# Each fault on one of the layouts, every day on another.
CASES = [
    (fault, layout)
    for number, fault in enumerate(FAULTS)
    for layout in today(LAYOUTS[number % 3 :] + LAYOUTS[: number % 3], 3)
]


def batch():
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(32, (ROWS, 9), generator=generator)
    unseen = torch.arange(8) < torch.arange(ROWS)[:, None] - 1
    return tokens[:, :-1], tokens[:, 1:].masked_fill(unseen, -100)


def divided(model, layout):
    """Divide a model by sequence parallelism and FSDP2; return the rank's place along dp."""
    mesh = init_device_mesh("cpu", layout, mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], SHARED)
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], SHARED_LAYER)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp"])
    return mesh["dp"]


def step(folder, layout=(1, 1), fault="", dtype=torch.float64):
    """Train one step of two micro-batches, recorded."""
    model, (ids, labels) = build(dtype), batch()
    (dp, _), own, group = layout, 0, None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if dist.is_initialized():
        mesh = divided(model, layout)
        own, group = mesh.get_local_rank(), mesh.get_group()
    if fault != "stale":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if fault == "start" and dist.get_rank() == 1:
        with torch.no_grad():
            model.layers[1].mlp.up_proj.weight.to_local().mul_(1.5)
    rows = list(range(own, ROWS, dp))
    half = len(rows) // MICRO_BATCHES
    micro_batches = [rows[:half], rows[half:]]
    total = torch.zeros((), dtype=torch.float64)
    with record(folder, model, describe={"rows": (micro_batches, ROWS)}) as tape:
        for number, these in enumerate(micro_batches):
            own_count = (labels[these] != -100).sum() * MICRO_BATCHES * dp
            count = own_count if fault == "mean" else (labels != -100).sum()
            loss = loss_sum(model(ids[these]), labels[these]) / count * dp
            gone = fault == "dropped" and number == 1 and own == dp - 1
            (loss * 0 if gone else loss).backward()
            total += loss.detach() / dp
            for parameter in model.parameters() if fault == "twice" and number == 0 else ():
                parameter.grad.mul_(2)
        if dp > 1:
            dist.all_reduce(total, group=group)
        tape.put("loss", total)
        for parameter in model.parameters() if fault == "clip" else ():
            local = parameter.grad.to_local()
            local.div_(local.norm())
        optimizer.step()
    return {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            for n, p in model.named_parameters()}  # fmt: skip


def several():
    return dist.is_initialized() and dist.get_world_size() > 1


class Experts(nn.Module):
    """A rank masks the scores of others' experts on purpose; results are added up over ranks."""

    def __init__(self, fault):
        super().__init__()
        self.gate, self.fault = nn.Linear(HIDDEN, 4, bias=False), fault
        self.weight = nn.Parameter(torch.randn(4, HIDDEN, HIDDEN) / 4)

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        if several():
            own = torch.arange(4) % dist.get_world_size() == dist.get_rank()
            scores = (scores if self.fault == "router" else copy(scores)) * own
        return reduce(torch.einsum("blh,ehi,ble->bli", copy(x), self.weight, scores))


class Attend(nn.Module):
    """Attention whose weights are a side output."""

    def __init__(self, fault):
        super().__init__()
        self.q, self.v = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.fault = fault

    def forward(self, x):
        weights = F.softmax(self.q(x) @ x.mT, -1)
        used = weights.clone()
        if self.fault and torch.is_grad_enabled():
            used.register_hook(lambda gradient: 2 * gradient)
        return used @ self.v(x), weights


class Mixed(nn.Module):
    """Experts; a layer that runs twice, first under no_grad; and a teacher."""

    def __init__(self, fault=""):
        super().__init__()
        wrong = several() and dist.get_rank() == 1
        self.embed = nn.Embedding(32, HIDDEN)
        self.experts = Experts(fault)
        self.attend, self.teacher = Attend(fault == "side" and wrong), Attend(False)
        self.head = nn.Linear(HIDDEN, 32, bias=False)
        if fault in ("cycle", "teacher") and wrong:
            layer = self.attend.q if fault == "cycle" else self.teacher.v
            layer.register_forward_hook(
                lambda module, args, out: out if torch.is_grad_enabled() else 1.1 * out
            )

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.experts(x)
        with torch.no_grad():
            z, _ = self.attend(x)
        return self.head(x + self.attend(z + x)[0])


MIXED = {
    "router": ("backward", "experts", "experts.gate", "a sum over all ranks is missing"),
    "cycle": ("forward", "attend.q", "attend.q", "1.1 times the right values"),
    "teacher": ("forward", "teacher.v", "teacher.v", "1.1 times the right values"),
    "side": ("backward", "attend", "attend", "2 times the right values"),
}


def mixed(folder, fault=""):
    """Train a step of the same rows on all ranks, which have experts each; recorded."""
    torch.manual_seed(0)
    model, (ids, labels) = Mixed(fault).double(), batch()
    with record(folder, model) as tape:
        with torch.no_grad():
            goal, _ = model.teacher(model.embed.weight[ids])
        logits = model(ids)
        loss = loss_sum(logits, labels) / 32 + (logits[..., :HIDDEN] - goal).square().mean()
        loss.backward()
        if several():
            dist.all_reduce(model.experts.weight.grad)
        tape.put("loss", loss)


def train_all(folder):
    """Train all programs on four ranks."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    found = {}
    for fault, layout in [*(("", layout) for layout in LAYOUTS), *CASES]:
        found[layout, fault] = step(Path(folder, f"{layout}{fault}"), layout, fault)
    for fault in ("", *MIXED):
        mixed(Path(folder, f"mixed{fault}"), fault)
    return found
