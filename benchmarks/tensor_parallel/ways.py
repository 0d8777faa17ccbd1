"""The ways to shard a Llama block over the ranks: by hand, ours, and torch's DTensor plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from scaletorch.models.llama import Block
from scaletorch.parallel.tensor_parallel import (
    ColumnParallelLinear,
    Divide,
    Plan,
    apply_tensor_parallel,
)

from .by_hand import by_hand, divide_heads, sum_norms

PLAN: Plan = {
    "self_attn": Divide("num_heads", "num_kv_heads"),
    **{f"self_attn.{name}_proj": "column" for name in "qkv"},
    "self_attn.o_proj": "row",
    "mlp.gate_proj": "column",
    "mlp.up_proj": "column",
    "mlp.down_proj": "row",
}
STYLES = {name: style for name, style in PLAN.items() if isinstance(style, str)}
NORMS = "input_layernorm", "post_attention_layernorm"
Finish = Callable[[nn.Module], None]


def nothing(block: nn.Module) -> None:
    """Leave the gradients unchanged."""


@dataclass(frozen=True)
class Way:
    """A way to shard a block.

    Attributes:
        divide: Turns the full block into this rank's shard, in place.
        sequence: Whether input and output are this rank's sequence shards.
        finish: Completes the norms' gradients after backward.
    """

    divide: Callable[[Block], nn.Module]
    sequence: bool = False
    finish: Finish = nothing


def ours(block: Block, *, sequence: bool = False, overlap: bool = True) -> nn.Module:
    """Apply our plan; with sequence shards the block is a layer in the middle of a list."""
    plan: Plan = {**PLAN, "": "sequence_layer"} if sequence else PLAN
    apply_tensor_parallel(block, plan, dist.group.WORLD, sequence_parallel=sequence)
    if sequence:
        vars(block).update(_first=False, _last=False)
    for layer in block.modules():
        if isinstance(layer, ColumnParallelLinear):
            layer.async_all_reduce = overlap
    return block


def dtensor(block: Block, *, sequence: bool = False) -> nn.Module:
    """Apply torch's plan, from its tutorial on tensor parallelism."""
    shares, whole = Shard(1), Replicate()
    plan: dict[str, ParallelStyle] = {
        name: ColwiseParallel()
        if style == "column"
        else RowwiseParallel(output_layouts=shares if sequence else whole)
        for name, style in STYLES.items()
    }
    if sequence:
        for name, rest in (("self_attn", (None, None)), ("mlp", ())):
            plan[name] = PrepareModuleInput(
                input_layouts=(shares, *rest), desired_input_layouts=(whole, *rest)
            )
        plan |= {name: SequenceParallel() for name in NORMS}
    divide_heads(block)
    return parallelize_module(block, DeviceMesh("cpu", list(range(dist.get_world_size()))), plan)


def sum_dtensor_norms(block: nn.Module) -> None:
    """Sum the norms' gradients, which torch keeps as partial sums until an optimizer needs them."""
    for name in NORMS:
        weight: Any = block.get_parameter(f"{name}.weight")
        weight.grad = weight.grad.redistribute(placements=[Replicate()])


WAYS = {
    "by hand": Way(partial(by_hand, styles=STYLES)),
    "scaletorch": Way(ours),
    "scaletorch, no overlap": Way(partial(ours, overlap=False)),
    "DTensor": Way(dtensor),
    "by hand, sequence": Way(partial(by_hand, styles=STYLES, sequence=True), True, sum_norms),
    "scaletorch, sequence": Way(partial(ours, sequence=True), True),
    "scaletorch, sequence, no overlap": Way(partial(ours, sequence=True, overlap=False), True),
    "DTensor, sequence": Way(partial(dtensor, sequence=True), True, sum_dtensor_norms),
}
