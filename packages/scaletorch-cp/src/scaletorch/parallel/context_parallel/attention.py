"""Attention over a sequence that is sharded over ranks: one call for every method and mask.

A receiver that expects another size ends the whole process, so unequal shards must be found
first. A cache cannot replace the comparison if shapes vary: a rank that knows its shape would skip
a comparison in which another rank waits. With CPU tensors every call is compared. On other devices,
where reading the answer would stall the queue, a signature is compared at its first use.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from numbers import Real
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ...dist.building import agree
from ...dist.errors import InvalidArgumentError, StateError
from ...dist.functional import spmd_local
from ..pg_manager import describe_rank
from .cp_comms import Ring, ring_of
from .kernels.block import DTYPES, statistics_dtype
from .layouts import Layout, layout_for_shards
from .masks import Mask, chunk_documents, read_documents
from .methods import METHODS, choose_method
from .methods.call import Call, subgroups_for
from .sharding import resolve_layout

Signature = tuple[str, ...]  # one rank's call, as lines of text

_MANY = 4096  # signatures of a ring in the cache: packed documents make new ones in every step

# Compared calls by group and ranks; every rank of a ring has the same ones.
_agreed: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], set[Signature]]] = (
    WeakKeyDictionary()
)


# A mask checks itself when built, and every layer builds the same one. `typed`: 1 is not True.
_mask = lru_cache(maxsize=64, typed=True)(Mask)


class _Counter(threading.local):
    count = 0


calls = _Counter()  # of attention in this thread; shows whether a forward attended at all


class Request(NamedTuple):
    """The arguments of a call of `attention`, unchecked."""

    causal: bool
    scale: float | None = None
    window: int | None = None
    cu_seqlens: Sequence[int] | Tensor | None = None
    layout: Layout | str | None = None
    method: str = "auto"
    call: str = "attention"  # the function that was called, for messages about layouts
    default_layout: str | None = None  # of unrecorded shards; None if the caller must name it
    softcap: float | None = None
    sinks: Tensor | None = None
    chunk: int | None = None  # size of the chunks of a document in which positions see each other


class ContextAttention(torch.autograd.Function):
    """Attention by one method. Backward communicates: every rank must run it, in one order."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        method: ModuleType,
        call: Call,
    ) -> Tensor:
        """Return this rank's output [B, H, L, D] in q's dtype."""
        if sinks is not None:  # a copy, so that backward uses forward's values
            call = replace(call, sinks=sinks.detach().to(statistics_dtype(q.dtype), copy=True))
        out: Tensor
        with torch.autocast(q.device.type, enabled=False):
            out, saved = method.forward(q, k, v, call)
        ctx.save_for_backward(*saved)
        ctx.method, ctx.call = method, call
        return out

    @staticmethod
    def spmd_typecheck(out: Tensor, *, q: Tensor, k: Tensor, v: Tensor, sinks: Any) -> None:
        """Give the output the type of its shards, for the checker of `spmd_types`."""
        spmd_local(out, q, k, v, sinks)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v in their dtypes, and a partial sum of the sinks'.

        Raises:
            StateError: `create_graph=True`; second derivatives would be silently wrong.
        """
        if torch.is_grad_enabled():
            raise StateError(
                "context-parallel attention has no second derivatives: run its backward without "
                "create_graph"
            )
        with torch.autocast(grad_out.device.type, enabled=False):
            *grads, sinks = ctx.method.backward(grad_out, ctx.saved_tensors, ctx.call)
        return (*(grad.to(grad_out.dtype) for grad in grads), sinks, None, None)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    layout: Layout | str | None = None,
    method: str = "auto",
    group: ProcessGroup | None = None,
) -> Tensor:
    """Attend this rank's queries to the keys and values of the whole sequence.

    The result equals `F.scaled_dot_product_attention` of the whole sequence, forward and backward.
    Sums over keys and over ranks are kept and sent in float32 at least (float64 for float64). Rows
    that see nothing, such as padding, give 0. Every rank of the group must call it, and run its
    backward, in the same order.

    Args:
        q: This rank's queries [B, H, L, D] in float16, bfloat16, float32 or float64.
        k: This rank's keys [B, K, L, D]; K divides H, and each key head serves H / K query heads.
        v: This rank's values [B, K, L, Dv]; if Dv is not D, the smaller one is padded.
        causal: Each position sees itself and those before it.
        scale: Factor of the scores; 1 / sqrt(D) by default.
        window: Each position sees the `window` positions that end with it; without `causal` also
            the `window` - 1 after it.
        cu_seqlens: First positions of packed documents in the whole sequence, and its length:
            integers (0, a, ..., length), the same on every rank. Each position sees its own
            document.
        softcap: A scaled score s becomes softcap · tanh(s / softcap), as in Gemma 2.
        sinks: One more score [H] for each query head, without a value, as in gpt-oss. Each rank's
            gradient of them is a partial sum: sum it over the ranks.
        layout: A `Layout`, or a name of `LAYOUTS` if nothing is padded. By default the layout in
            which this group's sequences were sharded. Name it for shards made by hand, unless every
            position sees all others.
        method: "ring", "all_gather", "ulysses", "hybrid", or "auto": see `choose_method`.
        group: The ranks in order of their shards; by default the manager's cp axis.

    Returns:
        The output [B, H, L, Dv] for this rank's queries, in their dtype.

    Raises:
        InvalidArgumentError: Arguments that do not fit together, or another layout than that of
            the shards.
        MismatchError: The ranks' shapes, dtypes or options differ, or another rank has an error;
            raised on every rank. On other devices than CPU only new calls are compared.
        NotInGroupError: This rank is outside `group`.
        StateError: Several ranks, and neither a group nor a process group manager.
    """
    request = Request(
        causal, scale, window, cu_seqlens, layout, method, softcap=softcap, sinks=sinks
    )
    return attend(q, k, v, request, ring_of(group))


def attend(q: Tensor, k: Tensor, v: Tensor, request: Request, ring: Ring) -> Tensor:
    """Attend as `attention` does, over the ranks of a ring."""
    calls.count += 1
    try:
        q, k, v = (cast_for_autocast(x) for x in (q, k, v))
        method, call = _checked_call(q, k, v, request, ring)
        mine = signature(q, k, v, request.sinks, call, method)
        dim, wide = v.shape[3], max(q.shape[3], v.shape[3])
        # Fused kernels take one head dim; zeros change no score.
        q, k, v = (x if x.shape[3] == wide else F.pad(x, (0, wide - x.shape[3])) for x in (q, k, v))
    except Exception as error:  # of any kind: the other ranks wait in their comparison
        require_agreement((), getattr(q, "device", torch.device("cpu")), ring, error)
        raise
    require_agreement(mine, q.device, ring)
    apply: Any = ContextAttention.apply
    out: Tensor = apply(q, k, v, request.sinks, METHODS[method], call)
    return out[..., :dim]


def _checked_call(
    q: Tensor, k: Tensor, v: Tensor, request: Request, ring: Ring
) -> tuple[str, Call]:
    """Return the method and the call, after all checks that need no other rank."""
    method, scale = request.method, request.scale
    require_method(method)
    _check_options(request)
    check_inputs(q, k, v)
    if request.sinks is not None:
        check_sinks(request.sinks, q)
    limits = request.window, request.cu_seqlens, request.chunk, request.layout
    layout: Layout | str = "contiguous"  # any is right if every position sees all others
    if request.causal or any(limit is not None for limit in limits):
        default = request.default_layout
        layout = resolve_layout(request.layout, ring, request.call, consume=True, default=default)
    layout = layout_for_shards(layout, q.shape[2], None, ring.size)
    documents = None
    if request.cu_seqlens is not None:
        documents = read_documents(request.cu_seqlens, layout.length)
    if request.chunk is not None:
        documents = chunk_documents(documents or (0, layout.length), request.chunk)
    make = _mask if isinstance(request.window, int | None) else Mask  # it refuses other types
    mask = make(request.causal, request.window, documents)
    if method == "auto":
        method = choose_method(q, k, ring.size)[0]
    subgroups = subgroups_for(method, q, k, ring)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return method, Call(mask, layout, scale, k.shape[1], ring, subgroups, request.softcap)


def _check_options(request: Request) -> None:
    if not isinstance(request.causal, bool):
        raise InvalidArgumentError(f"causal must be True or False; it is {request.causal!r}")
    limits = {"scale": ("", -math.inf), "softcap": (" above 0", 0.0)}
    for name, (rule, least) in limits.items():
        number = getattr(request, name)
        is_real = isinstance(number, Real) and not isinstance(number, bool)
        if number is not None and not (is_real and least < number < math.inf):
            raise InvalidArgumentError(
                f"{name} must be a finite number{rule}, or None; it is {number!r}"
            )


def require_method(method: str) -> None:
    """Refuse a name that is neither "auto" nor one of `METHODS`."""
    if method not in ("auto", *METHODS):
        legal = ", ".join(map(repr, ("auto", *METHODS)))
        raise InvalidArgumentError(f"method must be one of {legal}; it is {method!r}")


def cast_for_autocast(x: Tensor) -> Tensor:
    """Cast an input as autocast does for scaled_dot_product_attention."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device)) if x.is_floating_point() else x


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse tensors of this rank that do not fit together."""
    rule = _broken_rule(q, k, v)
    if rule is not None:
        named = zip("qkv", (q, k, v), strict=True)
        got = ", ".join(f"{name} {list(x.shape)} {x.dtype} on {x.device}" for name, x in named)
        raise InvalidArgumentError(
            f"context-parallel attention on {describe_rank()}: {rule}; got {got}"
        )


def _broken_rule(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if any(x.ndim != 4 or not x.numel() for x in (q, k, v)):
        return "q, k and v must be [B, heads, L, D], with sizes above 0"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        return f"dtypes must be equal, one of {', '.join(map(str, DTYPES))}"
    if not q.device == k.device == v.device:
        return "devices must be equal"
    if k.shape[:3] != v.shape[:3]:
        return "k and v must have one shape, except the head dim"
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        return "batch size and head dim must be those of q"
    if q.shape[2] != k.shape[2]:
        return (
            "k must have as many positions as q, a shard of the same sequence (neither decoding "
            "with a cache nor cross attention)"
        )
    if q.shape[1] % k.shape[1]:
        return "the number of key heads must divide the number of query heads"
    return None


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    """Refuse sinks that are not one number for each of this rank's query heads."""
    if sinks.shape != q.shape[1:2] or not sinks.is_floating_point() or sinks.device != q.device:
        raise InvalidArgumentError(
            f"context-parallel attention on {describe_rank()}: sinks must be one floating number "
            f"for each of the {q.shape[1]} query heads, on {q.device}; got {list(sinks.shape)} "
            f"{sinks.dtype} on {sinks.device}"
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
