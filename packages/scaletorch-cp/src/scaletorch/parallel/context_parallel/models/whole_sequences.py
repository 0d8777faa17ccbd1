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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....dist import functional
from ....dist.building import map_tensors
from ..alone import alone, weigh_alone
from ..cp_comms import Ring
from ..layouts.layout import Layout, layout_of_shards
from .calls import is_pretrained
from .settings import Settings, refusal
from .taking_over import Call, take_over

# Classes of transformers, beside those that have a depthwise convolution.
_WITHOUT_CONVOLUTION = (
    "MiniMaxLightningAttention", "RwkvFeedForward", "RwkvSelfAttention", "xLSTMLayer",
)  # fmt: skip


def find_whole(model: nn.Module, seeing: Iterable[nn.Module] = ()) -> list[nn.Module]:
    """Return the modules of a model that pass a state along the sequence, the outermost ones.

    Without those in modules that see whole sequences already (`seeing`).

    They are known in models of transformers alone; in others they are found when the model is
    asked whether it mixes positions, and refused.
    """
    found: dict[nn.Module, None] = {}
    for part in filter(is_pretrained, model.modules()):
        found.update(dict.fromkeys(filter(_passes_state, part.modules())))
    within = {inner for outer in found for inner in outer.modules() if inner is not outer}
    within.update(inner for outer in seeing for inner in outer.modules())
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
        take_over(module, _on_whole_sequences)


def _on_whole_sequences(call: Call) -> Any:
    hidden = hidden_states(call.module, call.args, call.kwargs)
    if alone() is not None:
        return _each_alone(call.inner, call.args, call.kwargs, hidden)
    _refuse_documents(call.module, call.settings, call.given)
    if call.settings.ring.size == 1:
        return call.inner(*call.args, **call.kwargs)
    exchange = exchange_for(call.settings, hidden)
    args, kwargs = map_tensors(exchange.to_rows, (call.args, call.kwargs))
    back = functools.partial(exchange.to_positions, type(call.module).__name__)
    return map_tensors(back, call.inner(*args, **kwargs))


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
            return lost(x, name)
        shards = x.index_select(1, self.order)
        return functional.all_to_all(shards, 1, 0, self.ring.group).narrow(0, 0, self.rows)


def padded(x: Tensor, exchange: Exchange) -> Tensor:
    """Return whole sequences [rows, length, ...] with zeros for the padding of their layout."""
    missing = exchange.order.numel() - x.shape[1]
    if not missing:
        return x
    return torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], 1)


def layout_for(settings: Settings, length: int) -> Layout:
    """Return the layout of a model's shards of `length` positions."""
    told = settings.told
    layout = settings.layout if told is None else told.layout
    return layout_of_shards(layout, length, None, settings.ring.size)


def exchange_for(settings: Settings, hidden: Tensor) -> Exchange:
    """Return the exchange for a rank's hidden states [B, L, H]."""
    ring, (rows, length) = settings.ring, hidden.shape[:2]
    layout = layout_for(settings, length)
    order = torch.cat([layout.positions(rank, hidden.device) for rank in range(ring.size)])
    return Exchange(ring, rows, length, order, order.argsort())


def hidden_states(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the hidden states [B, L, ...] that a module is called with.

    Raises:
        InvalidArgumentError: There are none.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 3:
            return value
    raise refusal(f"{type(module).__name__} was called without hidden states [B, L, H]")


def has_documents(settings: Settings, given: Mapping[str, Any]) -> bool:
    """Return whether a batch is told to be of several documents."""
    told = settings.told is not None and len(settings.told.documents) > 2
    return told or given.get("cu_seq_lens_q") is not None


def _refuse_documents(module: nn.Module, settings: Settings, given: Mapping[str, Any]) -> None:
    """Refuse a batch of several documents, which the module would join.

    Raises:
        InvalidArgumentError: It is one.
    """
    if has_documents(settings, given):
        raise refusal(
            f"{type(module).__name__} passes a state along the sequence, and would pass it from "
            "one packed document to the next: give each document a row of its own"
        )


def _each_alone(
    inner: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], hidden: Tensor
) -> Any:
    """Return outputs of the right shape, each position made of its own hidden state alone."""
    shape = hidden.shape[:2]

    def one(x: Tensor) -> Tensor:
        return x[:1, :1] if x.ndim >= 2 and x.shape[1] == shape[1] else x

    def for_all(x: Tensor) -> Tensor:
        if x.shape[:2] != (1, 1):
            return x
        return weigh_alone(hidden.flatten(2), torch.ones_like(x).expand(*shape, *x.shape[2:]))

    args, kwargs = map_tensors(one, (args, kwargs))
    return map_tensors(for_all, inner(*args, **kwargs))


def lost(x: Tensor, name: str) -> Tensor:
    """Return NaN for a state at the sequences' end: this rank has that of other rows than its own.

    Raises:
        InvalidArgumentError: Integers have no NaN.
    """
    if not x.is_floating_point():
        raise refusal(f"{name} returns {x.dtype} {list(x.shape)} beside its hidden states")
    return torch.full_like(x, float("nan"))
