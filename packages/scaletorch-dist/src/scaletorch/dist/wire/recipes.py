"""Recipes that reduce a tensor on a backend that knows fewer dtypes and operations.

A recipe packs the tensor into a dtype that every backend reduces, names the operation to run there,
and unpacks the result. Packing makes the result right and the same on every rank: integers that a
backend does not know are widened, the mean of integers is exact, bools stay 0 and 1, and a NaN
survives min and max (backends lose it, or not, by rank).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from .ops import COMPLEX, FLOATS, REDUCE_OPS, WIDENED, Op, check_dtype, op_name

Pack = Callable[[Tensor], Tensor]
Unpack = Callable[[Tensor, int], Tensor]


def _keep(data: Tensor, size: int = 1) -> Tensor:
    return data


@dataclass(frozen=True, slots=True)
class Recipe:
    """The reduction to run instead.

    Attributes:
        name: The operation that was asked for.
        run: The operation to run on the packed tensor.
        raw: The ReduceOp of torch for it.
        pack: Contiguous tensor → tensor to reduce (the same one where nothing changes).
        unpack: Reduced tensor, number of ranks → result; any dtype that converts to the wanted one.
    """

    name: str
    run: str
    raw: Any
    pack: Pack
    unpack: Unpack


def _make(name: str, run: str, pack: Pack = _keep, unpack: Unpack = _keep) -> Recipe:
    return Recipe(name, run, REDUCE_OPS[run], pack, unpack)


@cache
def recipe_for(op: Op, dtype: torch.dtype, taken: bool = True) -> Recipe:
    """Return how to reduce a tensor of `dtype` with `op`.

    Args:
        op: The operation.
        dtype: Of the tensor.
        taken: Whether the backend reduces this dtype; else torch does, which loses no NaN.

    Raises:
        InvalidArgumentError: Unknown operation, or one without a meaning for the dtype.
    """
    name = op_name(op)
    check_dtype(name, dtype)
    if dtype == torch.bool:
        return _make(name, _BOOL[name], pack=partial(_to, dtype=torch.int8))
    if dtype in FLOATS or dtype in COMPLEX:
        return _float_recipe(name, dtype, taken)
    if name == "mean":
        pack = partial(_to, dtype=torch.int64)
        return _make(name, "sum", pack=pack, unpack=_truncated_mean)
    wide = WIDENED.get(dtype)
    widen: Pack = _keep if wide is None else partial(_to, dtype=wide)
    return _make(name, name, pack=widen)


# Bools as 0 and 1: a sum is "any", a product "all", and so the truncated mean is "all" too.
_BOOL = {
    "sum": "max",
    "mean": "min",
    "product": "min",
    "min": "min",
    "max": "max",
    "band": "min",
    "bor": "max",
    "bxor": "bxor",
}


def _float_recipe(name: str, dtype: torch.dtype, taken: bool) -> Recipe:
    if name == "mean":
        # The sum of float16 may leave its range where the mean does not.
        pack = partial(_to, dtype=torch.float32) if dtype == torch.float16 else _keep
        return _make(name, "sum", pack=pack, unpack=_mean)
    if name == "product" and dtype == torch.bfloat16:  # HCCL has none
        return _make(name, name, pack=partial(_to, dtype=torch.float32))
    if name in ("min", "max") and taken:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        pack = partial(_to_keys, wide=wide, greatest=name == "max")
        return _make(name, name, pack=pack, unpack=partial(_from_keys, wide=wide))
    return _make(name, name)


def _to(data: Tensor, dtype: torch.dtype) -> Tensor:
    return data.to(dtype)


def _mean(total: Tensor, size: int) -> Tensor:
    return total.div_(size)


def _truncated_mean(total: Tensor, size: int) -> Tensor:
    return total.div_(size, rounding_mode="trunc")


def _to_keys(data: Tensor, wide: torch.dtype, greatest: bool) -> Tensor:
    """Return integers in the order of the floats, NaN beyond all (at the end that wins)."""
    integer = torch.int64 if wide == torch.float64 else torch.int32
    limits = torch.iinfo(integer)
    keys = _flip_negative(data.to(wide).view(integer))
    return keys.masked_fill_(data.isnan(), limits.max if greatest else limits.min)


def _from_keys(keys: Tensor, size: int, wide: torch.dtype) -> Tensor:
    return _flip_negative(keys).view(wide)


def _flip_negative(bits: Tensor) -> Tensor:
    """Flip all bits but the sign of negative numbers; it is its own inverse."""
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)
