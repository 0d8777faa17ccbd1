"""Digests of tensors, which differ if the bits differ."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

WIDTH = 1021  # number of sums that a tensor is folded into; a prime, so no shape aligns with it


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """Return a number that differs if the bits differ; this is certain for one changed element.

    Reads the tensor once, on its device. Several changes cancel only by chance, or if words of 8
    bytes swapped places at a distance that is a multiple of 1021.

    Args:
        tensor: Any shape and dtype.

    Returns:
        0-d int64.
    """
    words = _words(tensor.detach().contiguous().view(-1))
    rows = len(words) // WIDTH
    whole, rest = words[: rows * WIDTH], words[rows * WIDTH :]
    weights = _weights(tensor.device)
    if rows:
        sums = whole.view(rows, WIDTH).sum(0)
        sums[: len(rest)] += rest
    else:
        sums, weights = rest, weights[: len(rest)]
    return (sums * weights).sum() + tensor.numel()


def digest_text(tensor: Tensor) -> str:
    """Return a tensor's digest as text; "none" for a meta tensor, which has no values."""
    if tensor.is_meta:
        return "none"
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return f"{int(digest(dense)) & 0xFFFFFFFFFFFFFFFF:016x}"


def _words(flat: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor as 8-byte words, padded with zeros."""
    size = flat.element_size()
    if flat.numel() * size % 8:
        flat = nn.functional.pad(flat.view(torch.uint8), (0, -flat.numel() * size % 8))
    elif flat.storage_offset() * size % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


@cache
def _weights(device: torch.device) -> Tensor:
    """Return odd numbers: no nonzero number times one of them is 0 modulo 2^64."""
    generator = torch.Generator().manual_seed(WIDTH)
    drawn = torch.randint(-(2**62), 2**62, (WIDTH,), generator=generator)
    return (drawn * 2 + 1).to(device)
