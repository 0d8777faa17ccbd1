"""Parallel regions: modules whose sharded layers take one input, which enters once.

Query, key and value projections share one input, and so do the gate and the up projection: its
gradient is summed over the ranks once, after the layers' shares have been added.
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

ADAPTED = "base_layer"  # what an adapter that stands in a layer's place calls it


@dataclass(slots=True)
class _Running:
    """A module whose forward is running.

    Attributes:
        overlapping: Its layers whose weights' gradients are computed while the inputs' travel.
        entries: Each input that entered, and the tensor or entrance that it became.
        gathered: The entrance of the sequence, with sequence parallelism.
    """

    overlapping: Sequence[Any]
    entries: dict[Any, tuple[Tensor, Any]] = field(default_factory=dict)
    gathered: Entrance | None = None

    def once(self, x: Tensor, call: Callable[..., T], *args: Any) -> T:
        """Return `call(x, *args)`, made for the first layer that takes in `x`."""
        # An input changed in place, or seen again under no_grad, is another one. The entry keeps
        # `x` alive, so that no other tensor can get its id while the region runs.
        key = call, id(x), x._version, torch.is_grad_enabled()
        if key not in self.entries:
            self.entries[key] = x, call(x, *args)
        entered: T = self.entries[key][1]
        return entered


# The `Region` that runs; None outside of any.
_running: ContextVar[_Running | None] = ContextVar("_running", default=None)


@uncompiled
def enter(x: Tensor, group: ProcessGroup | None, sequence: SequenceShares | None = None) -> Tensor:
    """Return the whole `x` for this rank's shards; in backward its gradient is summed.

    Args:
        x: What every rank has; or a share of a sequence, or what a `Region` made of it.
        group: Ranks of the tensor-parallel axis.
        sequence: How sequences are shared out; None if every rank has the whole.
    """
    running = _running.get()
    if sequence is not None:  # a region gathers at its beginning, and sums there in backward
        return sequence.enter(x) if running is None else sequence.require_whole(x)
    return _copy(x, group) if running is None else running.once(x, _copy, group)


def _copy(x: Tensor, group: ProcessGroup | None) -> Tensor:
    return convert(x, Invariant(), Replicate(), group)


@uncompiled
def overlapped_linear(layer: Any, x: Tensor) -> Tensor | None:
    """Return a column-parallel layer's output [..., out / tp], made to overlap in backward.

    None if its input is not what entered, or needs no gradient: there is nothing to overlap.
    """
    if not _needs_grad(x):
        return None
    running = _running.get()
    if layer.sequence is not None and layer.sequence.in_rows(x, layer.sequence.own):
        return None
    if running is None:
        entrance: Entrance | None = _entrance(x, [layer])
    elif layer not in running.overlapping:  # another module's, called from here
        entrance = None
    elif layer.sequence is not None:
        # The region gathered one tensor; a layer called with another has nothing to overlap with.
        entrance = running.gathered if running.gathered and running.gathered.x is x else None
    else:
        entrance = running.once(x, _entrance, running.overlapping)
    return None if entrance is None else entrance.linear(layer)


@contextmanager
@around_compiled
def in_region(overlapping: Sequence[Any] = ()) -> Iterator[_Running]:
    """Run the body in a region, which the caller enters and leaves, with layers that overlap."""
    running = _Running(overlapping)
    token = _running.set(running)
    try:
        yield running
    finally:
        _running.reset(token)


class Region(Surrounded):
    """A module that holds column-parallel layers: what they take enters once.

    With sequence parallelism the hidden states are this rank's share, and are gathered before the
    module sees them: modules take sizes from their input. They are the first floating tensor that
    its column-parallel layers can take in.
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
            # Widths tell the hidden states from a mask or from positions.
            widths = {int(getattr(each, "in_features", 0)) for each in columns}
            gather = partial(_gather, running, self._sequence)
            args, kwargs, _ = convert_hidden(
                self, self._sequence, gather, args, kwargs, widths=widths
            )
            with shapes_explained(own_class(self).__name__, self._sequence):
                return super().forward(*args, **kwargs)


def summed_outside(model: nn.Module) -> Iterator[str]:
    """Yield the layers whose input's gradient is this rank's term of a sum, by name.

    They take a sequence that the region they lie in has gathered, and sums in backward.
    """
    for name, module in model.named_modules():
        if isinstance(module, Region) and module._sequence is not None:
            for own, child in module.named_children():
                if hasattr(layer_of(child), "gather_output"):
                    yield f"{name}.{own}".lstrip(".")


def layer_of(module: Any) -> Any:
    """Return a child, or the layer within it if it is an adapter, also one around another."""
    while module is not None and ADAPTED in module._modules:
        module = module._modules[ADAPTED]
    return module


@uncompiled
def _gather(running: _Running, sequence: SequenceShares, x: Tensor) -> Tensor:
    """Return the whole sequence, entered for the overlapping layers if there are any."""
    if not running.overlapping or not _needs_grad(x) or sequence.in_rows(x, sequence.own):
        return sequence.enter(x)
    running.gathered = _entrance(x, running.overlapping)
    return running.gathered.x


def _entrance(x: Tensor, layers: Sequence[Any]) -> Entrance:
    """Let `x` enter for column-parallel layers of one group."""
    first = layers[0]
    sizes = None if first.sequence is None else first.sequence.sizes(x)
    return Entrance(x, {layer: layer.operands() for layer in layers}, first.group, sizes)


def _needs_grad(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad
