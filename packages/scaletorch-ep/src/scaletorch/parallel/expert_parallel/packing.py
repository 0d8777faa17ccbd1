"""Hidden states and what goes with them as rows of one tensor, so that they travel together."""

from __future__ import annotations

import torch
from torch import Tensor

# Of a float's width; numbers of any kind travel as their bits.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack(hidden: Tensor, beside: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return hidden states [N, H] with the bits of integers [N, M] behind each, [N, H + …].

    Args:
        hidden: Of any dtype; the result has it.
        beside: Integers of any width.
        rows: Which of both to take, int64 [N]; None is all, in their order.
    """
    width = hidden.shape[1]
    if rows is not None:
        beside = beside.index_select(0, rows)
    more = -beside.shape[1] * beside.element_size() % hidden.element_size()
    if more:  # bytes, until they fill a column
        beside = torch.nn.functional.pad(beside, (0, more // beside.element_size()))
    bits = beside.contiguous().view(INTEGERS[hidden.element_size()])
    packed = hidden.new_empty((len(beside), width + bits.shape[1]))
    if rows is None:
        packed[:, :width] = hidden
    else:
        torch.index_select(hidden, 0, rows, out=packed[:, :width])
    packed.view(bits.dtype)[:, width:] = bits
    return packed


def columns(kind: torch.dtype, number: int, hidden: torch.dtype) -> int:
    """Return how many columns of dtype `hidden` so many integers take behind hidden states."""
    return -(-number * kind.itemsize // hidden.itemsize)


def unpack(packed: Tensor, width: int, kind: torch.dtype, number: int) -> tuple[Tensor, Tensor]:
    """Return hidden states [N, width], a view, and the integers [N, number] behind them."""
    bits = packed.view(INTEGERS[packed.element_size()])[:, width:].contiguous()
    return packed[:, :width], bits.view(kind)[:, :number]
