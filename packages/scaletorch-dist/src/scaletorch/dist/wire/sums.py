"""Split, join and reduce flat tensors on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

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


def parts_of(counts: Sequence[int]) -> list[range]:
    """Return the index range of each rank's shard."""
    return [range(*ends) for ends in pairwise(accumulate(counts, initial=0))]


def even_parts(elements: int, parts: int) -> list[int]:
    """Split `elements` evenly; return the lengths of the shards, of which the last are shorter."""
    share = -(-elements // parts)
    return [max(min(share, elements - share * rank), 0) for rank in range(parts)]


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to sum: float32 for 16-bit floats, else the given one."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def fold(
    blocks: Tensor | Sequence[Tensor],
    run: str = "sum",
    *,
    start: Tensor | None = None,
    divisor: int = 1,
    spoil: bool = False,
) -> Tensor:
    """Reduce packed blocks on this rank in order, 16-bit floats in float32.

    Args:
        blocks: Tensors of one shape and dtype.
        run: The operation that a recipe runs.
        start: Initial value of a sum; each block is then divided before it is added.
        divisor: Divisor of a sum.
        spoil: Whether the first block may be overwritten, to save memory.
    """
    step, given = STEPS[run], blocks[0].dtype
    dtype = sum_dtype(given)
    if start is not None:
        total = start.to(dtype, copy=True)
        for block in blocks:
            total += block if divisor == 1 else block.to(dtype) / divisor
        return total
    spoil = spoil or dtype is not given  # the conversion copies anyway
    total = blocks[0].to(dtype, copy=len(blocks) == 1 and not spoil)
    if len(blocks) > 1:
        total = step(total, blocks[1], out=total) if spoil else step(total, blocks[1])
    for block in blocks[2:]:
        step(total, block, out=total)
    return total if divisor == 1 else total.div_(divisor)


def as_one(entries: Sequence[Tensor]) -> Tensor:
    """Return flat contiguous tensors of one dtype joined; the result is read-only.

    Nothing is copied if they are adjacent in one storage, as the chunks of a tensor are.
    """
    filled = [entry for entry in entries if entry.numel()]
    if not filled:
        return entries[0]
    memory, end = filled[0].untyped_storage().data_ptr(), filled[0].data_ptr()
    for entry in filled:
        if entry.data_ptr() != end or entry.untyped_storage().data_ptr() != memory:
            return torch.cat(filled)
        end += entry.nbytes
    return filled[0].as_strided((sum(entry.numel() for entry in filled),), (1,))
