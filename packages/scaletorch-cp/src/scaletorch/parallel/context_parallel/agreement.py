"""What all ranks of a ring must have alike, compared before tensors travel.

A receiver that expects another size ends the whole process, so unequal shards have to be found
first. The comparison is one collective of 128 bytes a rank. A cache of what was compared cannot
replace it where shapes vary, since a rank that knows its shape would skip what another rank
waits in. On CPU backends it runs in every call; on others, where reading the answer would stop
the device's queue, at the first use of a signature.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...dist.dist import all_gather
from ...dist.errors import MismatchError
from ..pg_manager import describe_rank
from .cp_comms import Ring
from .layouts.layout import LAYOUTS
from .methods import METHODS
from .methods.call import Call
from .methods.parts import Parts

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_VALUES = 2**31  # more than any head dim: two of them travel as one integer

_agreed: WeakKeyDictionary[ProcessGroup, set[Signature]] = WeakKeyDictionary()


class Signature(NamedTuple):
    """What one rank brings to a call of attention, as integers."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dims: int  # of queries and keys, and of values
    dtype: int
    gradient: int
    scale: int
    causal: int
    window: int
    documents: int
    layout: int
    whole: int
    method: int
    part: int
    ranks: int

    def __str__(self) -> str:
        """Return it as a reader of an error message wants it."""
        if self == REFUSED:
            return "refused its call, see its own error"
        head_dim, value_dim = divmod(self.head_dims, _VALUES)
        values = f" of head dim {value_dim}" * (value_dim != head_dim)
        scale = struct.unpack("<d", struct.pack("<q", self.scale))[0]
        window = f", window {self.window}" if self.window else ""
        documents = f", documents of digest {self.documents:x}" if self.documents else ""
        part = f" over parts of {self.part}" if self.part > 1 else ""
        part += f" and ranks of digest {self.ranks:x}" if self.part > 1 else ""
        return (
            f"{sorted(METHODS)[self.method]}{part} on q [{self.batch}, {self.heads}, "
            f"{self.length}, {head_dim}], {self.kv_heads} key/value heads{values}, "
            f"{DTYPES[self.dtype]}, causal {bool(self.causal)}{window}{documents}, "
            f"{sorted(LAYOUTS)[self.layout]} layout of {self.whole} positions, "
            f"scale {scale:.6g}, needs gradient {bool(self.gradient)}"
        )


REFUSED = Signature(*[-1] * len(Signature._fields))


def signature(q: Tensor, k: Tensor, v: Tensor, call: Call, method: str) -> Signature:
    """Describe this rank's call."""
    batch, heads, length, head_dim = q.shape
    gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    bits = struct.unpack("<q", struct.pack("<d", call.scale))[0]
    mask = call.mask
    documents = zlib.crc32(repr(mask.documents).encode()) if mask.documents else 0
    return Signature(
        batch, heads, k.shape[1], length, head_dim * _VALUES + v.shape[3],
        DTYPES.index(q.dtype), int(gradient), bits,
        int(mask.causal), mask.window or 0, documents, sorted(LAYOUTS).index(call.layout.name),
        call.layout.length, sorted(METHODS).index(method), call.parts[0].size,
        zlib.crc32(repr(call.ring.ranks).encode()),
    )  # fmt: skip


def require_agreement(mine: Signature, device: torch.device, call: Call) -> None:
    """Compare the ranks' calls.

    Raises:
        MismatchError: They differ, raised on every rank of the ring and showing all sides.
    """
    groups = _groups(call.ring, call.parts)
    if not groups:
        return
    agreed = _agreed.setdefault(groups[-1], set())
    if device.type != "cpu" and mine in agreed:
        return
    calls = _gathered(mine, device, groups)
    if any(other != mine for other in calls):
        raise MismatchError(_difference(calls, call.ring))
    if device.type != "cpu":
        agreed.add(mine)


def tell_refusal(rings: tuple[Ring, Parts | None], device: torch.device) -> None:
    """Let the other ranks know, who compare their calls, that this one's was refused here.

    Only where they compare at every call, which is with tensors on CPU.
    """
    if device.type == "cpu":
        _gathered(REFUSED, device, _groups(*rings))


def _groups(ring: Ring, parts: Parts | None) -> list[ProcessGroup]:
    """Return the groups over which all ranks are reached: the ring's, or a caller's pair."""
    rings = (ring,) if ring.group is not None or parts is None else parts
    return [ring.group for ring in rings if ring.group is not None and ring.size > 1]


def _gathered(
    mine: Signature, device: torch.device, groups: Sequence[ProcessGroup]
) -> list[Signature]:
    rows = torch.tensor([mine], dtype=torch.int64, device=device)
    for group in groups:
        rows = torch.cat(all_gather(rows, group))
    return [Signature(*row) for row in rows.tolist()]


def _difference(calls: list[Signature], ring: Ring) -> str:
    lines = [f"context-parallel attention on {describe_rank()}: the ranks differ"]
    for call in dict.fromkeys(calls):
        ranks = [str(rank) for rank, other in zip(ring.ranks, calls, strict=True) if other == call]
        lines.append(f"  rank {', '.join(ranks)}: {call}")
    lines.append("every rank must call it with shards of equal length (see shard_batch)")
    return "\n".join(lines)
