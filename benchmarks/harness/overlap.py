"""The share of communication that runs behind backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor, nn

from .gauges import METHOD

Span = tuple[float, float]


@dataclass(frozen=True)
class Hidden:
    """Seconds of communication, and those of them behind backward."""

    communication: float
    behind: float


@dataclass
class _Call:
    """A collective: its handle, start and end."""

    work: Any
    start: float
    end: float = 0.0


@dataclass
class _Record:
    """A step's collectives, and when the computing thread called or waited for them."""

    calls: list[_Call] = field(default_factory=list)
    busy: list[Span] = field(default_factory=list)
    backward: float = 0.0  # end of backward

    def begin(self) -> None:
        """Forget finished calls."""
        now = time.perf_counter()
        self.calls = [call for call in self.calls if not call.end]
        for call in self.calls:
            call.start = now
        self.busy = []

    def call(self, method: Any) -> Any:
        """Return a method of groups that records its calls."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            call = _Call(method(*args, **kwargs), start)
            self.calls.append(call)
            self.busy.append((start, time.perf_counter()))
            with suppress(AttributeError, RuntimeError):  # a send ends at its wait
                call.work.get_future().add_done_callback(lambda _: _end(call))
            return call.work

        return wrapper

    def wait(self, method: Any) -> Any:
        """Return a method of handles that records its calls."""

        def wrapper(work: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = method(work, *args, **kwargs)
            self.busy.append((start, time.perf_counter()))
            for call in self.calls:
                if call.work is work and not call.end:
                    _end(call)
            return result

        return wrapper

    def note_backward(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        """Note when the first layer's output has its gradient; only its backward remains."""

        def note(_grad: Tensor) -> None:
            self.backward = time.perf_counter()

        output.register_hook(note)


def _end(call: _Call) -> None:
    call.end = time.perf_counter()


def hidden(run: Callable[[], object], first: nn.Module) -> Hidden:
    """Return the communication of a step's second run, and how much of it is hidden.

    A collective lasts from its call to its completion; overlapping collectives count once. While
    this thread makes a call or waits, nothing is hidden.

    Args:
        run: The step.
        first: The layer whose backward is last.
    """
    record = _Record()
    with _patched(record):
        handle = first.register_forward_hook(record.note_backward)
        dist.barrier()
        run()
        record.begin()  # calls still in flight count for the next step
        run()
        handle.remove()
    now = time.perf_counter()
    spans = [(call.start, call.end or now) for call in record.calls]
    before = list(_until(record.backward, spans)), list(_until(record.backward, record.busy))
    behind = length([*before[0], *before[1]]) - length(before[1])
    return Hidden(length(spans), behind)


def length(spans: list[Span]) -> float:
    """Return the length of the union of spans.

    Example:
        >>> length([(0, 2), (5, 6), (1, 3)])
        4.0
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _until(end: float, spans: list[Span]) -> Iterator[Span]:
    return ((start, min(stop, end)) for start, stop in spans if start < end)


@contextmanager
def _patched(record: _Record) -> Iterator[None]:
    """Record the communication of Python code; DDP's is seen only through its Python hook."""
    names = [name for name in dir(dist.ProcessGroup) if METHOD.search(name)]
    with ExitStack() as stack:
        for name in names:
            method = record.call(getattr(dist.ProcessGroup, name))
            stack.enter_context(mock.patch.object(dist.ProcessGroup, name, method))
        stack.enter_context(mock.patch.object(dist.Work, "wait", record.wait(dist.Work.wait)))
        yield
