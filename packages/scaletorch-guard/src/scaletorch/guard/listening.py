"""Hearing of this process's calls as the ledger writes them, whether or not the guard is on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from ..dist import group_ranks
from ..dist.building import Guard, install_guard, name_ranks
from .calls import call_site, collective_texts, group_label, message_label, message_text

Heard = Callable[[str], object]

_lock = threading.Lock()
_recorder: Guard | None = None  # of the guard that is on
_listeners: tuple[Heard, ...] = ()


class Ears:
    """Stands at the port while somebody listens, before the guard's recorder if there is one."""

    def __init__(self, recorder: Guard | None, listeners: Sequence[Heard]) -> None:
        self._recorder, self._listeners = recorder, listeners

    def record(self, group: ProcessGroup, call: str, facts: Sequence[Any]) -> object:
        """Tell of a collective, once the guard has let it pass."""
        note = None if self._recorder is None else self._recorder.record(group, call, facts)
        where = f"{group_label(group)} ({name_ranks(group_ranks(group))})"
        self._tell(where, collective_texts(call, facts)[1])
        return note

    def record_message(
        self, group: ProcessGroup, data: Tensor, peer: int, tag: int, sends: bool
    ) -> object:
        """Tell of one end of a message."""
        note = None
        if self._recorder is not None:
            note = self._recorder.record_message(group, data, peer, tag, sends)
        self._tell(message_label(group, peer, tag, sends), message_text(data, peer, sends))
        return note

    def run(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Make the backend's call as it would be made if nobody listened."""
        if self._recorder is None:
            return call(*args, **options)
        return self._recorder.run(call, *args, **options)

    def run_noted(
        self, notes: Sequence[object], call: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        """Make the backend's call for these notes."""
        if self._recorder is None:
            return call(*args, **options)
        return self._recorder.run_noted(notes, call, *args, **options)

    def tell(self, error: BaseException) -> bool:
        """Tell all ranks of an exception if the guard is on."""
        return self._recorder is not None and self._recorder.tell(error)

    def _tell(self, where: str, text: str) -> None:
        site = call_site()[0].decode(errors="replace")
        for heard in self._listeners:
            heard(f"{where}: {text} at {site}")


@contextlib.contextmanager
def listening(heard: Callable[[str], object]) -> Iterator[None]:
    """Hear of every collective and message that this process makes through scaletorch in a block.

    The guard may be on or off, and may start and stop meanwhile; a call that it refuses is not
    heard of. Calls that go to torch.distributed directly are not, nor are those of one process.
    Blocks may be nested: all hear.

    Args:
        heard: Is given one text a call, before the call is made or started, on the thread that
            makes it: the group's name and ranks, the call with dtypes, shapes and operation, and
            the line that made it. It makes no calls itself. What it raises, the call raises.

    Example:
        >>> with guard.listening(print):
        ...     dist.all_reduce(torch.ones(3))
        the default group (ranks 0, 1): all_reduce(float32[3], sum) at job/train.py:12 in step
    """

    def hears(text: str) -> object:  # of this block alone, if one function hears in two
        return heard(text)

    _change(lambda listeners: (*listeners, hears))
    try:
        yield
    finally:
        _change(lambda listeners: tuple(each for each in listeners if each is not hears))


def put_recorder(recorder: Guard | None) -> None:
    """Let a guard's recorder take the calls, or none, whoever listens beside it."""
    global _recorder
    with _lock:
        _recorder = recorder
        _stand()


def forget_in_fork() -> None:
    """Take the recorder away in a fork of this process, whose other threads may have the lock."""
    global _lock
    _lock = threading.Lock()
    put_recorder(None)


def _change(change: Callable[[tuple[Heard, ...]], tuple[Heard, ...]]) -> None:
    global _listeners
    with _lock:
        _listeners = change(_listeners)
        _stand()


def _stand() -> None:
    install_guard(Ears(_recorder, _listeners) if _listeners else _recorder)
