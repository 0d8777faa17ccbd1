"""The guard of this process, from its start to its end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import traceback

from torch.distributed import ProcessGroup

from ..dist.errors import StateError
from .board import Board
from .ledger import Ledger
from .messages import Bye, Hello, Raised
from .processes import host_number
from .recorder import Recorder
from .start_monitor import Agreed, connect
from .verdict import Verdict
from .watcher import Watcher

WELCOME = 60.0  # s that all ranks get to come
TOLD = 0.5  # s to tell the others of an exception
LEAVE = 5.0  # s that a rank waits for the others to leave too; rank 0 waits longer
LONGEST = 20_000  # characters of a traceback that travel
HEADLINE = 300  # characters of an exception's message that name a fault


class Session:
    """The guard of this process.

    Args:
        group: The ranks that are guarded.
        agreed: The result of `start_monitor`.
        label: This rank's name for people.
        keep: Whether the ledgers stay without a fault too.
        patience: Seconds that rank 0, beside which the monitor is, waits for others to leave.

    Raises:
        StateError: Not all ranks come.
    """

    def __init__(
        self, group: ProcessGroup, agreed: Agreed, label: str, *, keep: bool, patience: float
    ) -> None:
        self.rank, size = group.rank(), group.size()
        self.verdict = Verdict()
        self.ended = False
        self._patience, self._keep, self._folder = patience, keep, agreed.folder
        self._board = Board(agreed.folder)
        ledger = Ledger(agreed.folder, self.rank, label)
        self.recorder = Recorder(ledger, self._board, self.verdict, self.tell)
        hello = Hello(agreed.token, self.rank, os.getpid(), host_number(), label)
        self.watcher = Watcher(connect(agreed, hello), self.recorder, self.rank, size)
        self.watcher.start()
        self._wakeup: int | None = None
        if not self.watcher.welcome.wait(WELCOME) and not self.verdict.over.is_set():
            self.close()
            raise StateError(f"not all {size} ranks came to the guard in {WELCOME:g} s")
        self._wakeup = _watch_signals(self.watcher.wake)

    def tell(self, error: BaseException) -> bool:
        """Tell the others of an exception of this rank's; return whether they hear of a fault."""
        if not self.verdict.caused(error):
            self.raised(error)
        return self.verdict.fault is not None or not self.verdict.over.is_set()

    def raised(self, error: BaseException) -> None:
        """Tell the others of an exception that ends this rank."""
        if self.ended or self.verdict.over.is_set():
            return
        self.ended = True
        text = "".join(traceback.format_exception(error))[-LONGEST:]
        self.watcher.say(Raised(text, one_line(error), self.watcher.tail()), TOLD)
        # Rank 0's process, and the monitor beside it, must live until all have been told.
        self.verdict.over.wait(TOLD)

    def leave(self) -> None:
        """Tell the others that this rank makes no more calls, and wait a while for them."""
        if self.ended or self.verdict.over.is_set():
            return
        self.ended = True
        self.recorder.mark(list(self.recorder.tracks.values()))
        self.watcher.say(Bye(self.watcher.tail()), TOLD)
        self.verdict.over.wait(LEAVE if self.rank else max(LEAVE, self._patience))

    def close(self) -> None:
        """Release all that the guard holds; the ledger stays if there was a fault."""
        self._release_signals()
        self.watcher.end()
        clean = self.verdict.fault is None and not self._keep
        self.recorder.board = None
        self._board.close()
        self.recorder.ledger.close(remove=clean)
        if clean:
            with contextlib.suppress(OSError):  # only the last rank of this host finds it empty
                os.rmdir(self._folder)

    def disown(self) -> None:
        """Release it in a fork of this process, which is no rank."""
        self._release_signals()
        self.watcher.disown()

    def _release_signals(self) -> None:
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._wakeup)
            self._wakeup = None


def one_line(error: BaseException) -> str:
    """Return an exception's type and message on one line, cut if it is long."""
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    with contextlib.suppress(Exception):  # of a user's own __str__
        message = " ".join(str(error).split())
        cut = f"{message[:HEADLINE]} …" if len(message) > HEADLINE else message
        return f"{name}: {cut}" if cut else name
    return name


def _watch_signals(wake: int) -> int | None:
    """Have signals wake the watcher, and return the descriptor that they woke before.

    None if they go on to wake another one, or cannot be watched outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        return None
    return before
