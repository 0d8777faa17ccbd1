"""Attention over a sequence that is divided over ranks: one call for every method and mask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ...dist.errors import InvalidArgumentError, ScaletorchError, StateError
from .agreement import require_agreement, signature, tell_refusal
from .alone import alone, attend_alone
from .cp_comms import Ring
from .inputs import autocast, check_inputs, with_one_head_dim
from .layouts.documents import read_documents
from .layouts.layout import Layout
from .layouts.lookup import layout_of_shards
from .masks.mask import Mask
from .methods import METHODS, Method
from .methods.call import Call
from .methods.choose import choose_method, parts_for
from .methods.parts import Groups, Parts, rings_of


class ContextAttention(torch.autograd.Function):
    """Attention by one method. Backward communicates: every rank must run it, in one order."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, method: Method, call: Call) -> Tensor:
        """Return this rank's output [B, H, L, D] in q's dtype."""
        with torch.autocast(q.device.type, enabled=False):
            out, saved = method.forward(q, k, v, call)
        ctx.save_for_backward(*saved)
        ctx.method, ctx.call = method, call
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v in their dtypes.

        Raises:
            StateError: `create_graph=True`; second derivatives would be wrong in silence.
        """
        if torch.is_grad_enabled():
            raise StateError(
                "context-parallel attention has no second derivatives: run its backward without "
                "create_graph"
            )
        with torch.autocast(grad_out.device.type, enabled=False):
            grads = ctx.method.backward(grad_out, ctx.saved_tensors, ctx.call)
        return (*(grad.to(grad_out.dtype) for grad in grads), None, None)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    layout: Layout | str | None = None,
    method: str = "auto",
    group: Groups = None,
) -> Tensor:
    """Attend this rank's queries to the keys and values of the whole sequence.

    What `F.scaled_dot_product_attention` computes of the whole, forward and backward. Sums over
    keys and over ranks are kept and sent in float32 at least (float64 for float64). Rows that see
    nothing, such as padding, give 0. Every rank of the group must call it, and run its backward,
    in the same order.

    Args:
        q: This rank's queries [B, H, L, D] in float16, bfloat16, float32 or float64.
        k: Its keys [B, K, L, D]; K divides H, and each key head serves H / K query heads.
        v: Its values [B, K, L, Dv]; where Dv is not D, the smaller is computed as the larger.
        causal: Each position sees itself and those before it.
        scale: Factor of the scores; 1 / sqrt(D) by default.
        window: Each position sees the `window` positions that end with it; without `causal` also
            the `window` - 1 after it.
        cu_seqlens: Where packed documents begin in the whole sequence, and its length: integers
            (0, a, ..., length), on every rank the same. Each position sees its own document.
        layout: Which positions each rank has: a `Layout`, or a name of `LAYOUTS` where nothing is
            padded; "zigzag" for causal attention by default, otherwise "contiguous".
        method: "ring", "all_gather", "ulysses", "hybrid", or "auto": see `choose_method`. Hybrid
            is Ulysses over parts of neighbouring ranks, as many as divide the key/value heads, and
            a ring across the parts.
        group: The ranks in order of their shares; by default the manager's cp axis. For "hybrid"
            also a pair: this rank's part, and the ring of its peers in the other parts, where
            the shares of the first part come first.

    Returns:
        The output [B, H, L, Dv] for this rank's queries, in their dtype.

    Raises:
        InvalidArgumentError: What does not fit together, or an unknown layout or method.
        MismatchError: The ranks' shapes, dtypes or options differ, or another rank's do not fit
            together; raised on every rank. On other devices than CPU calls are compared at the
            first use of their shapes and options alone.
        NotInGroupError: This rank is outside `group`.
        StateError: Several ranks, and neither a group nor a process group manager.
    """
    rings, run = rings_of(group), alone()
    mask = causal, window, cu_seqlens
    if run is not None:
        q, k, v = (autocast(x) for x in (q, k, v))
        try:
            _prepared(q, k, v, mask, scale, layout, method, rings)
        except ScaletorchError as error:
            run.refuse(error)
        return attend_alone(q, k, v)
    try:
        q, k, v = (autocast(x) for x in (q, k, v))
        method, call = _prepared(q, k, v, mask, scale, layout, method, rings)
        mine = signature(q, k, v, call, method)
        dim = v.shape[3]
        q, k, v = with_one_head_dim(q, k, v)
    except Exception:  # whatever it is, the other ranks wait in their comparison
        tell_refusal(rings, getattr(q, "device", torch.device("cpu")))
        raise
    require_agreement(mine, q.device, call)
    apply: Any = ContextAttention.apply
    out: Tensor = apply(q, k, v, METHODS[method], call)
    return out[..., :dim]


def _prepared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: tuple[bool, int | None, Sequence[int] | Tensor | None],
    scale: float | None,
    layout: Layout | str | None,
    method: str,
    rings: tuple[Ring, Parts | None],
) -> tuple[str, Call]:
    """Return the method and what it computes, checked as far as one rank can."""
    ring, given = rings
    causal, window, cu_seqlens = mask
    require_method(method)
    _require_typed(causal, scale)
    check_inputs(q, k, v)
    layout = layout or ("zigzag" if causal else "contiguous")
    place = layout_of_shards(layout, q.shape[2], None, ring)
    documents = None if cu_seqlens is None else read_documents(cu_seqlens, place.length)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if method == "auto":
        method = choose_method(q, k, ring.size)[0] if given is None else "hybrid"
    parts = parts_for(method, q, k, ring, given)
    return method, Call(Mask(causal, window, documents), place, scale, k.shape[1], ring, parts)


def _require_typed(causal: Any, scale: Any) -> None:
    if not isinstance(causal, bool):
        raise InvalidArgumentError(f"causal must be True or False; it is {causal!r}")
    number = isinstance(scale, Real) and not isinstance(scale, bool)
    if scale is not None and not (number and math.isfinite(scale)):
        raise InvalidArgumentError(f"scale must be a finite number, or None; it is {scale!r}")


def require_method(method: str) -> None:
    """Refuse a name that is no method's.

    Raises:
        InvalidArgumentError: It is neither "auto" nor one of `METHODS`.
    """
    if method not in ("auto", *METHODS):
        legal = ", ".join(map(repr, ("auto", *METHODS)))
        raise InvalidArgumentError(f"method must be one of {legal}; it is {method!r}")
