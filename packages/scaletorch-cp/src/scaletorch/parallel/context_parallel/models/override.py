"""Make the attention inside one model attend to the whole sequence.

A `TorchFunctionMode` sees every call of `F.scaled_dot_product_attention`, also if it was imported
by name, and of the function of `nn.MultiheadAttention`. The mode is on while a forward of the model
runs. Recomputation (`torch.utils.checkpoint`) runs in backward, outside of the model's forward, and
calls the forwards of submodules. So each submodule turns the mode on for itself if it is off. Other
models are affected only if they are called inside the model's own forward.
"""

from __future__ import annotations

import functools
import inspect
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
from ..masks import CU_SEQLENS, Documents, read_documents
from .settings import Settings, note_backward, refusal, settings_of

_RECOMPUTING = ("torch.utils.checkpoint", "torch.autograd.function")  # run code in backward
REFUSED = "_scaletorch_refused"  # why a module may not be called while attention is sharded
_MULTIHEAD_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_MULTIHEAD_FORWARD = inspect.signature(nn.MultiheadAttention.forward)
_project_packed = vars(F)["_in_projection_packed"]


class _Running(threading.local):
    overrides: tuple[AttentionOverride, ...] = ()


_running = _Running()  # the overrides that are on in this thread, the innermost last


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
    """Mode under which attention is over the whole sequence."""

    def __init__(self, settings: Settings, given: Mapping[str, Any]) -> None:
        super().__init__()
        self.settings = settings
        self.given = given  # keyword arguments of the forward that turned it on
        self.position_ids = given.get("position_ids")  # of the innermost forward that has them
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
        if func is F.multi_head_attention_forward:
            return self._multihead(*args, **kwargs)
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
        return self.attend(query, key, value, Request(bool(is_causal), scale))

    def _multihead(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Compute `F.multi_head_attention_forward` without returning weights, which no rank has."""
        bound = _MULTIHEAD_SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        _require_supported(given)
        inputs = (given[name] for name in ("query", "key", "value"))  # each [L, B, E]
        projected = _project_packed(*inputs, given["in_proj_weight"], given["in_proj_bias"])
        heads = (x.unflatten(-1, (given["num_heads"], -1)) for x in projected)
        q, k, v = (x.permute(1, 2, 0, 3) for x in heads)
        out = self.attend(q, k, v, Request(bool(given["is_causal"])))
        out = out.permute(2, 0, 1, 3).flatten(2)
        return F.linear(out, given["out_proj_weight"], given["out_proj_bias"]), None


def _require_supported(given: Mapping[str, Any]) -> None:
    """Refuse options of `nn.MultiheadAttention` that shards cannot compute."""
    added = given["add_zero_attn"] or given["bias_k"] is not None or given["static_k"] is not None
    unfit = {
        "a key_padding_mask: give padding labels of -100 with a causal mask": (
            given["key_padding_mask"] is not None
        ),
        "an attn_mask of this rank's shard: also pass is_causal=True if it is causal": (
            given["attn_mask"] is not None and not given["is_causal"]
        ),
        "dropout of attention weights: set it to 0": given["training"] and given["dropout_p"],
        "a key without a token: build it without add_bias_kv and add_zero_attn": added,
        "keys of another width than its queries: build it without kdim and vdim": (
            given["use_separate_proj_weight"]
        ),
        "a sequence without a batch dim: pass [B, L, E]": given["query"].dim() != 3,
    }
    for what, is_given in unfit.items():
        if is_given:
            raise refusal(f"nn.MultiheadAttention is given {what}, or keep sequences whole")


def running_override(settings: Settings | None = None) -> AttentionOverride | None:
    """Return the override of these settings, or of any, that is on in this thread."""
    for override in reversed(_running.overrides):
        if settings in (None, override.settings):
            return override
    return None


def _wrap_forward(module: nn.Module, *, outermost: bool) -> Callable[..., Any]:
    """Return a forward for `module` that turns the override on if it is off."""
    inner = unbound_forward(module)
    sharded = _without_weights(module, inner)

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        settings = settings_of(self)
        if settings is None or not settings.active:
            if settings is not None and outermost:
                _require_documents_kept(self, kwargs)
            return inner(self, *args, **kwargs)
        if REFUSED in vars(self):
            raise refusal(vars(self)[REFUSED])
        running = running_override(settings)
        if running is not None:
            running.position_ids = kwargs.get("position_ids", running.position_ids)
            return sharded(self, *args, **kwargs)
        if outermost:
            _require_no_labels(self, kwargs)
        before = calls.count
        with _enabled(settings, kwargs):
            result = sharded(self, *args, **kwargs)
        if outermost:
            if settings.must_attend and settings.ring.size > 1 and calls.count == before:
                raise StateError(
                    f"context-parallel attention on {describe_rank()}: {type(self).__name__}."
                    "forward called no F.scaled_dot_product_attention, so any attention it has saw "
                    "this rank's shard alone: select the model's 'sdpa' attention, or call "
                    "ring_attention in it (parallelize also takes models that it can rehearse)"
                )
            note_backward(result, settings)
        return result

    return forward


def _without_weights(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that requests no attention weights, for a subclass of MultiheadAttention.

    Its own forward, as under tensor parallelism, would attend by matrix products to return weights.
    """
    subclass = isinstance(module, nn.MultiheadAttention)
    if not subclass or type(module).forward is nn.MultiheadAttention.forward:
        return forward

    @functools.wraps(forward)
    def weightless(*args: Any, **kwargs: Any) -> Any:
        bound = _MULTIHEAD_FORWARD.bind(*args, **kwargs)
        bound.apply_defaults()
        bound.arguments["need_weights"] = False
        return forward(*bound.args, **bound.kwargs)

    return weightless


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
    before, override = _running.overrides, AttentionOverride(settings, given)
    _running.overrides = (*before, override)
    try:
        with override:
            yield
    finally:
        _running.overrides = before


def _refuse_bare_function(frame: Any) -> None:
    """Refuse attention in a checkpointed or autograd function that calls no module.

    Its backward would call no module's forward and so silently attend to this rank's shard alone.
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


def is_pretrained(module: nn.Module) -> bool:
    """Return whether a module is a model of `transformers`, without importing the library."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


def _require_no_labels(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Refuse labels: a model of transformers shifts them within the shard, and takes its mean."""
    if is_pretrained(model) and given.get("labels") is not None:
        raise refusal(
            f"{type(model).__name__} was given labels, which it would shift within this rank's "
            "shard: compute the loss from its logits and the labels of the shard, which are "
            "targets already"
        )


def _require_documents_kept(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Refuse documents that a model would silently join on one rank, but not on several."""
    if given.get("cu_seq_lens_q") is None:
        return
    config = getattr(model, "config", None)
    if not is_pretrained(model) or given.get("use_cache", getattr(config, "use_cache", False)):
        raise refusal(
            f"{type(model).__name__} on one rank would join the documents of cu_seq_lens_q: call "
            "a model of transformers with use_cache=False and position_ids that restart, or run "
            "it within ShardedSequences.inside"
        )
