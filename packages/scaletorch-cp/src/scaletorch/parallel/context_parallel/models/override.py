"""Make `F.scaled_dot_product_attention` inside one model attend to the whole sequence.

A `TorchFunctionMode` sees every call of it, also if it was imported by name. The mode is on while a
forward of the model runs. Recomputation (`torch.utils.checkpoint`) runs in backward, outside of the
model's forward, and calls the forwards of submodules. So each submodule turns the mode on for
itself if it is off. Other models are affected only if they are called inside the model's own
forward.
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

from ....dist.errors import StateError
from ...pg_manager import describe_rank
from ..attention import Request, calls
from ..masks.documents import CU_SEQLENS, Documents, read_documents
from .arguments import require_documents_kept, require_no_labels
from .multihead import FUNCTION, attend_projected, without_weights
from .settings import Settings, note_backward, refusal, settings_of


class _Running(threading.local):
    """The overrides that are on in this thread, the innermost last."""

    def __init__(self) -> None:
        self.overrides: list[AttentionOverride] = []


_running = _Running()
_RECOMPUTING = ("torch.utils.checkpoint", "torch.autograd.function")  # run code in backward


def install(model: nn.Module) -> None:
    """Wrap the forwards of a marked model, in place, so that they turn the override on.

    Modules of torch.nn call no attention of their own except nn.MultiheadAttention, so the others
    are left alone; modules inside them are not.
    """
    for module in list(model.modules()):
        attends = isinstance(module, nn.MultiheadAttention)
        if module is model or attends or not type(module).__module__.startswith("torch.nn."):
            wrapped = _wrap_forward(module, outermost=module is model)
            # Bound to the module, so that a deep copy of the model calls itself, not this one.
            module.forward = MethodType(wrapped, module)


class AttentionOverride(TorchFunctionMode):
    """While it is on, scaled_dot_product_attention is over the whole sequence.

    Attributes:
        settings: The attention settings of the model.
        given: Keyword arguments of the forward that turned it on.
        position_ids: The argument of the innermost forward that has it.
    """

    def __init__(self, settings: Settings, given: Mapping[str, Any]) -> None:
        super().__init__()
        self.settings = settings
        self.given = given
        self.position_ids = given.get("position_ids")
        self._documents: list[tuple[object, Documents]] = []  # a cache: reading waits for a device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace attention, refuse calls that hide it, and pass on all other functions."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            _refuse_bare_function(sys._getframe(1))
            return self._sdpa(*args, **kwargs)
        if func is FUNCTION:
            return attend_projected(self._sdpa_of_heads, *args, **kwargs)
        return func(*args, **kwargs)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request) -> Tensor:
        """Attend by the model's settings."""
        if request.cu_seqlens is not None:
            request = request._replace(cu_seqlens=self.documents(request.cu_seqlens))
        elif self.given.get(CU_SEQLENS[0]) is not None:
            raise refusal(
                f"the model was given {CU_SEQLENS[0]} and does not pass it to its attention; run "
                "it within ShardedSequences.inside, which sets the documents"
            )
        return self.settings.attend(q, k, v, request)

    def documents(self, cu_seqlens: Sequence[int] | Tensor) -> Documents:
        """Return cumulative lengths as integers: see `read_documents`."""
        for read, documents in self._documents:
            if read is cu_seqlens:
                return documents
        self._documents.append((cu_seqlens, read_documents(cu_seqlens)))
        return self._documents[-1][1]

    def _sdpa_of_heads(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        return self.attend(q, k, v, Request(bool(is_causal)))

    def _sdpa(
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
            raise refusal("attn_mask must be None: use is_causal, and no padding")
        if dropout_p > 0:
            raise refusal(f"dropout_p must be 0, and is {dropout_p}")
        heads = [x.shape[-3] for x in (query, key) if x.ndim > 2]
        if not enable_gqa and len(set(heads)) > 1:
            raise refusal(f"{heads[0]} query heads and {heads[1]} key heads need enable_gqa=True")
        return self.attend(query, key, value, Request(bool(is_causal), scale))


def running_override(settings: Settings | None = None) -> AttentionOverride | None:
    """Return the override of these settings, or of any, that is on in this thread."""
    for override in reversed(_running.overrides):
        if settings in (None, override.settings):
            return override
    return None


def _wrap_forward(module: nn.Module, *, outermost: bool) -> Callable[..., Any]:
    """Return a forward for `module` that turns the override on if it is off."""
    inner = unbound_forward(module)
    sharded = without_weights(module, inner)

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        settings = settings_of(self)
        if settings is None or not settings.active:
            if settings is not None and outermost:
                require_documents_kept(self, kwargs)
            elif settings is not None:
                settings.require_forward_batch()
            return inner(self, *args, **kwargs)
        running = running_override(settings)
        if running is not None:
            running.position_ids = kwargs.get("position_ids", running.position_ids)
            return sharded(self, *args, **kwargs)
        if outermost:
            require_no_labels(self, kwargs)
        else:
            settings.require_forward_batch()
        before = calls.count
        with _enabled(settings, kwargs):
            result = sharded(self, *args, **kwargs)
        if outermost:
            if settings.must_attend and settings.ring.size > 1 and calls.count == before:
                raise _no_attention_error(self)
            note_backward(result, settings)
        return result

    return forward


def unbound_forward(module: nn.Module) -> Callable[..., Any]:
    """Return a module's forward as a function whose first argument is the module."""
    forward = module.__dict__.get("forward")
    if forward is None:
        return type(module).forward
    if isinstance(forward, MethodType):
        return forward.__func__

    @functools.wraps(forward)
    def ignoring_self(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return ignoring_self


@contextmanager
def _enabled(settings: Settings, given: Mapping[str, Any]) -> Iterator[None]:
    override = AttentionOverride(settings, given)
    _running.overrides.append(override)
    try:
        with override:
            yield
    finally:
        _running.overrides.pop()


def _refuse_bare_function(frame: Any) -> None:
    """Refuse attention in a checkpointed or autograd function that calls no module.

    Its backward would call no module's forward and so silently attend to this rank's shard alone.
    No such function may lie between the attention and the nearest wrapped forward.
    """
    while frame is not None and not (
        frame.f_code.co_name == "forward" and frame.f_globals is globals()
    ):
        if frame.f_globals.get("__name__") in _RECOMPUTING:
            raise refusal(
                "attention in a function that is checkpointed by itself, or is an autograd "
                "function, would be recomputed without the other ranks: let it call the module "
                "around the attention"
            )
        frame = frame.f_back


def _no_attention_error(model: nn.Module) -> StateError:
    return StateError(
        f"context-parallel attention on {describe_rank()}: {type(model).__name__}.forward called "
        "no F.scaled_dot_product_attention, so any attention it has saw this rank's shard alone: "
        "select the model's 'sdpa' attention, call ring_attention in it, or let parallelize "
        "compare it with one process (without rehearse=False)"
    )
