"""Turning the guard on and off in this process, and telling it of steps and exceptions."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType

from torch.distributed import ProcessGroup

from ..dist import get_comm_device, get_default_group, get_rank, get_timeout, get_world_size
from ..dist.building import install_guard, tell_guard
from ..dist.errors import InvalidArgumentError, RankFaultError, StateError
from .ledger import Board, Ledger, host_number
from .messages import Bye, Hello, Raised
from .recorder import Recorder, Verdict
from .start_monitor import Agreed, connect, start_monitor
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


EXIT = 5.0  # s that a process gets to end after a fault

logger = logging.getLogger(__package__)

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
    One process alone is not guarded. A fault of the guard itself stops nothing: a warning says
    that it is off.

    Args:
        folder: Where to keep the ledgers, in a folder of this job; by default a temporary one that
            goes when all ends well.
        label: This rank for people, such as `rank 5 (dp0 pp1 cp0 tp1)`, or a function that returns
            it.
        warn: Seconds of waiting after which a warning on rank 0 shows where the slow rank is.
        patience: Seconds of waiting after which slowness is an error; by default the group's
            timeout, and nine tenths of it on devices, whose backend ends the process then.

    Raises:
        StateError: It is on already, there is no group, or ranks do not come.
        InvalidArgumentError: A time that is not positive.
    """
    global _session
    if _session is not None:
        raise StateError("the guard is on already: stop() it first")
    patience = _default_patience() if patience is None else patience
    limits = {"warn": warn, "patience": patience}
    if not all(seconds > 0 for seconds in limits.values()):
        said = ", ".join(f"{name}={seconds}" for name, seconds in limits.items())
        raise InvalidArgumentError(f"{said} must be positive seconds")
    if get_world_size() == 1:
        return
    group = get_default_group()
    if group is None:
        raise StateError("there is no process group to guard: call init_dist() first")
    name = label() if callable(label) else label
    name = name or f"rank {get_rank()}"
    agreed = start_monitor(group, folder, limits)
    if agreed.failed:
        level = logging.INFO if group.rank() else logging.WARNING
        logger.log(level, "the guard is off: its monitor did not start: %s", agreed.failed)
        return
    _hook_once()
    _session = Session(group, agreed, name, keep=folder is not None, patience=patience)
    install_guard(_session.recorder)


def _default_patience() -> float:
    seconds = get_timeout().total_seconds()
    return seconds if get_comm_device().type == "cpu" else 0.9 * seconds


def tell(error: BaseException) -> bool:
    """Tell all ranks at once of an exception that ends this rank's work, before it is raised on.

    For code that has more to do before the exception leaves it, such as to end a step with the
    others, who would see ranks that wait for one another instead. They raise `RankFaultError`, and
    so does this rank in its next call. Costs nothing if nothing is raised.

    Args:
        error: The exception; one that comes from another rank's fault is not told again.

    Returns:
        Whether a guard is on, so that all ranks hear of a fault; else they must be told otherwise.
    """
    return tell_guard(error)


def stop() -> None:
    """End the guard: wait a moment for the other ranks to end it too, and compare the last calls.

    Safe to call when it is off.

    Raises:
        RankFaultError: There was a fault.
    """
    session = _session
    if session is None:
        return
    try:
        session.leave()
    finally:
        _forget()
    session.verdict.check()


def step(number: int | None = None) -> None:
    """Mark the end of a training step: calls up to here are compared, in the background.

    Args:
        number: The step's number, the same on all ranks; counted by itself by default.

    Raises:
        RankFaultError: There is a fault.
    """
    session = _session
    if session is not None:
        session.verdict.check()
        recorder = session.recorder
        recorder.end_step((recorder.step or 0) + 1 if number is None else number)


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
        RankFaultError: Another rank is at fault, or this one was found to be.

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
    try:
        if isinstance(error, SystemExit) and not error.code:
            session.leave()
        elif not session.verdict.caused(error):
            _told = True
            session.raised(error)
        elif not isinstance(error, RankFaultError):
            return session.verdict.error()
    finally:
        _forget()
    return None


def _forget() -> None:
    global _session
    session, _session = _session, None
    install_guard(None)
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
    """End the process soon, even if groups that are broken now keep it from ending by itself.

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
    install_guard(None)
    if session is not None:
        session.disown()
