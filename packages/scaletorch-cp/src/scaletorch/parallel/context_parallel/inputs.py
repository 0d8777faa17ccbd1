"""What attention takes in: cast as autocast does, and checked on this rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...dist.errors import InvalidArgumentError
from ..pg_manager import describe_rank
from .agreement import DTYPES


def autocast(x: Tensor) -> Tensor:
    """Cast as autocast casts an input of scaled_dot_product_attention."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device)) if x.is_floating_point() else x


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse what does not fit together on this rank."""
    if any(x.ndim != 4 or not x.numel() for x in (q, k, v)):
        raise _misfit("q, k and v must be [B, heads, L, D], none of them 0", q, k, v)
    rules = {
        f"dtypes must be equal, one of {', '.join(map(str, DTYPES))}": (
            q.dtype == k.dtype == v.dtype and q.dtype in DTYPES
        ),
        "devices must be equal": q.device == k.device == v.device,
        "k and v must have one shape, but for the head dim": k.shape[:3] == v.shape[:3],
        "batch size and head dim must be those of q": (
            (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
        ),
        "as many positions in k as in q, both one shard of the same sequence (neither decoding "
        "with a cache nor cross attention)": q.shape[2] == k.shape[2],
        "the number of key heads must divide the number of query heads": (
            q.shape[1] % k.shape[1] == 0
        ),
    }
    for rule, holds in rules.items():
        if not holds:
            raise _misfit(rule, q, k, v)


def with_one_head_dim(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors of the larger head dim, as fused kernels take one: zeros change no score."""
    dim = max(q.shape[3], v.shape[3])
    q, k, v = (x if x.shape[3] == dim else F.pad(x, (0, dim - x.shape[3])) for x in (q, k, v))
    return q, k, v


def _misfit(rule: str, *qkv: Tensor) -> InvalidArgumentError:
    came = ", ".join(
        f"{name} {list(x.shape)} {x.dtype} on {x.device}"
        for name, x in zip("qkv", qkv, strict=True)
    )
    return InvalidArgumentError(
        f"context-parallel attention on {describe_rank()}: {rule}; got {came}"
    )
