"""Plans of torch's own tensor parallelism and boundaries of strangers' modules."""

import copy

import pytest
import torch
import torch.distributed as dist
from llamas import require_same_gradients
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel import placement
from scaletorch.parallel.placement import Boundary
from scaletorch.parallel.tensor_parallel import STYLES, apply_tensor_parallel, explain

# The plan of torch's tutorial, with sequences divided between regions.
SEQUENCES = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
WHOLE = {
    "embed": ColwiseParallel(output_layouts=Replicate()),
    "mlp.up": ColwiseParallel(output_layouts=Replicate()),
    "mlp.down": RowwiseParallel(input_layouts=Replicate(), output_layouts=Partial()),
    "mlp": PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Replicate()),
    "head": RowwiseParallel(input_layouts=Replicate()),
}
BOTH = {
    **{name: SEQUENCES[name] for name in ("mlp.up", "head")},
    "mlp.down": RowwiseParallel(output_layouts=Partial()),
    "mlp": PrepareModuleInputOutput(
        input_kwarg_layouts={"x": Replicate()}, desired_input_kwarg_layouts={"x": Replicate()},
        output_layouts=Partial(), desired_output_layouts=Shard(1),
    ),
}  # fmt: skip


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8, bias=False)

    def forward(self, x):
        return self.down(self.up(x).tanh())


class Model(nn.Module):
    def __init__(self, adds=True):
        super().__init__()
        self.embed, self.norm, self.mlp = nn.Embedding(20, 8), nn.LayerNorm(8), Mlp()
        self.head, self.adds = nn.Linear(8, 20), adds

    def forward(self, ids):
        x = self.embed(ids)
        y = self.mlp(x=self.norm(x)) if not self.adds else self.mlp(self.norm(x))
        return self.head(x + y if self.adds else y)


def compare(plan, adds):
    torch.manual_seed(0)
    one = Model(adds).double()
    many = apply_tensor_parallel(copy.deepcopy(one), plan, dist.group.WORLD)
    ids = torch.arange(16).view(2, 8)
    for model in (one, many):
        model(ids).square().mean().backward()
    require_same_gradients(one, many, rtol=1e-9)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("plan", [SEQUENCES, WHOLE, BOTH], ids=["sequences", "whole", "both"])
def test_plans_of_torch(plan, size):
    run_ranks(compare, size, plan, plan is not BOTH)


def test_a_style_is_a_boundary():
    linear, table = nn.Linear(8, 12), nn.Embedding(20, 8)
    assert Boundary.from_torch(ColwiseParallel(), linear) == STYLES["column"]
    whole = ColwiseParallel(output_layouts=Replicate())
    assert Boundary.from_torch(whole, linear) == STYLES["column_gather"]
    assert Boundary.from_torch(RowwiseParallel(), linear).parameters == STYLES["row"].parameters
    rows = RowwiseParallel(input_layouts=Replicate())
    assert Boundary.from_torch(rows, linear) == STYLES["row_split"]
    assert Boundary.from_torch(rows, table) == STYLES["vocab"]
    assert Boundary.from_torch(SequenceParallel(), nn.LayerNorm(8)) == STYLES["sequence_layer"]


class Own(ParallelStyle):
    def _apply(self, module, device_mesh):
        return module


def test_what_has_no_boundary():
    with pytest.raises(InvalidArgumentError, match=r"Own object .* no counterpart"):
        apply_tensor_parallel(Model(), {"mlp": Own()})
    with pytest.raises(InvalidArgumentError, match=r"Partial.avg. .* no counterpart"):
        Boundary.from_torch(RowwiseParallel(output_layouts=Partial("avg")), nn.Linear(8, 8))


REFUSED = {
    "has no parameter lacking": {"lacking": placement.Shard(0)},
    r"its weight \(12, 8\) has no dim 2": {"weight": placement.Shard(2)},
    r"its weight cannot be Varying\(\)": {"weight": placement.Varying()},
    r"can be sharded along .* its boundary says \{'weight': 0\}": {"weight": placement.Shard(0)},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_parameters_that_do_not_fit(sentence):
    boundary = Boundary(parameters=REFUSED[sentence])
    with pytest.raises(InvalidArgumentError, match=f"'mlp.up'.*{sentence}"):
        apply_tensor_parallel(Model(), {"mlp.up": boundary})


def test_what_tp_or_sequence_parallelism_does_not_fit():
    uneven = Boundary(placement.Shard(-1), placement.Shard(-1), {"weight": placement.Shard(0)})
    with pytest.raises(InvalidArgumentError, match=r"does not divide norm.weight = 9"):
        explain(nn.ModuleDict({"norm": nn.RMSNorm(9)}), 2, {"norm": uneven})
    with pytest.raises(InvalidArgumentError, match="converts at its boundary"):
        explain(Model(), 2, SEQUENCES, sequence_parallel=True)
