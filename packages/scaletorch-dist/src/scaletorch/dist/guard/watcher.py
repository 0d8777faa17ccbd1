"""The watcher: a thread of every rank that tells the monitor what this process does.

It also looks at a neighbour's process, and concludes by itself that rank 0, and the monitor with
it, has died or is stopped.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from .facts import Fault, entry_to_list
from .interrupt import break_gloo_groups
from .merge import picture_of_folder
from .mismatch import find_mismatch
from .processes import process_state, thread_stack
from .recorder import Recorder
from .wire import Line
from .wording import tell

LEASE = 0.25  # s between two words to the monitor, with up to 256 ranks
LOOK = 0.1  # s between two looks at what this process waits in
FREEZE = 1.0  # s that rank 0 must be seen stopped
TAIL = 256  # entries that are sent


class Watcher(threading.Thread):
    """Tells the monitor of this process, and this process of a fault.

    Args:
        line: the connection to the monitor.
        recorder: what this process does.
        rank: this one.
        size: how many there are.
        folder: where the ledgers are.
        conclude: called with a fault's kind, ranks and text, once; None for the end without one.
    """

    def __init__(
        self,
        line: Line,
        recorder: Recorder,
        *,
        rank: int,
        size: int,
        folder: str,
        conclude: Callable[[tuple[str, tuple[int, ...], str] | None], None],
    ) -> None:
        super().__init__(name="scaletorch-guard-watcher", daemon=True)
        self._line, self._recorder, self._rank, self._folder = line, recorder, rank, folder
        self._conclude = conclude
        self._main = threading.main_thread().ident
        self._period = LEASE * max(1.0, size / 256)
        self._words: queue.SimpleQueue[tuple[dict[str, Any], threading.Event]] = queue.SimpleQueue()
        self._woken, self.wake = os.pipe()
        for end in (self._woken, self.wake):
            os.set_blocking(end, False)
        self.welcome = threading.Event()
        self._neighbours: list[tuple[int, int]] = []
        self._stopped: dict[int, float] = {}  # rank → since when its process is seen stopped
        self._told: dict[str, int] = {}  # channel → calls that the monitor knows of
        self._marked: dict[str, int] = {}  # channel → the last mark that it knows
        self._step = -1
        self._shown: list[int] = []  # numbers of the waits that it knows
        self._over = False

    def say(self, message: dict[str, Any], timeout: float) -> None:
        """Have a word sent to the monitor, and wait until it is."""
        sent = threading.Event()
        self._words.put((message, sent))
        self._wake()
        sent.wait(timeout)

    def end(self) -> None:
        """Say no more."""
        self._over = True
        self._wake()
        if threading.current_thread() is not self:
            self.join(1.0)

    def disown(self) -> None:
        """Close this end in a fork of the process, so that it does not keep it open."""
        self._line.close()

    def run(self) -> None:
        """Serve until the end."""
        due = 0.0
        while not self._over:
            ready, _, _ = select.select([self._line.fileno(), self._woken], [], [], LOOK)
            if self._woken in ready:
                self._signals(os.read(self._woken, 256))
            if self._line.fileno() in ready:
                self._hear()
            now = time.monotonic()
            waits = [number for number, _, _ in list(self._recorder.waits.values())]
            if now >= due or waits != self._shown:
                due = now + self._period
                self._line.send(self.lease())
                self._shown = waits
                self._look_around(now)
            while not self._words.empty():
                message, sent = self._words.get()
                self._line.send({**self.lease(), **message})
                sent.set()
        self._line.close()

    def lease(self) -> dict[str, Any]:
        """Return what is new."""
        recorder = self._recorder
        tracks = list(recorder.tracks.values())
        changed = [track for track in tracks if track.count != self._told.get(track.key)]
        fresh = [track for track in tracks if track.key not in self._told]
        steps = [step for step in list(recorder.steps) if step[0] > self._step]
        self._step = steps[-1][0] if steps else self._step
        marks = {
            track.key: [
                mark for mark in list(track.marks) if mark[0] > self._marked.get(track.key, 0)
            ]
            for track in changed
        }
        free, foreign = recorder.free_threads()
        now = time.monotonic()
        waits = [
            [number, note.track.key, note.seq, round(now - begun, 2)]
            for number, note, begun in list(recorder.waits.values())
        ]
        counts = {track.key: track.count for track in changed}
        for key, found in marks.items():
            if found:
                self._marked[key] = found[-1][0]
        self._told |= counts
        return {
            "is": "lease",
            "channels": {
                t.key: [t.channel.label, t.channel.members, t.channel.message] for t in fresh
            },
            "counts": counts,
            "marks": {key: found for key, found in marks.items() if found},
            "steps": steps,
            "waits": waits,
            "free": free,
            "foreign": foreign,
        }

    def tail(self) -> list[list[Any]]:
        """Return the last entries of the ledger."""
        return [entry_to_list(entry) for entry in self._recorder.ledger.tail(TAIL)]

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is awake
            os.write(self.wake, b"\0")

    def _signals(self, numbers: bytes) -> None:
        """Free the main thread for a Ctrl-C that came while it was blocked in a wait."""
        ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if signal.SIGINT in numbers and ours and self._main in self._recorder.waits:
            what = "KeyboardInterrupt"
            self._line.send({"is": "raised", "what": what, "tail": self.tail()})
            break_gloo_groups()

    def _hear(self) -> None:
        for message in self._line.receive():
            kind = message["is"]
            if kind == "welcome":
                self._neighbours = [(rank, pid) for rank, pid in message["watch"]]
                self.welcome.set()
            elif kind == "ask":
                self._line.send(self.lease())
                answer = {"is": "answer", "number": message["number"], "tail": self.tail()}
                self._line.send({**answer, "stack": thread_stack(self._main)})
            elif kind == "fault":
                self._finish((message["kind"], tuple(message["ranks"]), message["text"]))
            elif kind == "end":
                self._finish(None)
        if not self._line.open and not self._over:
            self._monitor_gone("death", "died: its process ended without a word")

    def _look_around(self, now: float) -> None:
        """Look at the neighbours' processes."""
        stopped = [rank for rank, pid in self._neighbours if process_state(pid) == "T"]
        since = {rank: self._stopped.get(rank, now) for rank in stopped}
        resumed = [rank for rank in self._stopped if rank not in since]
        if stopped and set(since) != set(self._stopped):
            self._line.send({"is": "stopped", "ranks": stopped})
        if resumed:
            self._line.send({"is": "running", "ranks": resumed})
        self._stopped = since
        if 0 in since and now - since[0] >= FREEZE:
            self._monitor_gone("stopped", "is stopped (SIGSTOP, or a debugger)")

    def _monitor_gone(self, kind: str, how: str) -> None:
        """Conclude from the ledgers of this host what happened to rank 0."""
        picture = picture_of_folder(self._folder)
        label = picture.reports[0].label if 0 in picture.reports else "rank 0"
        fault = find_mismatch(picture, time.monotonic()) or Fault(kind, (0,), f"{label} {how}")
        self._finish((fault.kind, fault.ranks, tell(fault, picture, self._folder)))

    def _finish(self, verdict: tuple[str, tuple[int, ...], str] | None) -> None:
        self._over = True
        self._conclude(verdict)
        if verdict is not None:
            for pause in (0.002, 0.01, 0.05, 0.2, 1.0):  # a call may have begun just before
                break_gloo_groups()
                time.sleep(pause)
                if not self._recorder.waits:
                    return
