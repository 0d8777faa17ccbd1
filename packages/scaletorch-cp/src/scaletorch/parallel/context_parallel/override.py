"""Let `F.scaled_dot_product_attention` inside one model mean attention over the whole sequence.

A `TorchFunctionMode` sees every call of it, also where it was imported by name. The mode is on
while a forward of the model runs. Recomputation (`torch.utils.checkpoint`) happens in backward,
outside of the model's forward, and calls the forwards of submodules: so each submodule turns
the mode on for itself where it is off. Other models never meet it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...dist.errors import InvalidArgumentError, StateError
from ..pg_manager import describe_rank

# attention(q, k, v, scale, is_causal) -> out
Attention = Callable[[Tensor, Tensor, Tensor, float | None, bool], Tensor]

_MARK = "_scaletorch_context_parallel"


def mark(model: nn.Module) -> None:
    """Remember on every module of `model` that it was made context parallel.

    Raises:
        StateError: A module of it was already.
    """
    for name, module in model.named_modules():
        if _MARK in module.__dict__:
            where = f"its submodule {name}" if name else "the model"
            message = (
                f"apply_context_parallel on {describe_rank()}: {where} is context parallel "
                "already; apply it once, to the outermost model"
            )
            raise StateError(message)
    for module in model.modules():
        setattr(module, _MARK, True)


def install(model: nn.Module, attention: Attention) -> None:
    """Route the calls of scaled_dot_product_attention in `model` to `attention`, in place.

    Modules of torch.nn itself call no attention of their own (but nn.MultiheadAttention, which
    the mode refuses), so they are left alone: what they contain is not.
    """
    scope = threading.local()
    for module in list(model.modules()):
        if module is model or not type(module).__module__.startswith("torch.nn."):
            wrapped = _overriding(module, attention, scope, outermost=module is model)
            # Bound to the module, so that a deep copy of the model calls itself, not this one.
            module.forward = MethodType(wrapped, module)


class AttentionOverride(TorchFunctionMode):
    """While it is on, scaled_dot_product_attention is `attention`; `calls` counts them."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.calls = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace attention, refuse what hides it, and leave all else as it is."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            _refuse_bare_checkpoint(sys._getframe(1))
            self.calls += 1
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            raise _refusal(
                "nn.MultiheadAttention computes its attention inside torch; use a module that "
                "calls F.scaled_dot_product_attention"
            )
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            raise _refusal("attn_mask must be None: use is_causal, and no padding")
        if dropout_p > 0:
            raise _refusal(f"dropout_p must be 0, and is {dropout_p}")
        heads = [x.shape[-3] for x in (query, key) if x.ndim > 2]
        if not enable_gqa and len(set(heads)) > 1:
            raise _refusal(f"{heads[0]} query heads and {heads[1]} key heads need enable_gqa=True")
        return self.attention(query, key, value, scale, bool(is_causal))


def _overriding(
    module: nn.Module, attention: Attention, scope: threading.local, *, outermost: bool
) -> Callable[..., Any]:
    """Return a forward for `module` that turns the override on where it is off."""
    own = module.__dict__.get("forward")
    inner: Callable[..., Any] = type(module).forward if own is None else _unbound(own)

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if getattr(scope, "on", False):
            return inner(self, *args, **kwargs)
        with _turned_on(scope, attention) as override:
            result = inner(self, *args, **kwargs)
        if outermost and not override.calls:
            raise _unseen(self)
        return result

    return forward


def _unbound(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return an instance's own forward as a function that takes the instance first."""
    if isinstance(forward, MethodType):
        return forward.__func__

    @functools.wraps(forward)
    def ignoring_self(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return ignoring_self


@contextmanager
def _turned_on(scope: threading.local, attention: Attention) -> Iterator[AttentionOverride]:
    scope.on = True
    try:
        with AttentionOverride(attention) as override:
            yield override
    finally:
        scope.on = False


def _refuse_bare_checkpoint(frame: Any) -> None:
    """Refuse attention in a function that is checkpointed by itself, not as a module.

    Its recomputation would pass no module's forward and so, in silence, attend to this rank's
    shard alone. Between the call and the nearest forward of ours must be no checkpoint.
    """
    while frame is not None and not (
        frame.f_code.co_name == "forward" and frame.f_globals is globals()
    ):
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            raise _refusal(
                "attention in a function that is checkpointed by itself would be recomputed "
                "without the other ranks: checkpoint the module around it"
            )
        frame = frame.f_back


def _refusal(why: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"context-parallel attention on {describe_rank()}: {why}")


def _unseen(model: nn.Module) -> StateError:
    message = (
        f"apply_context_parallel on {describe_rank()}: {type(model).__name__}.forward never called "
        "F.scaled_dot_product_attention, so whatever attention it has saw this rank's shard "
        "alone; select the model's 'sdpa' attention, or call ring_attention in it"
    )
    return StateError(message)
