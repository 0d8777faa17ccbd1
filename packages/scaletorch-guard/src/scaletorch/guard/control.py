"""Turning the guard on and off in this process, and telling it of steps and exceptions."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import sys
from collections.abc import Callable, Iterator
from types import TracebackType

from ..dist import get_comm_device, get_default_group, get_rank, get_timeout, get_world_size
from ..dist.building import tell_guard
from ..dist.errors import InvalidArgumentError, RankFaultError, StateError
from .listening import forget_in_fork, put_recorder
from .session import Session
from .start_monitor import start_monitor

EXIT = 5.0  # s that a process gets to end after a fault
SILENCE = 10.0  # s

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
    silence: float = SILENCE,
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
        silence: Seconds after which a rank that others wait for, and that neither speaks nor works
            on data, counts as stopped: C code, or a regular expression, that keeps Python's lock.

    Raises:
        StateError: It is on already, there is no group, or ranks do not come.
        InvalidArgumentError: A time that is not positive.
    """
    global _session
    if _session is not None:
        raise StateError("the guard is on already: stop() it first")
    patience = _default_patience() if patience is None else patience
    limits = {"warn": warn, "patience": patience, "silence": silence}
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
    put_recorder(_session.recorder)


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
        steps = session.recorder.steps
        session.recorder.end_step((steps[-1][0] + 1 if steps else 1) if number is None else number)


@contextlib.contextmanager
def watch(
    folder: str | None = None,
    *,
    label: str | Callable[[], str] | None = None,
    warn: float = 30.0,
    patience: float | None = None,
    silence: float = SILENCE,
) -> Iterator[None]:
    """Guard a block: `start`, and `stop` at its end; an exception in it is told to all ranks.

    Args and errors as in `start`.

    Raises:
        RankFaultError: Another rank is at fault, or this one was found to be.

    Example:
        >>> with guard.watch():
        ...     train()
    """
    start(folder, label=label, warn=warn, patience=patience, silence=silence)
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
    put_recorder(None)
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
    forget_in_fork()
    if session is not None:
        session.disown()
