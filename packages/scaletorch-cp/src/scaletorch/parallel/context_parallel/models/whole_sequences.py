"""Modules that pass a state along the sequence: short convolutions, recurrences, linear attention.

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
from ....dist.building import map_tensors
from ..attention import calls
from ..cp_comms import Ring
from ..layouts.layout import layout_of_shards
from .calls import is_pretrained
from .override import own_forward, running_override
from .settings import Settings, refusal, settings_of

# Classes of transformers, beside those that have a depthwise convolution.
_WITHOUT_CONVOLUTION = (
    "MiniMaxLightningAttention", "RwkvFeedForward", "RwkvSelfAttention", "xLSTMLayer",
)  # fmt: skip


def find_whole(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that pass a state along the sequence, the outermost ones.

    They are known in models of transformers alone.
    """
    found: dict[nn.Module, None] = {}
    for part in filter(is_pretrained, model.modules()):
        found.update(dict.fromkeys(filter(_passes_state, part.modules())))
    within = {inner for outer in found for inner in outer.modules() if inner is not outer}
    return [module for module in found if module not in within]


def _passes_state(module: nn.Module) -> bool:
    """Return whether a module has a depthwise convolution of its own, or is known by its class.

    Other convolutions make hidden states of what comes in other shapes, as the front of an encoder
    of speech does: those are left alone, and refused with the model.
    """
    if type(module).__name__ in _WITHOUT_CONVOLUTION:
        return True
    convolutions = (child for child in module.children() if isinstance(child, nn.Conv1d))
    return any(each.groups == each.in_channels > 1 for each in convolutions)


def keep_whole(modules: list[nn.Module]) -> None:
    """Let modules of a context-parallel model see whole sequences, in place."""
    for module in modules:
        module.forward = MethodType(_on_whole_sequences(own_forward(module)), module)


def _on_whole_sequences(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module's forward on whole sequences while attention is over shards."""

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        settings, run = settings_of(self), functools.partial(inner, self)
        if settings is None or not settings.active:
            return run(*args, **kwargs)
        override = running_override(settings)
        calls.made += 1  # it counts as attention
        hidden = _hidden_states(self, args, kwargs)
        _refuse_documents(self, settings, {} if override is None else override.given)
        if settings.ring.size == 1:
            return run(*args, **kwargs)
        exchange = exchange_for(settings, hidden)
        args, kwargs = map_tensors(exchange.to_rows, (args, kwargs))
        back = functools.partial(exchange.to_positions, type(self).__name__)
        return map_tensors(back, run(*args, **kwargs))

    return forward


@dataclass(frozen=True, slots=True)
class Exchange:
    """Rows for positions, and back.

    Attributes:
        ring: The ranks.
        rows: Of the batch.
        length: Positions of a rank's shard.
        order: The positions of all ranks' shards in rank order, on the hidden states' device.
        places: Where in that order each position is.
    """

    ring: Ring
    rows: int
    length: int
    order: Tensor
    places: Tensor

    def to_rows(self, x: Tensor) -> Tensor:
        """Return whole sequences of this rank's rows for a shard of those of all rows.

        Args:
            x: [rows, length, ...], or [1, length, ...] for all rows; anything else comes back.
        """
        if x.ndim < 2 or x.shape[1] != self.length or x.shape[0] not in (1, self.rows):
            return x
        x = x.expand(self.rows, *x.shape[1:])
        extra = -self.rows % self.ring.size
        if extra:  # any rows will do, but no zeros, of which norms may make NaN
            x = torch.cat([x, x[-1:].expand(extra, *x.shape[1:])])
        whole = functional.all_to_all(x.contiguous(), 0, 1, self.ring.group)
        return whole.index_select(1, self.places)

    def to_positions(self, name: str, x: Tensor) -> Tensor:
        """Return this rank's shard of what all ranks made of their rows."""
        own = -(-self.rows // self.ring.size)
        if x.shape[:2] != (own, self.order.numel()):
            if not x.is_floating_point():  # integers have no NaN
                raise refusal(f"{name} returns {x.dtype} {list(x.shape)} beside its hidden states")
            return torch.full_like(x, float("nan"))  # a state at the end, of other rows
        shards = x.index_select(1, self.order)
        return functional.all_to_all(shards, 1, 0, self.ring.group).narrow(0, 0, self.rows)


def exchange_for(settings: Settings, hidden: Tensor) -> Exchange:
    """Return the exchange for a rank's hidden states [B, L, H]."""
    ring, (rows, length) = settings.ring, hidden.shape[:2]
    layout = settings.layout if settings.told is None else settings.told.layout
    layout = layout_of_shards(layout, length, None, ring.size)
    order = torch.cat([layout.positions(rank, hidden.device) for rank in range(ring.size)])
    return Exchange(ring, rows, length, order, order.argsort())


def _hidden_states(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the hidden states [B, L, ...] that a module is called with.

    Raises:
        InvalidArgumentError: There are none.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 3:
            return value
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
