"""Split, join and reduce flat tensors on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

STEPS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


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
