"""Turn the guard on and off in this process, and report steps and exceptions to it."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType

from torch.distributed import ProcessGroup

from ..dist import get_comm_device, get_default_group, get_rank, get_timeout, get_world_size
from ..dist.building import install_guard, tell_guard
from ..dist.errors import InvalidArgumentError, RankFaultError, StateError
from .calls import Board
from .messages import Bye, Hello, Raised
from .mismatch import END
from .recorder import Recorder, Verdict
from .start_monitor import Agreed, connect, start_monitor
from .watcher import Watcher

WELCOME = 60.0  # seconds within which all ranks must connect
TOLD = 0.5  # seconds to report an exception to the other ranks
LEAVE = 5.0  # seconds that a rank waits for the others to leave too; rank 0 waits longer
LONGEST = 20_000  # characters of a traceback that are sent
HEADLINE = 300  # characters of an exception in a fault's first line
EXIT = 5.0  # seconds that a process gets to exit after a fault

logger = logging.getLogger(__package__)

_session: Session | None = None
_reported = False  # whether an exception of this rank was reported to the others


class Session:
    """The guard of this process.

    Rank 0, on whose host the monitor runs, waits `patience` seconds for the others to leave.
    """

    def __init__(self, group: ProcessGroup, agreed: Agreed, label: str, patience: float) -> None:
        self.rank, size = group.rank(), group.size()
        self.verdict = Verdict()
        self.ended = False
        self._patience, self._board = patience, Board(agreed.board)
        self.recorder = Recorder(self._board, self.verdict, self.tell)
        hello = Hello(agreed.token, self.rank, os.getpid(), label)
        self.watcher = Watcher(connect(agreed, hello), self.recorder, self.rank, size)
        self.watcher.start()
        if not self.watcher.welcome.wait(WELCOME) and not self.verdict.over.is_set():
            self.close()
            raise StateError(
                f"not all {size} ranks connected to the guard's monitor within {WELCOME:g} s"
            )
        self._board.unlink()

    def tell(self, error: BaseException) -> bool:
        """Report an exception of this rank; return whether the other ranks will raise a fault."""
        if not self.verdict.caused(error):
            self.raised(error)
        return self.verdict.fault is not None or not self.verdict.over.is_set()

    def raised(self, error: BaseException) -> None:
        """Report an exception that ends this rank to the other ranks."""
        text = "".join(traceback.format_exception(error))[-LONGEST:]
        what = " ".join("".join(traceback.format_exception_only(error)).split())
        headline = what if len(what) <= HEADLINE else f"{what[:HEADLINE]} …"
        # On rank 0 an exit may end the monitor too, so live until all ranks know.
        self._end(Raised(text, headline, self.watcher.tail()), TOLD)

    def leave(self) -> None:
        """Report that this rank makes no more calls, and wait a while for the others to leave."""
        self.recorder.mark(list(self.recorder.tracks.values()), END)
        self._end(Bye(self.watcher.tail()), LEAVE if self.rank else max(LEAVE, self._patience))

    def _end(self, message: Bye | Raised, patience: float) -> None:
        """Send this rank's last message, and wait until the guard has ended everywhere."""
        if not self.ended and not self.verdict.over.is_set():
            self.ended = True
            self.watcher.say(message, TOLD)
            self.verdict.over.wait(patience)

    def close(self) -> None:
        """Release the guard's resources."""
        self.watcher.end()
        self.recorder.board = None
        self._board.close()


def start(
    *,
    label: str | Callable[[], str] | None = None,
    warn: float = 30.0,
    patience: float | None = None,
) -> None:
    """Guard this process's calls from now on; every rank of the default group must call it.

    If a rank fails, dies, leaves, or makes a different call, every other rank raises
    `RankFaultError`, in the call in which it waits or in its next one. A rank that is slow, or
    whose process is stopped, is a fault after `patience` seconds. An exception that ends the
    program is reported to the other ranks; `watch` also reports one that is caught outside its
    block. A single process is not guarded. If the guard itself fails, the job continues, and a
    warning says that the guard is off.

    Args:
        label: A readable name of this rank, such as `rank 5 (dp0 pp1 cp0 tp1)`, or a function that
            returns it.
        warn: Seconds of waiting after which a warning on rank 0 shows where the slow rank is.
        patience: Seconds of waiting after which slowness is an error; by default the group's
            timeout, or nine tenths of it on devices, whose backend kills the process at the
            timeout.

    Raises:
        StateError: The guard is already on, or ranks do not connect.
        InvalidArgumentError: A time is not positive.
    """
    global _session
    if _session is not None:
        raise StateError("the guard is on already: stop() it first")
    if patience is None:
        seconds = get_timeout().total_seconds()
        patience = seconds if get_comm_device().type == "cpu" else 0.9 * seconds
    if not (warn > 0 and patience > 0):
        raise InvalidArgumentError(f"{warn=} and {patience=} must be positive seconds")
    group = get_default_group()
    if get_world_size() == 1 or group is None:
        return
    name = (label() if callable(label) else label) or f"rank {get_rank()}"
    agreed = start_monitor(group, {"warn": warn, "patience": patience})
    if agreed.failed:
        level = logging.INFO if group.rank() else logging.WARNING
        logger.log(level, "the guard is off: its monitor did not start: %s", agreed.failed)
        return
    _hook_once()
    _session = Session(group, agreed, name, patience)
    install_guard(_session.recorder)


def tell(error: BaseException) -> bool:
    """Report an exception that ends this rank's work to all ranks, before re-raising it.

    Use it if cleanup delays the exception, for example to end a step with the other ranks: without
    the report the guard would see ranks that wait for one another. The other ranks raise
    `RankFaultError`, and so does this rank in its next call. It costs nothing if nothing is raised.

    Args:
        error: The exception; one that another rank's fault has caused is not reported again.

    Returns:
        Whether the guard reports a fault to all ranks; if not, the caller must report it.
    """
    return tell_guard(error)


def stop() -> None:
    """Turn the guard off: wait a moment for the other ranks to do so, and compare the last calls.

    Safe to call if it is off.

    Raises:
        RankFaultError: The guard found a fault.
    """
    session = _session
    if session is None:
        return
    try:
        session.leave()
    finally:
        _forget(session)
    session.verdict.check()


def step(number: int | None = None) -> None:
    """Mark the end of a training step; all calls before it are compared in the background.

    Args:
        number: The step's number, the same on all ranks; by default the last one plus 1.

    Raises:
        RankFaultError: The guard has found a fault.
    """
    session = _session
    if session is not None:
        session.verdict.check()
        recorder = session.recorder
        recorder.end_step((recorder.step or 0) + 1 if number is None else number)


@contextlib.contextmanager
def watch(
    *,
    label: str | Callable[[], str] | None = None,
    warn: float = 30.0,
    patience: float | None = None,
) -> Iterator[None]:
    """Guard a block: `start`, then `stop` at its end; report an exception in it to all ranks.

    Args and errors as in `start`.

    Raises:
        RankFaultError: The guard found a fault of another rank, or of this one.

    Example:
        >>> with guard.watch():
        ...     train()
    """
    start(label=label, warn=warn, patience=patience)
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
    """Report the exception that ends the block; return the fault that caused it, or None."""
    global _reported
    session = _session
    if session is None:
        return None
    try:
        if isinstance(error, SystemExit) and not error.code:
            session.leave()
        elif not session.verdict.caused(error):
            _reported = True
            session.raised(error)
        elif not isinstance(error, RankFaultError):
            return session.verdict.error()
    finally:
        _forget(session)
    return None


def _forget(session: Session) -> None:
    global _session
    _session = None
    install_guard(None)
    session.close()


@functools.cache
def _hook_once() -> None:
    """Install hooks that turn the guard off at exit, at an uncaught exception, and in forks."""
    before = sys.excepthook

    def tell_and_show(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        fault = _ended_by(error)
        before(kind, error, trace)
        if fault is not None:
            before(type(fault), fault, None)
        if fault is not None or isinstance(error, RankFaultError) or _reported:
            _limit_exit()

    sys.excepthook = tell_and_show
    atexit.register(_at_exit)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_off_in_child)


def _limit_exit() -> None:
    """Exit within `EXIT` seconds, even if broken groups block the interpreter's shutdown."""
    sys.stdout.flush()
    nowhere = open(os.devnull, "w")  # noqa: SIM115 - open as long as the process lives
    # Its timer does not need the interpreter.
    faulthandler.dump_traceback_later(EXIT, exit=True, file=nowhere)


def _at_exit() -> None:
    with contextlib.suppress(RankFaultError):
        stop()


def _off_in_child() -> None:
    """Turn the guard off in a forked child, which is not a rank."""
    global _session
    session, _session = _session, None
    install_guard(None)
    if session is not None:
        session.watcher.disown()
