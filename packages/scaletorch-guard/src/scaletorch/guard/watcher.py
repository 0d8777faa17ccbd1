"""The watcher: a thread of every rank that reports this process's state to the monitor.

At a fault it ends this rank's waits.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import selectors
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d

from . import messages
from .facts import Fault, Wait, news_period
from .recorder import Note, Recorder

_TAG = 0x5CA1E  # a tag that no program uses


def break_gloo_groups() -> None:
    """Unblock all threads of this process that wait in gloo; its groups are unusable afterwards.

    `abort` does not do that, but a receive that times out breaks all connections of the group.
    """
    for backend in _backends():
        if backend.name() == "gloo" and backend.size() > 1:
            with contextlib.suppress(Exception):
                _break(backend)


def abort_device_groups() -> None:
    """Abort every group of this process whose calls run on a device; they are unusable afterwards.

    NCCL's are aborted in one call, newest first: separate aborts can deadlock (pytorch#119797).
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


def _backends() -> list[Any]:
    """Return the backends of all groups that this rank is in, each once, oldest group first."""
    groups = [group for group in list(c10d.distributed_c10d._world.pg_map) if group.rank() >= 0]
    return list(
        dict.fromkeys(  # keeps the wrappers alive, so that one backend is one object
            group._get_backend(device) for group in groups for device in group._device_types
        )
    )


def _break(backend: Any) -> None:
    for peer in set(range(backend.size())) - {backend.rank()}:
        try:
            backend.recv([torch.empty(1)], peer, _TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "Timed out" in str(error):
                return  # all connections are broken now; one broken before gives another error


LOOK = 0.1  # seconds between two checks of the waits of this process
BEHIND = 1.0  # seconds that a call is in a stream before it is reported as a wait

logger = logging.getLogger(__package__)


class Watcher(threading.Thread):
    """The thread that reports this process to the monitor, and a fault to this process."""

    def __init__(
        self, connection: messages.Connection, recorder: Recorder, rank: int, size: int
    ) -> None:
        super().__init__(name="scaletorch-guard-watcher", daemon=True)
        self._connection, self._recorder, self._rank = connection, recorder, rank
        self._period = news_period(size)
        self._queue: queue.SimpleQueue[tuple[messages.Message, threading.Event]]
        self._queue = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self.welcome = threading.Event()
        self._shown: list[int] = []  # numbers of the waits that the monitor knows
        self._over = False

    def say(self, message: messages.Message, timeout: float) -> None:
        """Let this thread send a message to the monitor; wait up to `timeout` until it is sent."""
        sent = threading.Event()
        self._queue.put((message, sent))
        self._wake()
        sent.wait(timeout)

    def end(self) -> None:
        """End this thread without another message."""
        self._over = True
        self._wake()
        if threading.current_thread() is not self:
            self.join(1.0)

    def disown(self) -> None:
        """Close this end of the connection, so that a forked child does not keep it open."""
        for end in (self._connection, self._woken, self._waker):
            end.close()

    def run(self) -> None:
        """Serve until the end; a failure of the guard itself only turns the guard off."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                selector.register(self._woken, selectors.EVENT_READ)
                self._serve(selector)
        except Exception as error:
            if not self._over:  # else the rank has just closed the files in use
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
                self._woken.recv(256)
            if self._connection in ready:
                self._hear()
            now = time.monotonic()
            waits = self._waits(self._recorder.waits.copy())
            if now >= due or [wait.number for wait in waits] != self._shown:
                due = now + self._period
                self._connection.send(self._news())
            while not self._queue.empty():
                message, sent = self._queue.get()
                self._connection.send(self._news(behind=0.0), message)
                sent.set()

    def _waits(
        self, threads: dict[int, tuple[int, Note, float]], behind: float = BEHIND
    ) -> list[Wait]:
        """Return the waits of this process's threads, and the longest one of its streams."""
        now = time.monotonic()
        found = [
            Wait(number, note.track.key, note.seq, round(now - begun, 2))
            for number, note, begun in threads.values()
        ]
        call = self._recorder.streams.pending()
        if call is not None and (now - call.begun >= behind or call.number in self._shown):
            (track, seq), seconds = call.note, round(now - call.begun, 2)
            found.append(Wait(call.number, track.key, seq, seconds, stream=True))
        return found

    def _news(self, behind: float = BEHIND) -> messages.News:
        """Return all changes since the last news; a stream's waits after `behind` seconds."""
        # Waits are read first, so that the values read later include everything that they refer
        # to: the channel of a wait, and the calls before it.
        threads = self._recorder.waits.copy()
        waits = self._waits(threads, behind)
        free, foreign = self._recorder.free_threads(threads)
        tracks = list(self._recorder.tracks.values())
        fresh = {track.key: list(track.channel) for track in tracks if track.sent is None}
        counts = {track.key: track.count for track in tracks if track.count != track.sent}
        # A mark that is added meanwhile stays.
        taken = {t.key: [t.marks.popleft() for _ in range(len(t.marks))] for t in tracks}
        marks = {key: found for key, found in taken.items() if found}
        self._shown = [wait.number for wait in waits]
        for track in tracks:
            track.sent = counts.get(track.key, track.sent)
        step, entries = self._recorder.step, self._recorder.entries
        last = list(entries[-1]) if entries else []
        return messages.News(fresh, counts, marks, step, [*map(list, waits)], free, foreign, last)

    def tail(self) -> messages.Tail:
        """Return the last recorded calls."""
        return [list(entry) for entry in self._recorder.entries.copy()]

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the thread is awake, or has ended
            self._waker.send(b"\0")

    def _hear(self) -> None:
        for message in self._connection.receive():
            match message:
                case messages.Welcome():
                    self.welcome.set()
                case messages.Ask(now):
                    frame = sys._current_frames().get(threading.main_thread().ident or 0)
                    stack = "".join(traceback.format_stack(frame)[-6:]) if frame else ""
                    news = self._news(behind=0.0)  # before the tail, which then covers its counts
                    self._connection.send(news, messages.Answer(now, self.tail(), stack))
                case messages.Warn(text):
                    logger.warning("%s", text)
                case Fault(kind, ranks, text):
                    self._finish(Fault(kind, tuple(ranks), text))
                case messages.Off(why):
                    self._turn_off(why)
                case messages.End():
                    self._finish(None)
        if not self._connection.open and not self._over:
            self._turn_off("its monitor on rank 0's host has ended or cannot be reached")

    def _turn_off(self, why: str) -> None:
        """Turn the guard off and let the job continue."""
        level = logging.INFO if self._rank else logging.WARNING
        logger.log(level, "the guard is off: %s", why.rstrip())
        self._finish(None)

    def _finish(self, fault: Fault | None) -> None:
        self._over = True
        self._recorder.verdict.conclude(fault)
        if fault is None:
            return
        if any(track.device for track in list(self._recorder.tracks.values())):
            # A backend's own watchdog may kill this process before the error is raised.
            logger.error("%s", fault.text.split("\n", 1)[0])
            abort_device_groups()
        for pause in (0.002, 0.01, 0.05, 0.2, 1.0):  # repeat: a call may just have begun
            break_gloo_groups()
            time.sleep(pause)
            if not self._recorder.waits:
                return
