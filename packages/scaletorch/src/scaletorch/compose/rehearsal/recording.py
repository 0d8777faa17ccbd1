"""Record the inputs, outputs and gradients of a model's units during a small step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...dist.building import map_tensors, tensors_in
from ...parallel.pipeline_parallel import PipelineParallel
from ...parallel.pipeline_parallel.building import PassThrough, release, surround
from ..forward import rehearses
from ..plain import HOOKS, is_of_library


@dataclass(slots=True)
class Record:
    """One call of a unit on this rank."""

    input: Tensor | None = None  # the hidden states passed in
    output: Tensor | None = None  # the hidden states returned
    input_gradient: Tensor | None = None  # of `input`, through the unit alone
    output_gradient: Tensor | None = None  # of `output`, from everything that used it
    again: bool = False  # the graph is built in backward, when the unit runs again
    alone: bool = False  # it returned hidden states alone, set nothing and has no users' hooks

    def scale_gradients(self, factor: float) -> None:
        """Multiply gradients that were divided by an estimate of the count."""
        for gradient in (self.input_gradient, self.output_gradient):
            if gradient is not None and factor != 1:
                gradient.mul_(factor)


Records = dict[tuple[str, int], list[Record]]  # unit and stage -> its calls in turn


class Recorder:
    """A recorder of one unit's calls, innermost among the wrappers of these calls."""

    def __init__(self, name: str, pipeline: PipelineParallel, records: Records) -> None:
        self._name, self._pipeline, self._records = name, pipeline, records
        self._open: list[tuple[Record | None, set[Any]]] = []

    def takes_forward(self) -> bool:
        """Return whether to record direct calls of the module's `forward` too."""
        return True

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the input, and its gradient by a hook on a view that only this call uses."""
        x = hidden_of((args, kwargs))
        record = self._record(x) if rehearses() else None
        self._open.append((record, _traces(module)))
        if record is None or x is None or type(x) is not Tensor:
            return args, kwargs
        record.input = x.detach().clone()
        if not (torch.is_grad_enabled() and x.requires_grad):
            return args, kwargs
        view = x.view_as(x)
        view.register_hook(lambda gradient: _note(record, "input_gradient", gradient))
        return map_tensors(lambda tensor: view if tensor is x else tensor, (args, kwargs))

    def after(self, module: nn.Module, output: Any) -> Any:
        """Record the output, and its gradient by a hook on a copy that only the caller uses."""
        (record, traces), y = self._open.pop(), hidden_of(output)
        if record is None or y is None:
            return output
        shaped = output is y and record.input is not None and record.input.shape == y.shape
        hooks = (h for m in module.modules() for kind in HOOKS for h in getattr(m, kind).values())
        record.alone = shaped and _traces(module) <= traces and all(map(is_of_library, hooks))
        if record.output is None:  # keep the first run's: a layer may count its runs
            record.output = y.detach().clone()
        if not (torch.is_grad_enabled() and y.requires_grad):
            return output
        # Uses of `y` within the call must not count. A copy, since the caller may write to its
        # tensor in place, and a view would then lose the hook.
        own = y.clone()
        own.register_hook(lambda gradient: _note(record, "output_gradient", gradient))
        return map_tensors(lambda tensor: own if tensor is y else tensor, output)

    def _record(self, x: Tensor | None) -> Record | None:
        """Return a new record for a call; for a second run in backward, the first's or None.

        Only a checkpoint whose first run has no gradients builds its graph in backward.
        """
        stage = self._pipeline.stages[self._pipeline.runtime.chunks.selected]
        calls = self._records.setdefault((self._name, stage), [])
        if torch._C._current_graph_task_id() == -1:
            calls.append(Record(again=not torch.is_grad_enabled()))
            return calls[-1]
        waiting = [each for each in calls if each.again and each.output_gradient is None]
        return next((each for each in reversed(waiting) if is_same(each.input, x)), None)


@contextmanager
def recorded(pipeline: PipelineParallel, units: Mapping[str, Iterable[str]]) -> Iterator[Records]:
    """Record all calls of units, given with all their names by first name."""
    records: Records = {}
    placed: list[tuple[nn.Module, Recorder]] = []
    modules = dict(pipeline.module.named_modules(remove_duplicate=False))
    try:
        for first, names in units.items():
            found = dict.fromkeys(modules[name] for name in names if name in modules)
            for module in found:
                if not isinstance(module, PassThrough):
                    recorder = Recorder(first, pipeline, records)
                    surround(module, recorder, innermost=True)
                    placed.append((module, recorder))
        yield records
    finally:
        for module, recorder in placed:
            release(module, recorder)


def hidden_of(value: Any) -> Tensor | None:
    """Return the hidden states among a call's arguments, or in its result; None without any.

    They are the first floating tensor of two dims or more, of those with a gradient if any has.
    """
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        args, kwargs = value
        found = hidden_of([*tensors_in(args)])
        return hidden_of([*tensors_in(kwargs)]) if found is None else found
    tensors = [x for x in tensors_in(value) if x.is_floating_point() and x.ndim > 1]
    return next((x for x in tensors if x.requires_grad), next(iter(tensors), None))


def _traces(module: nn.Module) -> set[Any]:
    """Return a fingerprint of modules' attributes that shows what a call set, or added to lists."""
    return {
        (each, name, id(value), len(value) if isinstance(value, list | dict | set) else 0)
        for each in module.modules()
        for name, value in vars(each).items()
    }


def is_same(given: Tensor | None, x: Tensor | None) -> bool:
    """Return whether two calls had equal inputs."""
    return given is not None and x is not None and torch.equal(given, x)


def _note(record: Record, name: str, gradient: Tensor) -> None:
    if getattr(record, name) is None:
        setattr(record, name, gradient.detach().clone())
