"""What a rank brings to a call of attention: checked here, compared over the ranks.

A receiver that expects another size ends the whole process, so unequal shards have to be found
first. The comparison is one collective of 128 bytes a rank. A cache of compared calls cannot
replace it if shapes vary, since a rank that knows its shape would skip a comparison in which
another rank waits. On CPU backends it runs in every call; on others, on which reading the answer
would stop the device's queue, at the first use of a signature.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ...dist import all_gather
from ...dist.errors import InvalidArgumentError, MismatchError
from ..pg_manager import describe_rank
from .alone import alone
from .cp_comms import Parts, Ring
from .layouts.layout import LAYOUTS, Layout
from .methods import METHODS
from .methods.call import Call

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_CAUSAL, _GRADIENT, _SINKS = 1, 2, 4
_VALUES = 2**31  # more than any head dim: two of them travel as one integer
_MANY = 4096  # calls of a ring that are remembered at most: packed documents are new in every step

# For each group the calls of a ring, which has one part and its ranks; all of these know the same.
_Agreed = dict[tuple[int, int], set["Signature"]]
_agreed: WeakKeyDictionary[ProcessGroup, _Agreed] = WeakKeyDictionary()


def as_autocast(x: Tensor) -> Tensor:
    """Cast as autocast casts an input of scaled_dot_product_attention."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device)) if x.is_floating_point() else x


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse tensors that do not fit together on this rank."""
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


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    """Refuse sinks that are not one number for each of this rank's query heads."""
    if sinks.shape != q.shape[1:2] or not sinks.is_floating_point() or sinks.device != q.device:
        raise InvalidArgumentError(
            f"context-parallel attention on {describe_rank()}: sinks must be one floating number "
            f"for each of the {q.shape[1]} query heads, on {q.device}; got {list(sinks.shape)} "
            f"{sinks.dtype} on {sinks.device}"
        )


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


class Signature(NamedTuple):
    """What one rank brings to a call of attention, as integers."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dims: int  # of queries and keys, and of values
    dtype: int
    flags: int  # of causal attention, of a gradient that is needed, of sinks
    scale: int
    softcap: int
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
        scale, softcap = (_number(bits) for bits in (self.scale, self.softcap))
        causal, gradient, sinks = (bool(self.flags & flag) for flag in (_CAUSAL, _GRADIENT, _SINKS))
        capped = f", softcap {softcap:.6g}" if softcap else ""
        window = f", window {self.window}" if self.window else ""
        documents = f", documents of digest {self.documents:x}" if self.documents else ""
        part = f" over parts of {self.part}" if self.part > 1 else ""
        part += f" and ranks of digest {self.ranks:x}" if self.part > 1 else ""
        return (
            f"{sorted(METHODS)[self.method]}{part} on q [{self.batch}, {self.heads}, "
            f"{self.length}, {head_dim}], {self.kv_heads} key/value heads{values}, "
            f"{DTYPES[self.dtype]}, causal {causal}{window}{documents}, "
            f"{sorted(LAYOUTS)[self.layout]} layout of {self.whole} positions, "
            f"scale {scale:.6g}{capped}{', sinks' * sinks}, needs gradient {gradient}"
        )


REFUSED = Signature(*[-1] * len(Signature._fields))


def signature(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call, method: str
) -> Signature:
    """Describe this rank's call."""
    batch, heads, length, head_dim = q.shape
    given = (q, k, v) if sinks is None else (q, k, v, sinks)
    gradient = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    mask = call.mask
    flags = mask.causal * _CAUSAL | gradient * _GRADIENT | (sinks is not None) * _SINKS
    documents = zlib.crc32(repr(mask.documents).encode()) if mask.documents else 0
    return Signature(
        batch, heads, k.shape[1], length, head_dim * _VALUES + v.shape[3],
        DTYPES.index(q.dtype), flags, _bits(call.scale), _bits(call.softcap or 0.0),
        mask.window or 0, documents, sorted(LAYOUTS).index(call.layout.name), call.layout.length,
        sorted(METHODS).index(method), call.parts[0].size,
        zlib.crc32(repr(call.ring.ranks).encode()),
    )  # fmt: skip


def _bits(number: float) -> int:
    """Return a number as an integer of the same 64 bits."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def _number(bits: int) -> float:
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number


def signature_of_rows(hidden: Tensor, layout: Layout, ring: Ring) -> Signature:
    """Describe hidden states [B, L, H] of which a rank is to see whole sequences of some rows."""
    batch, length, width = hidden.shape[0], hidden.shape[1], hidden[0, 0].numel()
    gradient = torch.is_grad_enabled() and hidden.requires_grad
    return Signature(
        batch, 1, 1, length, width * _VALUES + width, DTYPES.index(hidden.dtype),
        gradient * _GRADIENT, 0, 0, 0, 0, sorted(LAYOUTS).index(layout.name), layout.length,
        sorted(METHODS).index("ulysses"), 1, zlib.crc32(repr(ring.ranks).encode()),
    )  # fmt: skip


def require_agreement(
    mine: Signature, device: torch.device, ring: Ring, parts: Parts | None = None
) -> None:
    """Compare the ranks' calls.

    Raises:
        MismatchError: They differ, raised on every rank of the ring and showing all sides.
    """
    groups = _groups(ring, parts)
    if not groups:
        return
    agreed = _agreed.setdefault(groups[-1], {}).setdefault((mine.part, mine.ranks), set())
    if device.type != "cpu" and mine in agreed:
        return
    calls = _gathered(mine, groups)
    if any(other != mine for other in calls):
        raise MismatchError(_difference(calls, ring))
    if device.type != "cpu":
        if len(agreed) >= _MANY:
            agreed.clear()
        agreed.add(mine)


def tell_refusal(rings: tuple[Ring, Parts | None], device: torch.device) -> None:
    """Let the other ranks know, who compare their calls, that this one's was refused here.

    Only if they compare at every call, as they do with tensors on CPU, and not while each position
    is alone: then no other rank listens.
    """
    if device.type == "cpu" and alone() is None:
        _gathered(REFUSED, _groups(*rings))


def _groups(ring: Ring, parts: Parts | None) -> list[ProcessGroup]:
    """Return the groups over which all ranks are reached: the ring's, or a caller's pair."""
    rings = (ring,) if ring.group is not None or parts is None else parts
    return [ring.group for ring in rings if ring.group is not None and ring.size > 1]


def _gathered(mine: Signature, groups: Sequence[ProcessGroup]) -> list[Signature]:
    rows = torch.tensor([mine], dtype=torch.int64)
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
