"""Masks of whole sequences, which models of `transformers` that attend themselves ask for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..alone import alone
from .settings import Settings
from .transformers_mask import Pattern, read_mask

NAME = __name__


def whole_mask(
    *,
    batch_size: int,
    q_length: int,
    dtype: torch.dtype = torch.float32,
    device: Any = None,
    **asked: Any,
) -> Tensor:
    """Return what is added to scores of whole sequences, [own rows, 1, length, length].

    For a position that sees another it is 0, else the lowest number of `dtype`.
    """
    override, pattern = read_mask(q_length=q_length, **asked)
    if alone() is not None:
        return torch.zeros((1, 1, 1, 1), dtype=dtype, device=device)
    ring, told = override.settings.ring, override.settings.told
    length = q_length if ring.size == 1 else _length(override.settings, q_length)
    seen = _seen(pattern, torch.arange(length, device=device))
    if told is not None:  # what is behind is padding
        seen[:, told.layout.length :] = False
    documents = override.told_documents()
    if documents is not None:
        of = torch.bucketize(torch.arange(length), torch.tensor(documents), right=True)
        seen &= (of[:, None] == of[None]).to(seen.device)
    seen.fill_diagonal_(True)  # softmax over nothing would be NaN, and spoil what sees padding by 0
    mask = torch.zeros(seen.shape, dtype=dtype, device=device)
    mask.masked_fill_(~seen, torch.finfo(dtype).min)
    return mask.expand(-(-batch_size // ring.size), 1, length, length)


def _length(settings: Settings, part: int) -> int:
    """Return the length of the sequences of which each rank has a part, without padding."""
    return part * settings.ring.size if settings.told is None else settings.told.layout.length


def _seen(pattern: Pattern, at: Tensor) -> Tensor:
    queries, keys = at[:, None], at[None]
    seen = keys <= queries if pattern.causal else torch.ones_like(queries == keys)
    if pattern.window is not None:
        seen &= (queries - keys).abs() < pattern.window
    if pattern.chunk is not None:
        seen &= queries // pattern.chunk == keys // pattern.chunk
    return seen
