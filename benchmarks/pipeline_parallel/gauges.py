"""Live graphs of a pipeline step, and the simulation of its timeline."""

from __future__ import annotations

import statistics
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from scaletorch.parallel.pipeline_parallel import Costs, Timeline, simulate

FIELDS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


class _Kept:
    """A tensor that a graph keeps for its backward."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class LiveGraphs:
    """Counts forwards of layers, one for each micro-batch, whose graph keeps any tensor."""

    def __init__(self) -> None:
        self.most = 0
        self._kept: dict[int, int] = defaultdict(int)  # kept tensors by forward
        self._forwards = 0

    @contextmanager
    def watching(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Count the forwards of these layers."""
        with ExitStack() as hooks:
            for layer in layers:
                hooks.enter_context(self._watching(layer))
            yield

    @contextmanager
    def _watching(self, layer: nn.Module) -> Iterator[None]:
        open_hooks: list[Any] = []

        def before(module: nn.Module, args: Any) -> None:
            open_hooks.append(torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack))
            self._forwards += 1
            open_hooks[-1].__enter__()

        def after(module: nn.Module, args: Any, output: Any) -> None:
            open_hooks.pop().__exit__()

        handles = layer.register_forward_pre_hook(before), layer.register_forward_hook(after)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _pack(self, tensor: Tensor) -> _Kept:
        kept, forward = _Kept(tensor.detach()), self._forwards
        self._kept[forward] += 1
        self.most = max(self.most, len(self._kept))
        weakref.finalize(kept, self._release, forward)
        return kept

    def _release(self, forward: int) -> None:
        self._kept[forward] -= 1
        if not self._kept[forward]:
            del self._kept[forward]


def _unpack(kept: _Kept) -> Tensor:
    return kept.tensor


def live_graphs(step: Callable[[], object], layers: Sequence[nn.Module]) -> int:
    """Return the largest number of forwards of `layers` whose graphs are alive at a time."""
    graphs = LiveGraphs()
    with graphs.watching(layers):
        step()
    return graphs.most


def predicted(timeline: Timeline, latency: float) -> Timeline:
    """Return the simulated timeline of a step, from its schedule and mean times of actions.

    Args:
        timeline: Timeline of the step, in seconds.
        latency: Seconds of a message.
    """
    times = defaultdict(list)
    for span in timeline.spans:
        times[FIELDS[span.action.kind]].append(span.end - span.start)
    means: dict[str, Any] = {name: statistics.mean(seconds) for name, seconds in times.items()}
    return simulate(timeline.schedule, Costs(message=latency, **means))
