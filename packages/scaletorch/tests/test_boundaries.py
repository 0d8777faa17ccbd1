"""A plan of placements alone: right on every layout, and refused where a placement is wrong."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import in_one_process, on_a_layout, require_alike, tokens

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.placement import Boundary, Invariant, Partial, Replicate, Shard, Varying

LAYOUTS = {
    "tp4": dict(tp_size=4),
    "tp2-dp2": dict(tp_size=2, dp_size=2),
    "tp2-cp2": dict(tp_size=2, cp_size=2),
    "tp2-pp2": dict(tp_size=2, pp_size=2),
}
BATCHES = [tokens(step) for step in range(2)]
ENTERED, SUMMED = (Invariant(), Replicate()), (Partial(), Invariant())
COLUMNS, ROWS = {"weight": Shard(0), "bias": Shard(0)}, {"weight": Shard(1)}
OWN = {"up": Shard(0), "scale": Shard(0), "down": Shard(-1), "bias": Partial()}
PLAN = {
    "embed": Boundary(outputs=SUMMED, parameters={"weight": Shard(0)}),
    "blocks.*.norm": Boundary(),
    "blocks.*.up": Boundary(ENTERED, Shard(-1), COLUMNS),
    "blocks.*.scale": Boundary(Shard(-1), Shard(-1)),
    "blocks.*.down": Boundary(Shard(-1), SUMMED, ROWS),
    "blocks.*.wide": Boundary({"x": ENTERED}, SUMMED, OWN),
    "head": Boundary(ENTERED, (Shard(-1), Invariant()), {"weight": Shard(0)}),
}
# Another boundary of one module, and the sentence that refuses it.
WRONG = {
    "no conversion of the input": (
        "blocks.*.up", Boundary((Varying(), Replicate()), Shard(-1), COLUMNS),
        "the input of 'blocks.0.up' on tp is Varying() and is needed as Replicate()",
    ),
    "no conversion of the output": (
        "blocks.*.wide", Boundary({"x": ENTERED}, (Varying(), Invariant()), OWN),
        "the output of 'blocks.0.wide' on tp is Varying() and is needed as Invariant()",
    ),
    "columns are no terms": (
        "blocks.*.up", Boundary(ENTERED, SUMMED, COLUMNS),
        "sharded on tp it computes Shard(-1) from Replicate(), and its boundary "
        "says (Partial(), Invariant())",
    ),
    "a bias for every rank": (
        "blocks.*.wide", Boundary({"x": ENTERED}, SUMMED, {k: OWN[k] for k in ("up", "down")}),
        "its boundary has no placement of scale, bias",
    ),
    "a shard taken for the whole": (
        "blocks.*.scale", Boundary(),
        "the output of 'blocks.0.scale' on tp is Invariant() by its boundary, but its graph shows "
        "Varying()",
    ),
    "a whole input of shards": (
        "blocks.*.wide", Boundary({"x": Invariant()}, SUMMED, OWN),
        "the input 'x' of 'blocks.0.wide' on tp is Invariant() by its boundary, but its graph "
        "shows Replicate()",
    ),
    "the input of shards for a whole module": (
        "blocks.*.norm", Boundary(ENTERED),
        "the input of 'blocks.0.norm' on tp is Replicate() by its boundary, but its graph "
        "shows Invariant()",
    ),
    "the whole taken for a term": (
        "blocks.*.same", Boundary(outputs=SUMMED),
        "the output of 'blocks.0.same' on tp is Partial() by its boundary, but its graph shows "
        "Replicate()",
    ),
}  # fmt: skip


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return x * self.weight


class Wide(nn.Module):
    """An MLP without linear layers."""

    def __init__(self):
        super().__init__()
        self.up, self.scale = (nn.Parameter(torch.randn(24, *n) / 4) for n in ([16], []))
        self.down, self.bias = nn.Parameter(torch.randn(16, 24) / 4), nn.Parameter(torch.randn(16))

    def forward(self, x):
        return F.linear(F.gelu(F.linear(x, self.up)) * self.scale, self.down, self.bias)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.scale, self.wide, self.same = Scale(), Wide(), nn.Identity()

    def forward(self, x):
        x = x + self.down(self.scale(self.up(self.norm(x))).tanh())
        return self.same(x + self.wide(self.norm(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build():
    torch.manual_seed(0)
    return Model().double()


def trained(sizes, plan, micro_batches=2, **options):
    """Context parallelism runs models without attention only where a rehearsal compares them."""
    how = {"options": {"plan": plan, **options}, "rehearse": "cp_size" in sizes}
    return on_a_layout(build, sizes, BATCHES, micro_batches=micro_batches, **how)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_of_placements_trains_as_one_process(layout, sequence_parallel):
    expected = in_one_process(build(), BATCHES)
    how = {"timeout": 200, "sequence_parallel": sequence_parallel}
    for found in run_ranks(trained, 4, LAYOUTS[layout], PLAN, **how):
        require_alike(found, expected)


def sentences(sizes):
    """Return what refuses each wrong plan on this rank."""
    found = {}
    for wrong, (module, boundary, _) in WRONG.items():
        # Ranks of another pipeline stage get a RuntimeError with the sentence.
        with pytest.raises((ValueError, RuntimeError)) as refused:
            trained(sizes, {**PLAN, module: boundary}, micro_batches=1)
        found[wrong] = str(refused.value)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_wrong_placement_is_refused_by_both_types_module_and_axis(layout):
    for found in run_ranks(sentences, 4, LAYOUTS[layout], timeout=200):
        for wrong, (_, _, sentence) in WRONG.items():
            assert re.sub(r"blocks\.\d", "blocks.0", found[wrong]).count(sentence) == 1, found
