"""Flops and memory traffic of an operation, and the bytes that a collective sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
# Names of c10d's operations in `scaletorch.dist`.
_OPERATIONS = {
    "allreduce": "all_reduce", "allgather": "all_gather", "_allgather_base": "all_gather",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter",
    "alltoall": "all_to_all", "alltoall_base": "all_to_all", "send": "send", "recv_": "receive",
    "broadcast": "broadcast", "gather": "gather", "scatter": "scatter", "reduce": "reduce",
    "barrier": "barrier",
}  # fmt: skip


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Return the total bytes of the elements of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def sort_of(func: Any) -> str:
    """Return an operation's kind, as in `Work.operation`."""
    name = func._schema.name
    if "attention" in name:
        return "attention"
    known = func._overloadpacket in flop_registry or func is aten._grouped_mm.default
    return "matmul" if known else "other"


def flops_of(func: Any, args: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    """Return the flops of an operation; a causal attention counts half."""
    name = func._schema.name
    if "attention" in name:
        return _attention(func, inputs, args)
    if func is aten._grouped_mm.default:  # each token with its expert
        a, b = inputs[:2]
        return 2.0 * a.numel() * b.shape[-1]
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return 0.0
    return float(formula(*args, out_val=outputs[0] if len(outputs) == 1 else tuple(outputs)))


def _attention(func: Any, inputs: Sequence[Tensor], args: Any) -> float:
    backward = "backward" in func._schema.name
    query, key, value = inputs[1:4] if backward else inputs[:3]
    rows = query.shape[:-1].numel()
    products = rows * key.shape[-2] * (query.shape[-1] + value.shape[-1]) * 2.0
    names = [argument.name for argument in func._schema.arguments]
    causal = dict(zip(names, args, strict=False)).get("is_causal", False)
    return products * (2.5 if backward else 1.0) * (0.5 if causal else 1.0)


def sent_by(func: Any, tensors: Sequence[Tensor], size: int) -> tuple[str, float]:
    """Return the name of a collective and the bytes that a rank sends, with ring algorithms."""
    raw = func._schema.name.removeprefix("c10d::").rstrip("_")
    operation = next(
        (mine for theirs, mine in _OPERATIONS.items() if raw == theirs.rstrip("_")), raw
    )
    whole = max((bytes_of([tensor]) for tensor in tensors), default=0)
    if operation == "send":
        return operation, float(bytes_of(tensors[:1]))
    if operation in {"receive", "barrier"}:
        return operation, 0.0
    if raw in {"allgather", "reduce_scatter", "alltoall"}:  # lists with one tensor for each rank
        whole = max(bytes_of(tensors) // 2, bytes_of(tensors) * size // (size + 1))
    turns = 2 if operation == "all_reduce" else 1
    return operation, turns * whole * (size - 1) / size
