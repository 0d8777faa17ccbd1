"""The watcher: a thread of every rank that tells the monitor what this process does.

It also looks at other processes of this host if it is asked to, and ends this rank's waits when
there is a fault.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as c10d

from . import messages
from .facts import Fault, Wait, news_period
from .ledger import TRACE
from .recorder import Note, Recorder

_TAG = 0x5CA1E  # nobody's
_DUMPS = ("_dump_nccl_trace", "_dump_fr_trace")  # the second is there without NCCL too


def break_gloo_groups() -> None:
    """Free all threads of this process that wait in gloo; its groups are of no use after.

    Neither `abort` nor `shutdown` ends a collective of gloo that waits for a peer. But a message
    that is not there in time makes it break all connections of its group in this process, which
    frees these threads with an error. So: wait 1 ms for one.
    """
    for backend in _backends():
        if backend.name() == "gloo" and backend.size() > 1:
            with contextlib.suppress(Exception):
                _break(backend)


def abort_device_groups() -> None:
    """Abort every group of this process whose calls run on a device; they are of no use after.

    That ends the kernels that wait on the device: the host goes on, with whatever is in tensors.
    The aborts of NCCL's groups are one call to it, newest group first, as torch itself makes them:
    one after another they can wait for one another (pytorch/pytorch#119797).
    """
    found = [backend for backend in _backends() if backend.name() != "gloo" and backend.size() > 1]
    together = next((backend for backend in found if hasattr(backend, "_group_start")), None)
    if together is not None:
        together._group_start()
    for backend in reversed(found):
        with contextlib.suppress(Exception):
            backend.abort()
    if together is not None:
        together._group_end()


def dump_trace(folder: str, rank: int) -> None:
    """Write what torch's flight recorder knows of the last calls on the device, if anything.

    Without stacks: to look up their lines torch imports its compiler, which takes seconds.
    """
    for name in _DUMPS:
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            with contextlib.suppress(Exception):
                Path(folder, f"{TRACE}{rank}").write_bytes(dump(includeStackTraces=False))
            return


def _backends() -> Iterator[Any]:
    """Yield the backends of all groups that this rank is in, each once, oldest group first."""
    seen: list[Any] = []  # kept, since torch makes the objects anew once they are gone
    for group in list(c10d.distributed_c10d._world.pg_map):
        for device in group._device_types if group.rank() >= 0 else ():
            backend = group._get_backend(device)
            if not any(backend is other for other in seen):
                seen.append(backend)
                yield backend


def _break(backend: Any) -> None:
    for peer in set(range(backend.size())) - {backend.rank()}:
        try:
            backend.recv([torch.empty(1)], peer, _TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "Timed out" in str(error):
                return  # now all are broken; one that was so before says something else


LOOK = 0.1  # s between two looks at the waits of this process
TAIL = 256  # entries that are sent
BEHIND = 1.0  # s that a call is in a stream before others hear that the stream waits in it

logger = logging.getLogger(__package__)

T = TypeVar("T")


class Watcher(threading.Thread):
    """Tells the monitor of this process, and this process of a fault.

    Args:
        connection: The connection to the monitor.
        recorder: The calls of this process, and the verdict on the job.
        rank: This rank.
        size: How many ranks there are.
    """

    def __init__(
        self, connection: messages.Connection, recorder: Recorder, rank: int, size: int
    ) -> None:
        super().__init__(name="scaletorch-guard-watcher", daemon=True)
        self._connection, self._recorder, self._rank = connection, recorder, rank
        self._main = threading.main_thread().ident
        self._period = news_period(size)
        self._queue: queue.SimpleQueue[tuple[messages.Message, threading.Event]]
        self._queue = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self.welcome = threading.Event()
        self._shown: list[int] = []  # numbers of the waits that it knows
        self._over = False

    @property
    def wake(self) -> int:
        """The descriptor that signals wake this thread by."""
        return self._waker.fileno()

    def say(self, message: messages.Message, timeout: float) -> None:
        """Have this thread send a message to the monitor, and wait until it has."""
        sent = threading.Event()
        self._queue.put((message, sent))
        self._wake()
        sent.wait(timeout)

    def end(self) -> None:
        """End this thread, without another message."""
        self._over = True
        self._wake()
        if threading.current_thread() is not self:
            self.join(1.0)

    def disown(self) -> None:
        """Close this end in a fork of the process, so that it does not keep it open."""
        for end in (self._connection, self._woken, self._waker):
            end.close()

    def run(self) -> None:
        """Serve until the end; a fault of the guard itself turns it off, and no more."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                selector.register(self._woken, selectors.EVENT_READ)
                self._serve(selector)
        except Exception as error:
            if not self._over:  # else the rank has just closed the files that this thread used
                why = "".join(traceback.format_exception(error))
                self._connection.send(messages.Off(f"on rank {self._rank}: {why}"))
                self._turn_off(why)
        finally:
            self.disown()

    def _serve(self, selector: selectors.BaseSelector) -> None:
        due = 0.0
        while not self._over:
            ready = {key.fileobj for key, _ in selector.select(LOOK)}
            if self._woken in ready:
                self._signals(self._woken.recv(256))
            if self._connection in ready:
                self._hear()
            now = time.monotonic()
            if now >= due or self._waits_changed():
                due = now + self._period
                self._connection.send(self._news())
            while not self._queue.empty():
                message, sent = self._queue.get()
                self._send_with_news(message)
                sent.set()

    def _send_with_news(self, message: messages.Message) -> None:
        self._connection.send(self._news(behind=0.0), message)

    def _waits_changed(self) -> bool:
        """Return whether this rank waits in other calls than the monitor knows of."""
        return [wait.number for wait in self._waits(self._recorder.waits.copy())] != self._shown

    def _waits(
        self, threads: dict[int, tuple[int, Note, float]], behind: float = BEHIND
    ) -> list[Wait]:
        """Return the waits of this process's threads, and the longest one of its streams."""
        now = time.monotonic()
        told = [
            Wait(number, note.track.key, note.seq, round(now - begun, 2))
            for number, note, begun in threads.values()
        ]
        call = self._recorder.streams.pending()
        if call is not None and (now - call.begun >= behind or call.number in self._shown):
            seconds = round(now - call.begun, 2)
            told.append(Wait(call.number, call.note.track.key, call.note.seq, seconds, stream=True))
        return told

    def _news(self, behind: float = BEHIND) -> messages.News:
        """Return all that has changed here since the last news.

        Waits are read first, so that all they need is in what is read after them: the channel that
        a wait is in, and the calls that were made before it.

        Args:
            behind: Seconds that a stream must have waited in a call to be told of.
        """
        threads = self._recorder.waits.copy()
        waits = self._waits(threads, behind)
        free, foreign = self._recorder.free_threads(threads)
        tracks = list(self._recorder.tracks.values())
        fresh = {track.key: list(track.channel) for track in tracks if track.told is None}
        counts = {track.key: track.count for track in tracks if track.count != track.told}
        marks = {track.key: found for track in tracks if (found := _taken(track.marks))}
        self._shown = [wait.number for wait in waits]
        for track in tracks:
            track.told = counts.get(track.key, track.told)
        step = self._recorder.step
        return messages.News(fresh, counts, marks, step, [*map(list, waits)], free, foreign)

    def tail(self) -> messages.Tail:
        """Return the last entries of the ledger."""
        return [list(entry) for entry in self._recorder.ledger.tail(TAIL)]

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it is awake, or at its end
            self._waker.send(b"\0")

    def _signals(self, numbers: bytes) -> None:
        """Free the main thread for a Ctrl-C that came while it was blocked in a wait."""
        ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if signal.SIGINT in numbers and ours and self._main in self._recorder.waits:
            name = "KeyboardInterrupt"
            self._send_with_news(messages.Raised(name, name, self.tail()))
            break_gloo_groups()

    def _hear(self) -> None:
        for message in self._connection.receive():
            match message:
                case messages.Welcome():
                    self.welcome.set()
                case messages.Ask(number):
                    stack = thread_stack(self._main)
                    self._send_with_news(messages.Answer(number, self.tail(), stack))
                case messages.Look(rank, pid):
                    self._connection.send(messages.State(rank, process_state(pid)))
                case messages.Warn(text):
                    logger.warning("%s", text)
                case Fault(kind, ranks, text):
                    self._finish(Fault(kind, tuple(ranks), text))
                case messages.Off(why):
                    self._turn_off(why)
                case messages.End():
                    self._finish(None)
        if not self._connection.open and not self._over:
            self._turn_off("its monitor, a process beside rank 0, has ended or is out of reach")

    def _turn_off(self, why: str) -> None:
        """Go on without a guard: its own fault is none of the job's."""
        level = logging.INFO if self._rank else logging.WARNING
        logger.log(level, "the guard is off: %s", why.rstrip())
        self._finish(None)

    def _finish(self, fault: Fault | None) -> None:
        self._over = True
        self._recorder.verdict.conclude(fault)
        if fault is None:
            return
        if self._recorder.on_device:
            # A backend's own watchdog may end this process before the error is raised.
            logger.error("%s", fault.text.split("\n", 1)[0])
            dump_trace(self._recorder.ledger.folder, self._rank)
            abort_device_groups()
        for pause in (0.002, 0.01, 0.05, 0.2, 1.0):  # a call may have begun just before
            break_gloo_groups()
            time.sleep(pause)
            if not self._recorder.waits:
                return


def _taken(marks: deque[T]) -> list[T]:
    """Return what a queue holds, which is empty then, but for what comes meanwhile."""
    return [marks.popleft() for _ in range(len(marks))]


def process_state(pid: int) -> str:
    """Return a process's state as a letter: `T` if it is stopped, `X` if gone, `?` if unknown."""
    if not os.path.isdir("/proc/self"):
        return "?"
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return "X"
    return {"t": "T", "Z": "X", "x": "X"}.get(state, state)


def thread_stack(ident: int | None) -> str:
    """Return the innermost of the Python stack of one of this process's threads."""
    frame = sys._current_frames().get(ident or 0)
    return "".join(traceback.format_stack(frame)[-6:]) if frame else ""
