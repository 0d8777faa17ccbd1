"""Tensors as MPI sees them: memory, element types, and dtypes that MPI cannot reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidArgumentError
from ..wire.ops import op_name

# Names in mpi4py.MPI of what MPI reduces as it is.
_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    **{
        getattr(torch, f"{sign}int{bits}"): f"{sign}int{bits}_t".upper()
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
}
MOST = 2**31 - 1  # elements that every MPI can count
_HALVES = (torch.float16, torch.bfloat16)
_OPS = {"sum": "SUM", "mean": "SUM", "product": "PROD", "min": "MIN", "max": "MAX",
        "band": "BAND", "bor": "BOR", "bxor": "BXOR"}  # fmt: skip
# Of bools, which stay 0 and 1: a sum is "any", a product "all".
_BOOL_OPS = {"sum": "MAX", "max": "MAX", "bor": "MAX", "product": "MIN", "min": "MIN",
             "band": "MIN", "bxor": "BXOR"}  # fmt: skip


def flat(data: Tensor) -> Tensor:
    """Return a tensor's elements in order, flat and contiguous: its own memory if it is so."""
    if not data.is_cpu:
        raise InvalidArgumentError(
            f"backend 'mpi4py' moves CPU tensors, not {data.device.type}: copy it to the CPU, or "
            "use scaletorch.dist's calls, which do"
        )
    if data.layout is not torch.strided or data.is_quantized:
        raise InvalidArgumentError("backend 'mpi4py' moves dense tensors only")
    return data.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def raw(mpi: Any, data: Tensor, parts: int = 1) -> list[Any]:
    """Return MPI's description of a flat tensor's bytes: memory, those of one part, and type."""
    size = data.numel() * data.element_size()
    memory, count = mpi.buffer.fromaddress(data.data_ptr(), size), size // parts
    if count > MOST and count % 8 == 0:  # Open MPI 5 counts no further
        return [memory, count // 8, mpi.INT64_T]
    return [memory, count, mpi.BYTE]


def typed(mpi: Any, data: Tensor) -> list[Any]:
    """Return MPI's description of a flat tensor's numbers, of a dtype that MPI reduces."""
    size = data.numel() * data.element_size()
    kind = getattr(mpi, _TYPES[data.dtype])
    return [mpi.buffer.fromaddress(data.data_ptr(), size), data.numel(), kind]


def reducible(data: Tensor) -> Tensor:
    """Return a flat tensor that MPI can reduce: 16-bit floats widened, bools and complex viewed.

    Raises:
        InvalidArgumentError: MPI has no such numbers.
    """
    if data.dtype in _HALVES:
        return data.float()
    if data.dtype == torch.bool:
        return data.view(torch.uint8)
    if data.is_complex():
        return torch.view_as_real(data).view(-1)
    if data.dtype not in _TYPES:
        raise InvalidArgumentError(f"backend 'mpi4py' cannot reduce {data.dtype}")
    return data


def reduce_op(mpi: Any, op: Any, dtype: torch.dtype) -> tuple[Any, str]:
    """Return MPI's operation for torch's, and its name in `wire.ops`.

    Raises:
        InvalidArgumentError: MPI has none, or none for this dtype.
    """
    name = op_name(op)
    table = _BOOL_OPS if dtype == torch.bool else _OPS
    senseless = dtype.is_floating_point and name in ("band", "bor", "bxor")
    senseless = senseless or (dtype.is_complex and name not in ("sum", "mean"))
    if name not in table or senseless:
        raise InvalidArgumentError(f"backend 'mpi4py' cannot reduce {dtype} with op {name!r}")
    return getattr(mpi, table[name]), name


def reduced(target: Tensor, result: Tensor, name: str, size: int) -> Callable[[], None]:
    """Return what brings a reduced flat tensor home to `target`."""

    def finish() -> None:
        total = result
        if name == "mean":
            floats = total.is_floating_point()
            total = total.div_(size, rounding_mode=None if floats else "trunc")
        bring_home(target, total)

    return finish


def bring_home(target: Tensor, source: Tensor) -> None:
    """Write a flat tensor's elements into `target`, unless they lie there already."""
    if source.data_ptr() == target.data_ptr():
        return
    if target.dtype == torch.bool and source.dtype == torch.uint8:
        source = source.view(torch.bool)
    if target.is_complex() and not source.is_complex():
        source = torch.view_as_complex(source.view(-1, 2))
    target.detach().copy_(source.view(target.shape))
