"""Modules that pass a state along the sequence: short convolutions, recurrences, linear attention.

Attention reaches the positions of other ranks by their keys and values. Such a module would need
the state of the rank before it, and each kind of module has another state. But it computes each row
of a batch from that row alone. So an all-to-all around it exchanges positions for rows: each rank
runs the module unchanged on whole sequences of its share of the rows, and a second all-to-all
brings the results back. With fewer rows than ranks, some ranks compute rows that are not used.
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
from ..layouts import layout_for_shards
from .override import is_pretrained, running_override, unbound_forward
from .settings import Settings, refusal, settings_of

# Classes of transformers that pass a state along without a depthwise convolution.
_WITHOUT_CONVOLUTION = (
    "MiniMaxLightningAttention", "RwkvFeedForward", "RwkvSelfAttention", "xLSTMLayer",
)  # fmt: skip


def find_whole(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules of transformers that pass a state along the sequence."""
    found: dict[nn.Module, None] = {}
    for pretrained in filter(is_pretrained, model.modules()):
        found.update(dict.fromkeys(filter(_passes_state, pretrained.modules())))
    within = {inner for outer in found for inner in outer.modules() if inner is not outer}
    return [module for module in found if module not in within]


def _passes_state(module: nn.Module) -> bool:
    """Return whether a module has a depthwise convolution as a child, or a known class."""
    if type(module).__name__ in _WITHOUT_CONVOLUTION:
        return True
    convolutions = (child for child in module.children() if isinstance(child, nn.Conv1d))
    return any(each.groups == each.in_channels > 1 for each in convolutions)


def keep_whole(modules: list[nn.Module]) -> None:
    """Run modules of a context-parallel model on whole sequences, in place."""
    for module in modules:
        module.forward = MethodType(_on_whole_sequences(unbound_forward(module)), module)


def _on_whole_sequences(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module's forward that exchanges positions for rows while attention is sharded."""

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        settings, run = settings_of(self), functools.partial(inner, self)
        if settings is None or not settings.active:
            return run(*args, **kwargs)
        override = running_override(settings)
        calls.count += 1  # it counts as attention
        hidden = _hidden_states(self, args, kwargs)
        _refuse_documents(self, settings, {} if override is None else override.given)
        if settings.ring.size == 1:
            return run(*args, **kwargs)
        exchange = exchange_for(settings, hidden)
        args, kwargs = map_tensors(exchange.to_rows, (args, kwargs))
        return map_tensors(exchange.to_positions, run(*args, **kwargs))

    return forward


@dataclass(frozen=True, slots=True)
class Exchange:
    """The exchange of positions for rows, and back."""

    ring: Ring
    rows: int  # of the batch
    length: int  # positions of a rank's shard
    order: Tensor  # the positions of all ranks' shards in rank order, on the hidden states' device
    places: Tensor  # the index in `order` of each position

    def to_rows(self, x: Tensor) -> Tensor:
        """Exchange this rank's positions of all rows for all positions of this rank's rows.

        `x` is [rows, length, ...], or [1, length, ...] for all rows; other tensors are returned.
        """
        if x.ndim < 2 or x.shape[1] != self.length or x.shape[0] not in (1, self.rows):
            return x
        x = x.expand(self.rows, *x.shape[1:])
        extra = -self.rows % self.ring.size
        if extra:  # copies of a row, since norms may make NaN from zeros
            x = torch.cat([x, x[-1:].expand(extra, *x.shape[1:])])
        whole = functional.all_to_all(x.contiguous(), 0, 1, self.ring.group)
        return whole.index_select(1, self.places)

    def to_positions(self, x: Tensor) -> Tensor:
        """Exchange results of this rank's rows for results of this rank's positions."""
        rows = -(-self.rows // self.ring.size)
        if x.shape[:2] != (rows, self.order.numel()):
            return torch.full_like(x, float("nan"))  # a final state, of other rows
        shards = x.index_select(1, self.order)
        return functional.all_to_all(shards, 1, 0, self.ring.group).narrow(0, 0, self.rows)


def exchange_for(settings: Settings, hidden: Tensor) -> Exchange:
    """Return the exchange for a rank's hidden states [B, L, H]."""
    ring, (rows, length) = settings.ring, hidden.shape[:2]
    layout = settings.layout if settings.batch is None else settings.batch.layout
    layout = layout_for_shards(layout, length, None, ring.size)
    order = torch.cat([layout.positions(rank, hidden.device) for rank in range(ring.size)])
    return Exchange(ring, rows, length, order, order.argsort())


def _hidden_states(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the hidden states [B, L, ...] that a module is called with."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 3:
            return value
    raise refusal(f"{type(module).__name__} was called without hidden states [B, L, H]")


def _refuse_documents(module: nn.Module, settings: Settings, given: Mapping[str, Any]) -> None:
    """Refuse a batch of several documents, which the module would join."""
    several = settings.batch is not None and len(settings.batch.documents) > 2
    if several or given.get("cu_seq_lens_q") is not None:
        raise refusal(
            f"{type(module).__name__} passes a state along the sequence, and would pass it from "
            "one packed document to the next: give each document a row of its own"
        )
