"""Recipes that reduce any dtype with any operation on a backend that supports fewer.

A recipe packs the tensor into a dtype that every backend reduces, names the operation to run, and
unpacks the result. Packing makes the result correct and the same on every rank: unsupported
integers are widened, the mean of integers is exact, bools stay 0 and 1, and a NaN survives min and
max (backends alone keep or lose it, depending on the rank that has it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ..errors import InvalidArgumentError

Op = str | ReduceOp | ReduceOp.RedOpType
Pack = Callable[[Tensor], Tensor]
Unpack = Callable[[Tensor, int], Tensor]

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
# Bools as 0 and 1: a sum is "any", a product "all", and so the truncated mean is "all" too.
_BOOL = {"sum": "max", "mean": "min", "product": "min", "min": "min", "max": "max",
         "band": "min", "bor": "max", "bxor": "bxor"}  # fmt: skip
STEPS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


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
    raise InvalidArgumentError(
        f"unknown reduce operation {op!r}: use one of {', '.join(REDUCE_OPS)} "
        f"({', '.join(f'{alias} is {name}' for alias, name in ALIASES.items())}), "
        "in any case, or torch's ReduceOp of that meaning"
    )


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Check that the operation `name` is defined for `dtype`."""
    if dtype in INTEGERS or dtype in WIDENED or dtype == torch.bool:
        return
    if dtype in FLOATS:
        way_out = "floats have no bitwise operations" if name in ("band", "bor", "bxor") else ""
    elif dtype in COMPLEX:
        way_out = "" if name in ("sum", "mean") else "complex tensors have sum and mean only"
    else:
        way_out = "convert the tensor to a dtype that can be added, such as float32 or int64"
    if way_out:
        raise InvalidArgumentError(f"cannot reduce {dtype} with op {name!r}: {way_out}")


def _keep(data: Tensor, size: int = 1) -> Tensor:
    return data


@dataclass(frozen=True, slots=True)
class Recipe:
    """A reduction expressed in operations and dtypes that backends support."""

    name: str  # the requested operation
    run: str  # the operation to run on the packed tensor
    pack: Pack = _keep  # contiguous tensor → tensor to reduce, the same one if nothing changes
    unpack: Unpack = _keep  # reduced tensor, number of ranks → result, of any dtype that converts

    @property
    def raw(self) -> Any:
        """Torch's ReduceOp for `run`."""
        return REDUCE_OPS[self.run]


@cache
def recipe_for(op: Op, dtype: torch.dtype, taken: bool = True) -> Recipe:
    """Return the recipe for a dtype; torch reduces a dtype that the backend has not `taken`."""
    name = op_name(op)
    check_dtype(name, dtype)
    wide = WIDENED.get(dtype)
    if dtype == torch.bool:
        return Recipe(name, _BOOL[name], methodcaller("to", torch.int8))
    if name == "mean" and (dtype in FLOATS or dtype in COMPLEX):
        # A sum in float16 may overflow even if the mean does not.
        pack = methodcaller("to", torch.float32) if dtype == torch.float16 else _keep
        return Recipe(name, "sum", pack, lambda total, size: total.div_(size))
    if name == "mean":
        truncated = partial(torch.Tensor.div_, rounding_mode="trunc")
        return Recipe(name, "sum", methodcaller("to", torch.int64), truncated)
    if name in ("min", "max") and dtype in FLOATS and taken:
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        pack = partial(_to_keys, wide=exact, greatest=name == "max")
        return Recipe(name, name, pack, lambda keys, size: _flip_negative(keys).view(exact))
    if name == "product" and dtype == torch.bfloat16:  # HCCL has no such product
        wide = torch.float32
    return Recipe(name, name, _keep if wide is None else methodcaller("to", wide))


def _to_keys(data: Tensor, wide: torch.dtype, greatest: bool) -> Tensor:
    """Map floats to integers in the same order, with NaN at the end that min or max picks."""
    integer = torch.int64 if wide == torch.float64 else torch.int32
    limits = torch.iinfo(integer)
    keys = _flip_negative(data.to(wide).view(integer))
    return keys.masked_fill_(data.isnan(), limits.max if greatest else limits.min)


def _flip_negative(bits: Tensor) -> Tensor:
    """Flip all bits but the sign of negative numbers; the function is its own inverse."""
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)


def even_counts(elements: int, ranks: int) -> list[int]:
    """Split `elements` evenly; return the lengths of the shards; the last may be shorter."""
    share = -(-elements // ranks)
    return [max(min(share, elements - share * rank), 0) for rank in range(ranks)]


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to sum: float32 for 16-bit floats, else the given one."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def fold(blocks: Tensor | Sequence[Tensor], run: str) -> Tensor:
    """Reduce packed blocks in order by a recipe's operation, 16-bit floats in float32."""
    step, given = STEPS[run], blocks[0].dtype
    dtype = sum_dtype(given)
    total = blocks[0].to(dtype, copy=len(blocks) == 1)
    if len(blocks) > 1:  # the result needs new memory, unless the conversion took it
        total = step(total, blocks[1], out=None if dtype is given else total)
    for block in blocks[2:]:
        step(total, block, out=total)
    return total


def as_one(entries: Sequence[Tensor]) -> Tensor:
    """Return flat tensors joined, for reading; those adjacent in one storage are not copied."""
    filled = [entry for entry in entries if entry.numel()]
    if not filled:
        return entries[0]
    memory, end = filled[0].untyped_storage().data_ptr(), filled[0].data_ptr()
    for entry in filled:
        if entry.data_ptr() != end or entry.untyped_storage().data_ptr() != memory:
            return torch.cat(filled)
        end += entry.nbytes
    return filled[0].as_strided((sum(entry.numel() for entry in filled),), (1,))
