"""What a call is to the ledger: a text, a checksum of it, and the line that made it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any
from zlib import crc32

from torch import Tensor
from torch.distributed import ProcessGroup

from ..dist import get_rank, group_ranks
from ..dist.building import Guard, describe, install_guard, name_ranks

_PACKAGE = __name__.rpartition(".guard.")[0] + "."  # this library, also in a vendored copy
_SKIPPED = (_PACKAGE, "torch.", "contextlib", "functools")


def collective_texts(call: str, facts: Sequence[Any]) -> tuple[str, str]:
    """Return what must be the same on every member, and that with strides that may differ."""
    text = describe(call, *facts)
    strides = [
        str(list(fact.stride()))
        for fact in facts
        if isinstance(fact, Tensor) and not fact.is_contiguous()
    ]
    return text, f"{text} strides {', '.join(strides)}" if strides else text


def message_text(data: Tensor, peer: int, sends: bool) -> str:
    """Return one end of a message as text."""
    shape = describe("", data)[1:-1]
    way = f"send({shape}) to" if sends else f"recv({shape}) from"
    return f"{way} rank {peer}"


def message_label(group: ProcessGroup, peer: int, tag: int, sends: bool) -> str:
    """Return the name for people of the messages between this rank and another."""
    src, dst = (get_rank(), peer) if sends else (peer, get_rank())
    tagged = f" (tag {tag})" if tag else ""
    return f"messages from rank {src} to rank {dst} in {group_label(group)}{tagged}"


def group_label(group: ProcessGroup) -> str:
    """Return a group's name for people: `tp` for one whose description is `scaletorch_tp`."""
    name = (group.group_desc or "").removeprefix("scaletorch_")
    if name in ("", "undefined"):
        name = f"group {group.group_name}"
    return "the default group" if name == "default_pg" else name


def call_site() -> tuple[bytes, int]:
    """Return the first frame outside this library and torch, and a checksum of it.

    Returns:
        `file.py:33 in function`, cut if it is long.
    """
    frame: FrameType = sys._getframe(3)  # beyond the recorder
    while True:
        inside = frame.f_globals.get("__name__", "").startswith(_SKIPPED)
        outer = frame.f_back
        if not inside or outer is None:
            break
        frame = outer
    file = "/".join(frame.f_code.co_filename.rsplit("/", 2)[-2:])[-40:]
    text = f"{file}:{frame.f_lineno} in {frame.f_code.co_name}".encode()[:72]
    return text, crc32(text)


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
