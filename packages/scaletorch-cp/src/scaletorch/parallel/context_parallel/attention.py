"""Attention over a sequence that is divided over ranks: one call for every method and mask."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...dist.errors import InvalidArgumentError, StateError
from .agreement import (
    as_autocast,
    check_inputs,
    check_sinks,
    require_agreement,
    signature,
    with_one_head_dim,
)
from .cp_comms import Ring, ring_of
from .kernels import statistics_dtype
from .layouts.layout import Layout, layout_of_shards
from .layouts.sharding import order_of_shards
from .masks.documents import Documents, chunked, read_documents
from .masks.mask import Mask
from .methods import METHODS, Method
from .methods.call import Call, parts_for
from .methods.choose import choose_method

# A mask checks itself when it is made: the same one is made in every layer. 1 is not True here.
_mask = lru_cache(maxsize=64, typed=True)(Mask)


class _Calls(threading.local):
    made = 0


calls = _Calls()  # of attention in this thread, so that a forward without any is found


class Asked(NamedTuple):
    """What a caller asks of attention: the arguments of `attention`, as they came.

    Attributes:
        call: The function that was called, for messages about the order of shards.
        otherwise: The order of shards that no call has noted; None if it must be said then.
        chunk: Positions from the beginning of a document on that see each other, and so on.
    """

    causal: bool
    scale: float | None = None
    window: int | None = None
    cu_seqlens: Sequence[int] | Tensor | None = None
    layout: Layout | str | None = None
    method: str = "auto"
    call: str = "attention"
    otherwise: str | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    chunk: int | None = None


class ContextAttention(torch.autograd.Function):
    """Attention by one method. Backward communicates: every rank must run it, in one order."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        method: Method,
        call: Call,
    ) -> Tensor:
        """Return this rank's output [B, H, L, D] in q's dtype."""
        if sinks is not None:  # a copy: backward is of the sinks that forward had
            call = replace(call, sinks=sinks.detach().to(statistics_dtype(q.dtype), copy=True))
        with torch.autocast(q.device.type, enabled=False):
            out, saved = method.forward(q, k, v, call)
        ctx.save_for_backward(*saved)
        ctx.method, ctx.call = method, call
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v in their dtypes, and this rank's part of the sinks'.

        Raises:
            StateError: `create_graph=True`; second derivatives would be wrong in silence.
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

    The result is that of `F.scaled_dot_product_attention` of the whole, forward and backward. Sums
    over keys and over ranks are kept and sent in float32 at least (float64 for float64). Rows that
    see nothing, such as padding, give 0. Every rank of the group must call it, and run its
    backward, in the same order.

    Args:
        q: This rank's queries [B, H, L, D] in float16, bfloat16, float32 or float64.
        k: Its keys [B, K, L, D]; K divides H, and each key head serves H / K query heads.
        v: Its values [B, K, L, Dv]; if Dv is not D, the smaller is computed as the larger.
        causal: Each position sees itself and those before it.
        scale: Factor of the scores; 1 / sqrt(D) by default.
        window: Each position sees the `window` positions that end with it; without `causal` also
            the `window` - 1 after it.
        cu_seqlens: Where packed documents begin in the whole sequence, and its length: integers
            (0, a, ..., length), on every rank the same. Each position sees its own document.
        softcap: A scaled score s becomes softcap · tanh(s / softcap), as in Gemma 2.
        sinks: A score [H] of each query head that is weighed with those of the keys and takes no
            value, as in gpt-oss. Each rank's gradient of them is its part: sum them over the ranks.
        layout: The order of the shards: a `Layout`, or a name of `LAYOUTS` if nothing is padded.
            By default the one in which this group's sequences were sharded; it must be said for
            shards that were made by hand, unless every position sees all others.
        method: "ring", "all_gather", "ulysses", "hybrid", or "auto": see `choose_method`.
        group: The ranks in order of their shards; by default the manager's cp axis.

    Returns:
        The output [B, H, L, Dv] for this rank's queries, in their dtype.

    Raises:
        InvalidArgumentError: Arguments that do not fit together, or another order than the shards
            have.
        MismatchError: The ranks' shapes, dtypes or options differ, or another rank was refused;
            raised on every rank. On other devices than CPU only new calls are compared.
        NotInGroupError: This rank is outside `group`.
        StateError: Several ranks, and neither a group nor a process group manager.
    """
    asked = Asked(causal, scale, window, cu_seqlens, layout, method, softcap=softcap, sinks=sinks)
    return attend(q, k, v, asked, ring_of(group))


def attend(q: Tensor, k: Tensor, v: Tensor, asked: Asked, ring: Ring) -> Tensor:
    """Attend as `attention` does, with the arguments as one value and the ranks found already."""
    calls.made += 1
    try:
        q, k, v = (as_autocast(x) for x in (q, k, v))
        method, call = _prepared(q, k, v, asked, ring)
        mine = signature(q, k, v, asked.sinks, call, method)
        dim = v.shape[3]
        q, k, v = with_one_head_dim(q, k, v)
    except Exception as error:  # whatever it is, the other ranks wait in their comparison
        require_agreement((), getattr(q, "device", torch.device("cpu")), ring, error)
        raise
    require_agreement(mine, q.device, ring)
    apply: Any = ContextAttention.apply
    out: Tensor = apply(q, k, v, asked.sinks, METHODS[method], call)
    return out[..., :dim]


def _prepared(q: Tensor, k: Tensor, v: Tensor, asked: Asked, ring: Ring) -> tuple[str, Call]:
    """Return the method and what it computes, checked as far as one rank can alone."""
    method, scale = asked.method, asked.scale
    require_method(method)
    _require_typed(asked)
    check_inputs(q, k, v)
    if asked.sinks is not None:
        check_sinks(asked.sinks, q)
    make = _mask if isinstance(asked.window, int | None) else Mask  # which refuses it
    mask = make(asked.causal, asked.window)
    place = layout_of_shards(_order(asked, ring), q.shape[2], None, ring.size)
    documents = _documents(asked, place.length)
    if documents is not None:
        mask = replace(mask, documents=documents)
    if method == "auto":
        method = choose_method(q, k, ring.size)[0]
    parts = parts_for(method, q, k, ring)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return method, Call(mask, place, scale, k.shape[1], ring, parts, asked.softcap)


def _documents(asked: Asked, length: int) -> Documents | None:
    """Return the documents whose positions alone see each other; None is one."""
    told = None if asked.cu_seqlens is None else read_documents(asked.cu_seqlens, length)
    return told if asked.chunk is None else chunked(told or (0, length), asked.chunk)


def _order(asked: Asked, ring: Ring) -> Layout | str:
    """Return the order of the shards; if every position sees all others, any one is right."""
    within = asked.window, asked.cu_seqlens, asked.chunk
    mask = asked.causal, *(each is not None for each in within)
    if asked.layout is None and not any(mask):
        return "contiguous"
    return order_of_shards(asked.layout, ring, asked.call, takes=True, otherwise=asked.otherwise)


def _require_typed(asked: Asked) -> None:
    causal, scale, softcap = asked.causal, asked.scale, asked.softcap
    if not isinstance(causal, bool):
        raise InvalidArgumentError(f"causal must be True or False; it is {causal!r}")
    if scale is not None and not _is_finite(scale):
        raise InvalidArgumentError(f"scale must be a finite number, or None; it is {scale!r}")
    if softcap is not None and not (_is_finite(softcap) and softcap > 0):
        message = f"softcap must be a finite number above 0, or None; it is {softcap!r}"
        raise InvalidArgumentError(message)


def _is_finite(number: Any) -> bool:
    return isinstance(number, Real) and not isinstance(number, bool) and math.isfinite(number)


def require_method(method: str) -> None:
    """Refuse a name that is no method's.

    Raises:
        InvalidArgumentError: It is neither "auto" nor one of `METHODS`.
    """
    if method not in ("auto", *METHODS):
        legal = ", ".join(map(repr, ("auto", *METHODS)))
        raise InvalidArgumentError(f"method must be one of {legal}; it is {method!r}")
