"""Parallel regions: modules whose column-parallel layers share one input.

Query, key and value projections share one input, and so do gate and up projections. Autograd first
adds the gradients of these layers, so that one sum over the ranks is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...pg_manager.building import around_compiled, uncompiled
from ...placement import Invariant, Replicate, convert
from .hidden_states import convert_hidden
from .overlap import Entrance
from .sequence_shares import SequenceShares, shapes_explained
from .surround import Surrounded, own_class

T = TypeVar("T")

ADAPTED = "base_layer"  # an adapter's attribute for the layer that it wraps


@dataclass(slots=True)
class _Running:
    """A region whose forward is running.

    Attributes:
        overlapping: Its layers that compute weight gradients during the sum of input gradients.
        entries: Each input that entered, with the tensor or `Entrance` that it became.
        gathered: The `Entrance` of the gathered sequence under sequence parallelism.
    """

    overlapping: Sequence[Any]
    entries: dict[Any, tuple[Tensor, Any]] = field(default_factory=dict)
    gathered: Entrance | None = None

    def once(self, x: Tensor, call: Callable[..., T], *args: Any) -> T:
        """Return `call(x, *args)`, computed once for all layers with the input `x`."""
        # An input changed in place, or used again under no_grad, counts as a new one. The entry
        # keeps `x` alive, so that no other tensor can get its id while the region runs.
        key = call, id(x), x._version, torch.is_grad_enabled()
        if key not in self.entries:
            self.entries[key] = x, call(x, *args)
        entered: T = self.entries[key][1]
        return entered


# The running region; None outside regions.
_running: ContextVar[_Running | None] = ContextVar("_running", default=None)


@uncompiled
def enter(x: Tensor, group: ProcessGroup | None, sequence: SequenceShares | None = None) -> Tensor:
    """Return the full input for this rank's shards; backward sums its gradient over the ranks.

    Args:
        x: A replicated tensor; under sequence parallelism a sequence shard, or the sequence that a
            `Region` gathered.
        group: Ranks of the tensor-parallel axis.
        sequence: The sharding of sequences; None without sequence parallelism.
    """
    running = _running.get()
    if sequence is not None:  # a region gathers before its forward, and sums there in backward
        return sequence.enter(x) if running is None else sequence.require_whole(x)
    return _copy(x, group) if running is None else running.once(x, _copy, group)


def _copy(x: Tensor, group: ProcessGroup | None) -> Tensor:
    return convert(x, Invariant(), Replicate(), group)


@uncompiled
def overlapped_linear(layer: Any, x: Tensor) -> Tensor | None:
    """Return a column-parallel layer's output [..., out / tp] that overlaps in backward, or None.

    It is None if nothing can overlap: the input needs no gradient or is not the region's input.
    """
    if not _needs_grad(x):
        return None
    running = _running.get()
    if layer.sequence is not None and layer.sequence.in_rows(x, layer.sequence.own):
        return None
    if running is None:
        entrance: Entrance | None = _entrance(x, [layer])
    elif layer not in running.overlapping:  # a layer of another module, called from this region
        entrance = None
    elif layer.sequence is not None:
        # The region gathered one tensor; a layer with another input cannot overlap.
        entrance = running.gathered if running.gathered and running.gathered.x is x else None
    else:
        entrance = running.once(x, _entrance, running.overlapping)
    return None if entrance is None else entrance.linear(layer)


@contextmanager
@around_compiled
def in_region(overlapping: Sequence[Any] = ()) -> Iterator[_Running]:
    """Run the body as a region with the given overlapping layers."""
    running = _Running(overlapping)
    token = _running.set(running)
    try:
        yield running
    finally:
        _running.reset(token)


class Region(Surrounded):
    """A module with column-parallel children, whose common input enters once.

    Under sequence parallelism its hidden states are this rank's shard and are gathered before its
    own forward, because modules read sizes from their input. The hidden states are the first
    floating-point argument of a width that the column-parallel children take.
    """

    _sequence: SequenceShares | None = None

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        children = [layer_of(each) for each in self._modules.values()]
        overlapping = [each for each in children if getattr(each, "async_all_reduce", False)]
        with in_region(overlapping) as running:
            if self._sequence is None:
                return super().forward(*args, **kwargs)
            columns = [each for each in children if hasattr(each, "gather_output")]
            # Widths distinguish hidden states from masks and positions.
            widths = {int(getattr(each, "in_features", 0)) for each in columns}
            gather = partial(_gather, running, self._sequence)
            args, kwargs, _ = convert_hidden(
                self, self._sequence, gather, args, kwargs, widths=widths
            )
            with shapes_explained(own_class(self).__name__, self._sequence):
                return super().forward(*args, **kwargs)


def summed_outside(model: nn.Module) -> Iterator[str]:
    """Yield the names of layers whose input gradient is only this rank's term of a sum.

    Their region gathered the input sequence and sums the gradient in its own backward.
    """
    for name, module in model.named_modules():
        if isinstance(module, Region) and module._sequence is not None:
            for own, child in module.named_children():
                if hasattr(layer_of(child), "gather_output"):
                    yield f"{name}.{own}".lstrip(".")


def layer_of(module: Any) -> Any:
    """Return a child, or the layer inside if it is an adapter, even a nested one."""
    while module is not None and ADAPTED in module._modules:
        module = module._modules[ADAPTED]
    return module


@uncompiled
def _gather(running: _Running, sequence: SequenceShares, x: Tensor) -> Tensor:
    """Return the gathered sequence; set up an `Entrance` if there are overlapping layers."""
    if not running.overlapping or not _needs_grad(x) or sequence.in_rows(x, sequence.own):
        return sequence.enter(x)
    running.gathered = _entrance(x, running.overlapping)
    return running.gathered.x


def _entrance(x: Tensor, layers: Sequence[Any]) -> Entrance:
    """Return the `Entrance` of `x` for column-parallel layers of one group."""
    first = layers[0]
    sizes = None if first.sequence is None else first.sequence.sizes(x)
    return Entrance(x, {layer: layer.operands() for layer in layers}, first.group, sizes)


def _needs_grad(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad
