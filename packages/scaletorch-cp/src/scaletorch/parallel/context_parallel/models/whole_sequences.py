"""Modules that pass a state along the sequence: convolutions, recurrences, linear attention.

Attention meets the positions of other ranks by their keys and values. Such a module would have to
be given a state, and each kind has another. But it computes each row of a batch from that row
alone: so around it rows change places with positions, by an all-to-all, and each rank runs the
module as it is, on whole sequences of its share of the rows. A second one brings back what it made.

With fewer rows than ranks some compute rows that nobody asked for. A layer's time is that of
ceil(rows / ranks) whole sequences then: no longer than a state that is passed from rank to rank,
and no shorter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ....dist import functional
from ..alone import alone, weigh_alone
from ..cp_comms import Ring
from ..layouts.layout import layout_of_shards
from .calls import is_pretrained
from .override import running_override, unbound
from .settings import Settings, refusal, settings_of

# Classes of transformers, beside those that have a convolution.
_WITHOUT_CONVOLUTION = (
    "MiniMaxLightningAttention", "RwkvFeedForward", "RwkvSelfAttention", "xLSTMLayer",
)  # fmt: skip


def find_whole(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that pass a state along the sequence, the outermost ones.

    They are known in models of transformers alone; in others they are found when the model is
    asked whether it mixes positions, and refused.
    """
    found: dict[nn.Module, None] = {}
    for part in filter(is_pretrained, model.modules()):
        found.update(dict.fromkeys(filter(_passes_state, part.modules())))
    within = {inner for outer in found for inner in outer.modules() if inner is not outer}
    return [module for module in found if module not in within]


def _passes_state(module: nn.Module) -> bool:
    """Return whether a module has a convolution of its own, or is known by its class."""
    convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
    return convolves or type(module).__name__ in _WITHOUT_CONVOLUTION


def keep_whole(modules: list[nn.Module]) -> None:
    """Let modules of a context-parallel model see whole sequences, in place."""
    for module in modules:
        own = module.__dict__.get("forward")
        inner = type(module).forward if own is None else unbound(own)
        module.forward = MethodType(_on_whole_sequences(inner), module)


def _on_whole_sequences(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        settings = settings_of(self)
        if settings is None or not settings.active:
            return inner(self, *args, **kwargs)
        override = running_override(settings)
        if override is not None:
            override.calls += 1  # this sees whole sequences, as attention does
        shape = _shape_of(self, args, kwargs)
        if alone() is not None:
            return _each_alone(functools.partial(inner, self), args, kwargs, shape)
        _refuse_documents(self, settings, {} if override is None else override.given)
        if settings.ring.size == 1:
            return inner(self, *args, **kwargs)
        exchange = _exchange(settings, shape)
        args, kwargs = _mapped(exchange.to_rows, (args, kwargs))
        back = functools.partial(exchange.to_positions, type(self).__name__)
        return _mapped(back, inner(self, *args, **kwargs))

    return forward


@dataclass(frozen=True, slots=True)
class Exchange:
    """Rows for positions, and back.

    Attributes:
        ring: The ranks.
        rows: Of the batch.
        length: Positions of a rank's shard.
        joined: The positions of all ranks' shards, put together in rank order.
    """

    ring: Ring
    rows: int
    length: int
    joined: Tensor

    def to_rows(self, x: Any) -> Any:
        """Return whole sequences of this rank's rows for a shard of those of all rows.

        Args:
            x: [rows, length, ...], or [1, length, ...] for all rows; anything else comes back.
        """
        if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[1] != self.length:
            return x
        if x.shape[0] not in (1, self.rows) or x.dtype == torch.bool:
            return x
        x = x.expand(self.rows, *x.shape[1:])
        extra = -self.rows % self.ring.size
        if extra:  # any rows will do, but no zeros, of which norms may make NaN
            x = torch.cat([x, x[-1:].expand(extra, *x.shape[1:])])
        whole = functional.all_to_all(x.contiguous(), 0, 1, self.ring.group)
        return whole.index_select(1, self.joined.argsort())

    def to_positions(self, name: str, x: Any) -> Any:
        """Return this rank's shard of what all ranks made of their rows."""
        if not isinstance(x, Tensor):
            return x
        own = -(-self.rows // self.ring.size)
        if x.shape[:2] != (own, self.joined.numel()):
            return _lost(x, name)
        shards = x.index_select(1, self.joined)
        return functional.all_to_all(shards, 1, 0, self.ring.group)[: self.rows]


def _exchange(settings: Settings, shape: tuple[int, int]) -> Exchange:
    """Return the exchange for a rank's shard [B, L] of a batch."""
    ring, (rows, length) = settings.ring, shape
    told = settings.told
    layout = layout_of_shards(
        settings.layout if told is None else told.layout, length, None, ring.size
    )
    joined = torch.cat([layout.positions(rank) for rank in range(ring.size)])
    return Exchange(ring, rows, length, joined)


def _shape_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[int, int]:
    """Return [B, L] of the hidden states that a module is called with."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 3:
            return value.shape[0], value.shape[1]
    raise refusal(f"{type(module).__name__} was called without hidden states [B, L, H]")


def _refuse_documents(module: nn.Module, settings: Settings, given: Mapping[str, Any]) -> None:
    """Refuse a batch of several documents, which the module would join.

    Raises:
        InvalidArgumentError: It is one.
    """
    told = settings.told is not None and len(settings.told.documents) > 2
    if told or given.get("cu_seq_lens_q") is not None:
        raise refusal(
            f"{type(module).__name__} passes a state along the sequence, and would pass it from "
            "one packed document to the next: give each document a row of its own"
        )


def _each_alone(
    inner: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    shape: tuple[int, int],
) -> Any:
    """Return outputs of the right shape, each position made of its own hidden state alone."""
    first = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim >= 3)

    def one(x: Any) -> Any:
        fits = isinstance(x, Tensor) and x.ndim >= 2 and x.shape[1] == shape[1]
        return x[:1, :1] if fits else x

    def for_all(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.shape[:2] != (1, 1):
            return x
        return weigh_alone(first.flatten(2), torch.ones_like(x).expand(*shape, *x.shape[2:]))

    args, kwargs = _mapped(one, (args, kwargs))
    return _mapped(for_all, inner(*args, **kwargs))


def _lost(x: Tensor, name: str) -> Tensor:
    """Return NaN for a state at the sequences' end: this rank has that of other rows than its own.

    Raises:
        InvalidArgumentError: Integers have no NaN.
    """
    if not x.is_floating_point():
        raise refusal(f"{name} returns {x.dtype} {list(x.shape)} beside its hidden states")
    return torch.full_like(x, float("nan"))


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return arguments, or a result, with all that is no container changed."""
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_mapped(change, each) for each in value)
    if type(value) is list:
        return [_mapped(change, each) for each in value]
    if type(value) is dict:
        return {name: _mapped(change, each) for name, each in value.items()}
    return change(value)
