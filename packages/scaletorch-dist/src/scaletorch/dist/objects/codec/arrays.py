"""Tensors and numpy's arrays and numbers: dtypes, shapes, and the bytes of their values."""

from __future__ import annotations

import ctypes
import math
import re
import sys
from typing import Any

import torch
from torch import Tensor

from .made import DTYPES
from .scalars import read_distinct, write_distinct
from .stream import MalformedError, NotPlainError, Reader, Writer

_NUMBERS = "biufc"  # numpy's kinds of dtypes whose numbers are plain
_DTYPE = re.compile(r"[<>|](?:[biufc]\d{1,2}|[SU][1-9]\d{0,8}|[mM]8(?:\[\w+(?:/\d+)?\])?)")


def write_tensors(out: Writer, items: list[Tensor]) -> None:
    """Write tensors; their values alone where they are views."""
    write_distinct(out, items, _write_tensors)


def read_tensors(data: Reader, count: int) -> list[Tensor]:
    """Read what `write_tensors` wrote: contiguous tensors on the CPU, each with its own memory."""
    return read_distinct(data, count, _read_tensors)


def _write_tensors(out: Writer, items: list[Tensor]) -> None:
    for item in items:
        _check_tensor(item)
    out.items([item.dtype for item in items])
    out.items([item.shape for item in items])
    out.items([item.requires_grad for item in items])
    for item in items:
        values = item.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if values.nbytes:  # read before `values` goes
            out.data += (ctypes.c_ubyte * values.nbytes).from_address(values.data_ptr())


def _check_tensor(data: Tensor) -> None:
    kind = "quantized" if data.is_quantized else "meta" if data.is_meta else ""
    if data.layout is not torch.strided:
        kind = str(data.layout).removeprefix("torch.")
    if kind:
        raise NotPlainError(f"a {kind} tensor")
    if data.__dict__:
        raise NotPlainError(f"a tensor with attributes of its own ({', '.join(data.__dict__)})")


def _read_tensors(data: Reader, count: int) -> list[Tensor]:
    heads = zip(data.items(count), data.items(count), data.items(count), strict=True)
    return [_read_tensor(data, *head) for head in heads]


def _read_tensor(data: Reader, dtype: Any, shape: Any, requires_grad: Any) -> Tensor:
    if dtype not in DTYPES.values() or type(shape) is not torch.Size or min(shape, default=0) < 0:
        raise MalformedError("no head of a tensor")
    start, length = data.position, math.prod(shape) * dtype.itemsize
    taken = data.take(length)
    if not length:
        values = torch.empty(shape, dtype=dtype)
    else:
        if dtype is torch.bool:
            _check_bools(taken)
        flat = torch.frombuffer(data.data, dtype=torch.uint8, count=length, offset=start)
        values = flat.clone().view(dtype).view(shape)  # aligned, and without the buffer's rest
    return values.requires_grad_() if requires_grad is True else values


def _check_bools(values: memoryview) -> None:
    if max(values) > 1:
        raise MalformedError("bools other than 0 and 1")


def is_plain_number(kind: type) -> bool:
    """Tell whether a type is one of numpy's numbers that are plain."""
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None
        and issubclass(kind, numpy.generic)
        and numpy.dtype(kind).type is kind
        and numpy.dtype(kind).kind in _NUMBERS
    )


def write_arrays(out: Writer, items: list[Any]) -> None:
    """Write numpy's arrays of numbers, strings of fixed length and times."""
    write_distinct(out, items, _write_arrays)


def read_arrays(data: Reader, count: int) -> list[Any]:
    """Read what `write_arrays` wrote: arrays in row-major order, each with its own memory."""
    return read_distinct(data, count, _read_arrays)


def _write_arrays(out: Writer, items: list[Any]) -> None:
    for item in items:
        if not _DTYPE.fullmatch(item.dtype.str):
            raise NotPlainError(f"an array of dtype {item.dtype}")
    out.items([item.dtype.str for item in items])
    out.items([item.shape for item in items])
    for item in items:
        out.data += item.reshape(-1).view("u1").data if item.size else b""


def _read_arrays(data: Reader, count: int) -> list[Any]:
    heads = list(zip(data.items(count), data.items(count), strict=True))
    return [_read_array(data, dtype, shape) for dtype, shape in heads]


def _read_array(data: Reader, name: Any, shape: Any) -> Any:
    import numpy

    if not _DTYPE.fullmatch(name) or type(shape) is not tuple or min(shape, default=0) < 0:
        raise MalformedError("no head of an array")
    dtype = numpy.dtype(name)
    taken = data.take(math.prod(shape) * dtype.itemsize)
    if dtype.kind == "b" and taken:
        _check_bools(taken)
    return numpy.ndarray(shape, dtype, taken).copy() if taken else numpy.empty(shape, dtype)


def write_numbers(out: Writer, items: list[Any]) -> None:
    """Write numpy's numbers, those of each dtype as one array."""
    import numpy

    names = [item.dtype.str for item in items]
    kinds = sorted(set(names))
    out.number(len(kinds))
    out.items(kinds)
    places = {name: place for place, name in enumerate(kinds)}
    out.numbers(map(places.__getitem__, names))
    for kind in kinds:
        chosen = [item for item, name in zip(items, names, strict=True) if name == kind]
        _write_arrays(out, [numpy.array(chosen, kind)])


def read_numbers(data: Reader, count: int) -> list[Any]:
    """Read what `write_numbers` wrote."""
    kinds = data.length()
    data.items(kinds)
    places = data.lengths(count)
    arrays = [iter(_read_arrays(data, 1)[0]) for _ in range(kinds)]
    return list(map(next, map(arrays.__getitem__, places)))
