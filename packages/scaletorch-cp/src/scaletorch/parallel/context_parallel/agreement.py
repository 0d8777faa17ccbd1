"""Checks of a call of attention, on one rank and between ranks.

A receiver that expects another size ends the whole process, so unequal shards must be found
first. A cache cannot replace the comparison if shapes vary: a rank that knows its shape would skip
a comparison in which another rank waits. With CPU tensors every call is compared. On other devices,
where reading the answer would stall the queue, a signature is compared at its first use.
"""

from __future__ import annotations

import zlib
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ...dist.building import agree
from ...dist.errors import InvalidArgumentError
from ..pg_manager import describe_rank
from .cp_comms import Ring
from .methods.call import Call

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Signature = tuple[str, ...]  # one rank's call, as lines of text

_MANY = 4096  # signatures of a ring in the cache: packed documents make new ones in every step

# Compared calls by group and ranks; every rank of a ring has the same ones.
_agreed: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], set[Signature]]] = (
    WeakKeyDictionary()
)


def cast_for_autocast(x: Tensor) -> Tensor:
    """Cast an input as autocast does for scaled_dot_product_attention."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device)) if x.is_floating_point() else x


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse tensors of this rank that do not fit together."""
    if any(x.ndim != 4 or not x.numel() for x in (q, k, v)):
        raise _shape_error("q, k and v must be [B, heads, L, D], with sizes above 0", q, k, v)
    rules = {
        f"dtypes must be equal, one of {', '.join(map(str, DTYPES))}": (
            q.dtype == k.dtype == v.dtype and q.dtype in DTYPES
        ),
        "devices must be equal": q.device == k.device == v.device,
        "k and v must have one shape, except the head dim": k.shape[:3] == v.shape[:3],
        "batch size and head dim must be those of q": (
            (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
        ),
        "k must have as many positions as q, a shard of the same sequence (neither decoding "
        "with a cache nor cross attention)": q.shape[2] == k.shape[2],
        "the number of key heads must divide the number of query heads": (
            q.shape[1] % k.shape[1] == 0
        ),
    }
    for rule, holds in rules.items():
        if not holds:
            raise _shape_error(rule, q, k, v)


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    """Refuse sinks that are not one number for each of this rank's query heads."""
    if sinks.shape != q.shape[1:2] or not sinks.is_floating_point() or sinks.device != q.device:
        raise InvalidArgumentError(
            f"context-parallel attention on {describe_rank()}: sinks must be one floating number "
            f"for each of the {q.shape[1]} query heads, on {q.device}; got {list(sinks.shape)} "
            f"{sinks.dtype} on {sinks.device}"
        )


def pad_head_dims(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad q, k and v to the larger head dim, for fused kernels; zeros change no score."""
    dim = max(q.shape[3], v.shape[3])
    q, k, v = (x if x.shape[3] == dim else F.pad(x, (0, dim - x.shape[3])) for x in (q, k, v))
    return q, k, v


def _shape_error(rule: str, *qkv: Tensor) -> InvalidArgumentError:
    got = ", ".join(
        f"{name} {list(x.shape)} {x.dtype} on {x.device}"
        for name, x in zip("qkv", qkv, strict=True)
    )
    return InvalidArgumentError(
        f"context-parallel attention on {describe_rank()}: {rule}; got {got}"
    )


def signature(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call, method: str
) -> Signature:
    """Describe this rank's call in lines that an error message can show."""
    given = (q, k, v) if sinks is None else (q, k, v, sinks)
    gradient = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    mask, layout = call.mask, call.layout
    documents = zlib.crc32(repr(mask.documents).encode()) if mask.documents else 0
    return (
        f"method {method}, subgroups of {call.subgroups[0].size} of the ranks {call.ring.ranks}",
        f"q {list(q.shape)}, {k.shape[1]} key/value heads of head dim {v.shape[3]}, {q.dtype}",
        f"causal {mask.causal}, window {mask.window}, documents of digest {documents:x}",
        f"{layout.name} layout of {layout.length} positions",
        f"scale {call.scale!r}, softcap {call.softcap!r}, sinks {sinks is not None}",
        f"needs gradient {gradient}",
    )


def require_agreement(
    mine: Signature, device: torch.device, ring: Ring, error: Exception | None = None
) -> None:
    """Compare the ranks' calls, with tensors on `device`; if they differ, every rank raises.

    If every call is compared, the other ranks also raise for the `error` of this rank's call.
    """
    if ring.group is None or ring.size == 1:
        agreed = {mine}
    elif device.type == "cpu":
        agreed = set()
    else:
        agreed = _agreed.setdefault(ring.group, {}).setdefault(ring.ranks, set())
    try:
        if mine not in agreed and (error is None or device.type == "cpu"):
            agree("this call of context-parallel attention", mine, ring.group, error=error)
        if error is not None:
            raise error
    finally:
        del error  # its traceback holds this frame
    if len(agreed) >= _MANY:
        agreed.clear()
    agreed.add(mine)
