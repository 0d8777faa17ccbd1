"""The guard of this process, from its start to its end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import traceback
from typing import Any

from torch.distributed import ProcessGroup

from ..errors import RankFaultError, StateError
from .ledger import Ledger
from .meeting import connect
from .processes import host_number
from .recorder import Recorder
from .watcher import Conclusion, Watcher

WELCOME = 60.0  # s that all ranks get to come
VERDICT = 3.0  # s that an error of the network waits for the verdict on its cause
TOLD = 0.5  # s to tell the others of an exception
LEAVE = 5.0  # s that a rank waits for the others to leave too; rank 0 waits longer
LONGEST = 20_000  # characters of a traceback that travel
HEADLINE = 300  # characters of what was raised that name a fault

_NETWORK = re.compile(r"gloo|pair closure|connect|timed? ?out|broken pipe|nccl|peer", re.IGNORECASE)


class Session:
    """The guard of this process.

    Args:
        group: the ranks that are guarded.
        agreed: what `meet` returned.
        label: this rank's name for people.
        keep: whether the ledgers stay without a fault too.
        patience: seconds that rank 0, beside which the monitor is, waits for others to leave.

    Raises:
        StateError: not all ranks come.
    """

    def __init__(
        self,
        group: ProcessGroup,
        agreed: dict[str, Any],
        label: str,
        *,
        keep: bool,
        patience: float,
    ) -> None:
        self.rank, size = group.rank(), group.size()
        self.over = threading.Event()
        self.fault: Conclusion | None = None
        self.ended = False
        self._patience, self._keep = patience, keep
        self.folder: str = agreed["folder"]
        self.recorder = Recorder(Ledger(self.folder, self.rank, label), self.explain, self.check)
        hello = {"rank": self.rank, "pid": os.getpid(), "host": host_number(), "label": label}
        self.watcher = Watcher(
            connect(agreed, hello),
            self.recorder,
            rank=self.rank,
            size=size,
            folder=self.folder,
            conclude=self._conclude,
        )
        self.watcher.start()
        self._wakeup: int | None = None
        if not self.watcher.welcome.wait(WELCOME) and not self.over.is_set():
            self.close()
            raise StateError(f"not all {size} ranks came to the guard in {WELCOME:g} s")
        self._wakeup = _watch_signals(self.watcher.wake)

    def check(self) -> None:
        """Raise if there is a fault."""
        if self.fault is not None:
            raise self.error()

    def error(self) -> RankFaultError:
        """Return the error that tells of the fault."""
        kind, ranks, text = self.fault or ("", (), "")
        return RankFaultError(text, ranks=ranks, kind=kind)

    def explain(self, error: Exception) -> BaseException:
        """Return the fault that an error of the network comes from, or the error itself."""
        if self.fault is None and not _NETWORK.search(str(error)):
            return error
        self.over.wait(VERDICT)
        return error if self.fault is None else self.error()

    def tell(self, error: BaseException) -> None:
        """Tell the others of an exception, before it ends this rank."""
        if self.ended or self.over.is_set():
            return
        self.ended = True
        text = "".join(traceback.format_exception(error))[-LONGEST:]
        word = {"is": "raised", "what": text, "headline": one_line(error)}
        self.watcher.say({**word, "tail": self.watcher.tail()}, TOLD)
        self.over.wait(TOLD)  # rank 0's process, and what is beside it, live until all are told

    def leave(self) -> None:
        """Tell the others that this rank makes no more calls, and wait a while for them."""
        if self.ended or self.over.is_set():
            return
        self.ended = True
        self.recorder.mark(list(self.recorder.tracks.values()))
        self.watcher.say({"is": "bye", "tail": self.watcher.tail()}, TOLD)
        self.over.wait(LEAVE if self.rank else max(LEAVE, self._patience))

    def close(self) -> None:
        """Let go of everything; the ledger stays if there was a fault."""
        self._release_signals()
        self.watcher.end()
        clean = self.fault is None and not self._keep
        self.recorder.ledger.close(remove=clean)
        if clean:
            with contextlib.suppress(OSError):  # the last one on this host can
                os.rmdir(self.folder)

    def disown(self) -> None:
        """Let go in a fork of this process, which is no rank."""
        self._release_signals()
        self.watcher.disown()

    def _release_signals(self) -> None:
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._wakeup)
            self._wakeup = None

    def _conclude(self, verdict: Conclusion | None) -> None:
        self.fault = verdict
        self.over.set()


def one_line(error: BaseException) -> str:
    """Return an exception's type and message on one line, cut where it is long."""
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
    """Have signals wake the watcher; return what they woke before, None where that stays."""
    if threading.current_thread() is not threading.main_thread():
        return None
    before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        return None
    return before
