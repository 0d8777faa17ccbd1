"""Starting and ending the guard in this process."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType

from ..collectives import hooks
from ..errors import InvalidArgumentError, RankFaultError, StateError
from ..info import get_default_group, get_rank, get_timeout, get_world_size
from .ledger import Ledger
from .meeting import connect, meet
from .monitor import Monitor
from .processes import host_number
from .recorder import Recorder
from .watcher import Watcher

WELCOME = 60.0  # s that all ranks get to come
VERDICT = 3.0  # s that an error of the network waits for the verdict on its cause
TOLD = 0.5  # s to tell the others of an exception
LEAVE = 5.0  # s that a rank waits for the others to leave too; rank 0 waits longer
EXIT = 5.0  # s that a process gets to end after a fault
LONGEST = 20_000  # characters of a traceback that travel

_NETWORK = re.compile(r"gloo|pair closure|connect|timed? ?out|broken pipe|nccl|peer", re.IGNORECASE)

Conclusion = tuple[str, tuple[int, ...], str]


class Session:
    """The guard of this process, from `start` to `stop`."""

    def __init__(self, folder: str | None, label: str, *, warn: float, patience: float) -> None:
        group = get_default_group()
        if group is None:
            raise StateError("there is no process group to guard: call init_dist() first")
        self.rank, self.size = group.rank(), group.size()
        self.over = threading.Event()
        self.fault: Conclusion | None = None
        self.ended = False
        self._patience = patience
        self._keep = folder is not None
        listener, agreed = meet(group, folder)
        self.folder: str = agreed["folder"]
        if listener is not None:
            token = agreed["token"]
            limits = {"warn": warn, "patience": patience}
            Monitor(listener, token, self.size, self.folder, **limits).start()
        self.recorder = Recorder(Ledger(self.folder, self.rank, label), self.explain, self.check)
        hello = {"rank": self.rank, "pid": os.getpid(), "host": host_number(), "label": label}
        self.watcher = Watcher(
            connect(agreed, hello),
            self.recorder,
            rank=self.rank,
            size=self.size,
            folder=self.folder,
            conclude=self._conclude,
        )
        self.watcher.start()
        if not self.watcher.welcome.wait(WELCOME):
            self.watcher.end()
            raise StateError(f"not all {self.size} ranks came to the guard in {WELCOME:g} s")
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
        self.watcher.say({"is": "raised", "what": text, "tail": self.watcher.tail()}, TOLD)
        self.over.wait(TOLD)  # rank 0's process must live until all have been told

    def leave(self) -> None:
        """Tell the others that this rank makes no more calls, and wait a while for them."""
        if self.ended or self.over.is_set():
            return
        self.ended = True
        self.watcher.say({"is": "bye", "tail": self.watcher.tail()}, TOLD)
        self.over.wait(LEAVE if self.rank else max(LEAVE, self._patience))

    def close(self) -> None:
        """Let go of everything; the ledger stays if there was a fault."""
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._wakeup)
        self.watcher.end()
        clean = self.fault is None and not self._keep
        self.recorder.ledger.close(remove=clean)
        if clean:
            with contextlib.suppress(OSError):  # the last one on this host can
                os.rmdir(self.folder)

    def _conclude(self, verdict: Conclusion | None) -> None:
        self.fault = verdict
        self.over.set()


def _watch_signals(wake: int) -> int | None:
    """Have signals wake the watcher; return what they woke before, None where that stays."""
    if threading.current_thread() is not threading.main_thread():
        return None
    before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        return None
    return before


_session: Session | None = None
_hooked = False
_told = False  # whether an exception of this rank has been told to the others


def start(
    folder: str | None = None,
    *,
    label: str | Callable[[], str] | None = None,
    warn: float = 30.0,
    patience: float | None = None,
) -> None:
    """Guard this process's calls from now on; every rank of the default group calls it.

    From then on a rank that fails, dies, stops, leaves, or makes another call than the rest is an
    error on every other rank, in the call that it waits in or in its next one. An exception that
    ends the program is told to the others; `watch` also tells of one that is caught outside.
    One process alone is not guarded.

    Args:
        folder: where to keep the ledgers, in a folder of this job; by default a temporary one that
            goes when all ends well.
        label: this rank for people, such as ``rank 5 (dp0 pp1 cp0 tp1)``, or what returns it.
        warn: seconds of waiting after which a warning on rank 0 shows where the slow rank is.
        patience: seconds of waiting after which slowness is an error; the group's timeout by
            default.

    Raises:
        StateError: it is on already, or ranks do not come.
        InvalidArgumentError: a time that is not positive.
    """
    global _session
    if _session is not None:
        raise StateError("the guard is on already: stop() it first")
    patience = get_timeout().total_seconds() if patience is None else patience
    if not warn > 0 or not patience > 0:
        raise InvalidArgumentError(f"warn={warn} and patience={patience} must be positive seconds")
    if get_world_size() == 1:
        return
    name = label() if callable(label) else label
    name = name or f"rank {get_rank()}"
    _hook_once()
    _session = Session(folder, name, warn=warn, patience=patience)
    hooks.guard = _session.recorder


def stop() -> None:
    """End the guard: wait a moment for the other ranks to end it too, and compare the last calls.

    Safe to call where it is off.

    Raises:
        RankFaultError: there was a fault.
    """
    session = _session
    if session is None:
        return
    try:
        session.leave()
    finally:
        _forget()
    session.check()


def step(number: int | None = None) -> None:
    """Mark the end of a training step: calls up to here are compared, in the background.

    Args:
        number: the step's number, the same on all ranks; counted by itself by default.

    Raises:
        RankFaultError: there is a fault.
    """
    session = _session
    if session is not None:
        session.check()
        steps = session.recorder.steps
        session.recorder.end_step((steps[-1][0] + 1 if steps else 1) if number is None else number)


@contextlib.contextmanager
def watch(
    folder: str | None = None,
    *,
    label: str | Callable[[], str] | None = None,
    warn: float = 30.0,
    patience: float | None = None,
) -> Iterator[None]:
    """Guard a block: `start`, and `stop` at its end; an exception in it is told to all ranks.

    Args and errors as in `start`.

    Raises:
        RankFaultError: another rank is at fault, or this one was found to be.

    Example:
        >>> with guard.watch():
        ...     train()
    """
    start(folder, label=label, warn=warn, patience=patience)
    try:
        yield
    except BaseException as error:
        raise_instead = _ended_by(error)
        if raise_instead is not None:
            raise raise_instead from error
        raise
    else:
        stop()


def _ended_by(error: BaseException) -> RankFaultError | None:
    """Tell the others what ends the block; return the fault that it comes from, if it does."""
    global _told
    session = _session
    if session is None:
        return None
    fault = None
    try:
        if isinstance(error, RankFaultError):
            pass
        elif isinstance(error, SystemExit) and not error.code:
            session.leave()
        elif isinstance(error, RuntimeError) and session.explain(error) is not error:
            fault = session.error()
        else:
            _told = True
            session.tell(error)
    finally:
        _forget()
    return fault


def _forget() -> None:
    global _session
    session, _session = _session, None
    hooks.guard = None
    if session is not None:
        session.close()


def _hook_once() -> None:
    """Have the end of the program, exceptions that end it, and forks end the guard too."""
    global _hooked
    if _hooked:
        return
    _hooked = True
    before = sys.excepthook

    def tell_and_show(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        fault = _ended_by(error)
        before(kind, error, trace)
        if fault is not None:
            before(type(fault), fault, None)
        if fault is not None or isinstance(error, RankFaultError) or _told:
            _limit_exit()

    sys.excepthook = tell_and_show
    atexit.register(_at_exit)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_off_in_child)


def _limit_exit() -> None:
    """End the process soon, also where groups that are broken now keep it from ending by itself.

    One with a live DistributedDataParallel does; faulthandler's timer needs no interpreter.
    """
    sys.stdout.flush()
    nowhere = open(os.devnull, "w")  # noqa: SIM115 - open as long as the process lives
    faulthandler.dump_traceback_later(EXIT, exit=True, file=nowhere)


def _at_exit() -> None:
    with contextlib.suppress(RankFaultError):
        stop()


def _off_in_child() -> None:
    """Turn the guard off in a fork of this process, which is no rank."""
    global _session
    session, _session = _session, None
    hooks.guard = None
    if session is not None:
        session.watcher.disown()
