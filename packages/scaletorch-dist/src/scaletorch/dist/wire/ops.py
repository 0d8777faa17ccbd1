"""The table of reduce operations: their names, torch's ReduceOps, and the dtypes of each."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ReduceOp

from ..errors import InvalidArgumentError

Op = str | ReduceOp | ReduceOp.RedOpType

REDUCE_OPS: dict[str, Any] = {
    "sum": ReduceOp.SUM,
    "mean": ReduceOp.AVG,
    "product": ReduceOp.PRODUCT,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "band": ReduceOp.BAND,
    "bor": ReduceOp.BOR,
    "bxor": ReduceOp.BXOR,
}
ALIASES = {"prod": "product", "avg": "mean"}

FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
COMPLEX = frozenset((torch.complex64, torch.complex128))
# Integers that backends reduce, and the wider dtypes in which others are reduced.
INTEGERS = frozenset((torch.uint8, torch.int8, torch.int32, torch.int64))
WIDENED = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}

_BITWISE = frozenset(("band", "bor", "bxor"))
_OF_COMPLEX = frozenset(("sum", "mean"))


def op_name(op: Op) -> str:
    """Return the key in `REDUCE_OPS` for a name in any case, an alias or a ReduceOp."""
    if isinstance(op, str):
        name = op.lower()
        name = ALIASES.get(name, name)
        if name in REDUCE_OPS:
            return name
    elif isinstance(op, (ReduceOp, ReduceOp.RedOpType)):
        for name, known in REDUCE_OPS.items():
            if op == known:
                return name
    message = (
        f"unknown reduce operation {op!r}: use one of {', '.join(REDUCE_OPS)} "
        f"({', '.join(f'{alias} is {name}' for alias, name in ALIASES.items())}), "
        "in any case, or torch's ReduceOp of that meaning"
    )
    raise InvalidArgumentError(message)


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Check that the operation `name` is defined for `dtype`."""
    if dtype in INTEGERS or dtype in WIDENED or dtype == torch.bool:
        return
    if dtype in FLOATS:
        way_out = "floats have no bitwise operations" if name in _BITWISE else ""
    elif dtype in COMPLEX:
        way_out = "" if name in _OF_COMPLEX else "complex tensors have sum and mean only"
    else:
        way_out = "convert the tensor to a dtype that can be added, such as float32 or int64"
    if way_out:
        raise InvalidArgumentError(f"cannot reduce {dtype} with op {name!r}: {way_out}")
