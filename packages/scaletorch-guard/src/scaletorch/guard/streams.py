"""Calls that a device's stream has not come past.

NCCL and its like put a call into a stream and return. If another rank never makes that call, the
host waits later and elsewhere: in its next read of the device, a call of torch that no ledger has.
So an event stands behind every call, and the watcher looks for the oldest that is not reached.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Generic, NamedTuple, TypeVar

import torch

KEPT = 256  # calls in the stream that are known; older ones are forgotten

N = TypeVar("N")


class Streamed(NamedTuple, Generic[N]):
    """A call in a stream."""

    number: int  # of the wait for it, see `Wait`
    note: N
    begun: float
    passed: torch.Event


class Streams(Generic[N]):
    """The last calls of this process that are in streams of its device."""

    def __init__(self) -> None:
        self._calls: deque[Streamed[N]] = deque(maxlen=KEPT)
        self._lock = threading.Lock()

    def add(self, number: int, note: N, device: str) -> None:
        """Put an event behind a call that this thread has just made on the current stream."""
        module = torch.get_device_module(device)
        if getattr(module, "is_current_stream_capturing", bool)():
            return  # an event of a graph that is being captured cannot be asked
        passed = torch.Event(device)
        passed.record()
        with self._lock:
            self._calls.append(Streamed(number, note, time.monotonic(), passed))

    def pending(self) -> Streamed[N] | None:
        """Return the oldest call that its stream has not come past."""
        with self._lock:
            while self._calls:
                if not self._calls[0].passed.query():
                    return self._calls[0]
                self._calls.popleft()
        return None
