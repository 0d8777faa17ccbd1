"""Tensors and numpy's arrays and numbers: dtypes, shapes, and the bytes of their values."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .beside_pickle import NotPlainError, Received, Sent, check

DIMS = 64  # of a tensor or array; more are not plain

_NUMBERS = "biufc"  # numpy's kinds of dtypes whose numbers are plain
_ARRAY = re.compile(r"[<>|](?:[biufc]\d{1,2}|[SU][1-9]\d{0,8}|[mM]8(?:\[\w{1,9}(?:/\d{1,9})?\])?)")


def tensor_parts(data: Tensor, sent: Sent) -> tuple[Any, ...]:
    """Return dtype, shape and whether gradients are asked for; the values follow the pickle."""
    kind = "quantized" if data.is_quantized else "meta" if data.is_meta else ""
    if data.layout is not torch.strided:
        kind = str(data.layout).removeprefix("torch.")
    if kind:
        raise NotPlainError(f"a {kind} tensor")
    if data.__dict__:
        raise NotPlainError(f"a tensor with attributes of its own ({', '.join(data.__dict__)})")
    sent.values.append(data.detach().resolve_conj().resolve_neg().cpu().contiguous())
    return data.dtype, shape_of(data.shape), data.requires_grad


def make_tensor(
    received: Received, dtype: torch.dtype, shape: tuple[Any, ...], requires_grad: bool
) -> Tensor:
    """Return a contiguous tensor on the CPU, with its own memory."""
    taken = received.take(_length(shape) * dtype.itemsize)
    if not taken:
        values = torch.empty(shape, dtype=dtype)
    else:
        check(dtype is not torch.bool or _are_bools(taken), "bools: others than 0 and 1")
        flat = torch.frombuffer(taken, dtype=torch.uint8)
        values = flat.clone().view(dtype).view(shape)  # aligned, and without the buffer's rest
    return values.requires_grad_() if requires_grad else values


def array_parts(data: Any, sent: Sent) -> tuple[Any, ...]:
    """Return dtype and shape; the values follow the pickle."""
    if not _ARRAY.fullmatch(data.dtype.str):
        raise NotPlainError(f"an array of dtype {data.dtype}")
    sent.values.append(data)
    return data.dtype.str, shape_of(data.shape)


def make_array(received: Received, name: str, shape: tuple[Any, ...]) -> Any:
    """Return an array in row-major order, with its own memory."""
    import numpy

    check(bool(_ARRAY.fullmatch(name)), "dtype of an array")
    dtype = numpy.dtype(name)
    taken = received.take(_length(shape) * dtype.itemsize)
    check(dtype.kind != "b" or _are_bools(taken), "bools: others than 0 and 1")
    return numpy.ndarray(shape, dtype, taken).copy() if taken else numpy.empty(shape, dtype)


def number_parts(data: Any, sent: Sent) -> tuple[Any, ...]:
    """Return dtype and bytes."""
    if data.dtype.kind not in _NUMBERS:
        kind = type(data)
        raise NotPlainError(f"{kind.__module__}.{kind.__qualname__}")
    return data.dtype.str, data.tobytes()


def make_number(received: Received, name: str, content: bytes) -> Any:
    """Return one of numpy's numbers."""
    import numpy

    check(bool(_ARRAY.fullmatch(name)), "dtype of a number")
    dtype = numpy.dtype(name)
    check(dtype.kind in _NUMBERS and len(content) == dtype.itemsize, "number")
    check(dtype.kind != "b" or _are_bools(content), "bools: others than 0 and 1")
    return numpy.frombuffer(content, dtype)[0]


def bytes_of(values: Any) -> Any:
    """Return a buffer of the bytes of a contiguous tensor or any array, uncopied if it can be."""
    if not isinstance(values, Tensor):
        return values.reshape(-1).view("u1").data if values.size else b""
    if not values.nbytes:
        return b""
    return (ctypes.c_ubyte * values.nbytes).from_address(values.data_ptr())


def _are_bools(values: Any) -> bool:
    return not bytes(values).translate(None, b"\0\1")


def shape_of(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return sizes as plain numbers."""
    shape = tuple(sizes)
    if len(shape) > DIMS:
        raise NotPlainError(f"a shape of more than {DIMS} dimensions")
    return shape


def _length(shape: tuple[Any, ...]) -> int:
    """Return the number of values of this shape, which may be anything."""
    check(_are_sizes(shape) and min(shape, default=0) >= 0, "shape")
    return math.prod(shape)


def make_size(received: Received, shape: tuple[Any, ...]) -> torch.Size:
    """Return a shape."""
    check(_are_sizes(shape), "shape")
    return torch.Size(shape)


def _are_sizes(shape: tuple[Any, ...]) -> bool:
    return len(shape) <= DIMS and all(
        type(size) is int and size.bit_length() < 64 for size in shape
    )
