"""Attention in which each position sees itself alone, for asking what a model does around it.

Outside of attention a context-parallel model has to compute each position from that position and
what it was given with it. Whoever wants to know whether it does runs it twice, its positions
moved, within `each_alone`: no rank needs another then, and what differs was mixed elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ...dist.errors import ScaletorchError


class Alone:
    """One run in which each position is alone.

    Attributes:
        error: The first call of attention that would be refused, though it was computed here: a
            rank that raised alone would leave its tensor-parallel peers waiting.
    """

    def __init__(self) -> None:
        self.error: ScaletorchError | None = None

    def refuse(self, error: ScaletorchError) -> None:
        """Keep a refusal for later; the first one counts."""
        self.error = self.error or error


class _Runs(threading.local):
    run: Alone | None = None


_runs = _Runs()


@contextmanager
def each_alone() -> Iterator[Alone]:
    """Let all context-parallel attention of this thread see its own position, and send nothing."""
    before, _runs.run = _runs.run, Alone()
    try:
        yield _runs.run
    finally:
        _runs.run = before


def alone() -> Alone | None:
    """Return the run in which each position is alone, if there is one in this thread."""
    return _runs.run


def attend_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return each position's own value, weighed by what its query and its key hold.

    Softmax over one key would give the value itself, and hide queries and keys that were mixed or
    turned by another position's angle: so the weights depend on both.

    Args:
        q: [B, H, L, D].
        k: [B, K, L, D]; K divides H.
        v: [B, K, L, Dv].

    Returns:
        [B, H, L, Dv] in q's dtype.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    out: Tensor = v * (1 + _weight(q) + _weight(k)).to(v.dtype)
    return out


def weigh_alone(x: Tensor, values: Tensor) -> Tensor:
    """Return values, each position's weighed by what it holds itself.

    Args:
        x: [B, L, H].
        values: [B, L, ...], in any floating dtype.
    """
    weight = (1 + _weight(x)).view(*x.shape[:2], *[1] * (values.ndim - 2))
    return values * weight.to(values.dtype)


def _weight(x: Tensor) -> Tensor:
    """Return one number for each vector, of about 1, whatever its length."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    mixture = torch.arange(x.shape[-1], device=x.device, dtype=x.dtype).add_(1).cos_()
    length = x.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    weight: Tensor = (x @ mixture).unsqueeze(-1) / length
    return weight
