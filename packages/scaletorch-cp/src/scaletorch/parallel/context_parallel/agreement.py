"""What all ranks of a ring must have alike, compared before tensors travel.

A receiver that expects another size ends the whole process, so unequal shards have to be found
first. The comparison is one collective of 72 bytes a rank. A cache of what was compared cannot
replace it where shapes vary, since a rank that knows its shape would skip what another rank
waits in. On CPU backends it runs in every call; on others, where reading the answer would stop
the device's queue, at the first use of a signature.
"""

from __future__ import annotations

import struct
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...dist.dist import all_gather
from ...dist.errors import MismatchError
from ..pg_manager import describe_rank
from .cp_comms import Ring

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_agreed: WeakKeyDictionary[ProcessGroup, set[Signature]] = WeakKeyDictionary()


class Signature(NamedTuple):
    """What one rank brings to a call of ring attention, as integers."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    dtype: int
    causal: int
    gradient: int
    scale: int

    def __str__(self) -> str:
        """Return it as a reader of an error message wants it."""
        scale = struct.unpack("<d", struct.pack("<q", self.scale))[0]
        return (
            f"q [{self.batch}, {self.heads}, {self.length}, {self.head_dim}], "
            f"{self.kv_heads} key/value heads, {DTYPES[self.dtype]}, is_causal "
            f"{bool(self.causal)}, scale {scale:.6g}, needs gradient {bool(self.gradient)}"
        )


def signature(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Signature:
    """Describe this rank's call."""
    batch, heads, length, head_dim = q.shape
    gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    bits = struct.unpack("<q", struct.pack("<d", scale))[0]
    dtype = DTYPES.index(q.dtype)
    return Signature(
        batch, heads, k.shape[1], length, head_dim, dtype, int(causal), int(gradient), bits
    )


def require_agreement(mine: Signature, device: torch.device, ring: Ring) -> None:
    """Compare the ranks' calls.

    Raises:
        MismatchError: They differ, raised on every rank of the ring and showing all sides.
    """
    if ring.group is None or ring.size == 1:
        return
    agreed = _agreed.setdefault(ring.group, set())
    if device.type != "cpu" and mine in agreed:
        return
    gathered = all_gather(torch.tensor(mine, dtype=torch.int64, device=device), ring.group)
    calls = [Signature(*call.tolist()) for call in gathered]
    if any(call != mine for call in calls):
        raise MismatchError(_difference(calls, ring))
    agreed.add(mine)


def _difference(calls: list[Signature], ring: Ring) -> str:
    lines = [f"ring attention on {describe_rank()}: the ranks of the ring differ"]
    for call in dict.fromkeys(calls):
        ranks = [str(rank) for rank, other in zip(ring.ranks, calls, strict=True) if other == call]
        lines.append(f"  rank {', '.join(ranks)}: {call}")
    lines.append("every rank must call it with shards of equal length (see shard_batch)")
    return "\n".join(lines)
