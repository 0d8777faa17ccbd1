"""The watcher: a thread of every rank that tells the monitor what this process does.

It also looks at the processes beside it, and tells this rank of the verdict.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import selectors
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from .facts import Fault, entry_to_list, lease_period
from .interrupt import break_gloo_groups
from .merge import picture_of_folder
from .mismatch import find_mismatch
from .news import News
from .processes import process_signs, process_state, thread_stack
from .recorder import Recorder
from .wire import Line
from .wording import tell

LOOK = 0.1  # s between two looks at what this process waits in
LAST = 1.0  # s that rank 0's process gets to end too, where the monitor has
TAIL = 256  # entries that are sent

Conclusion = tuple[str, tuple[int, ...], str]

logger = logging.getLogger(__package__)


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
        conclude: Callable[[Conclusion | None], None],
    ) -> None:
        super().__init__(name="scaletorch-guard-watcher", daemon=True)
        self._line, self._recorder, self._rank, self._folder = line, recorder, rank, folder
        self._conclude = conclude
        self._main = threading.main_thread().ident
        self._period = lease_period(size)
        self._words: queue.SimpleQueue[tuple[dict[str, Any], threading.Event]] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self.welcome = threading.Event()
        self._news = News(recorder)
        self._neighbours: list[tuple[int, int]] = []
        self._first: int | None = None  # rank 0's process, where it is on this host
        self._stopped: set[int] = set()  # ranks whose processes are seen stopped
        self._over = False

    @property
    def wake(self) -> int:
        """The descriptor that signals wake this thread by."""
        return self._waker.fileno()

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
        for end in (self._line, self._woken, self._waker):
            end.close()

    def run(self) -> None:
        """Serve until the end; a fault of the guard itself is told as such."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._line, selectors.EVENT_READ)
                selector.register(self._woken, selectors.EVENT_READ)
                self._serve(selector)
        except Exception as error:
            if not self._over:  # else the rank has just let go of what this thread used
                why = "".join(traceback.format_exception(error))
                self._line.send({"is": "off", "why": f"on rank {self._rank}: {why}"})
                self._turn_off(why)
        finally:
            self.disown()

    def _serve(self, selector: selectors.BaseSelector) -> None:
        due = 0.0
        while not self._over:
            ready = {key.fileobj for key, _ in selector.select(LOOK)}
            if self._woken in ready:
                self._signals(self._woken.recv(256))
            if self._line in ready:
                self._hear()
            now = time.monotonic()
            if now >= due or self._news.waits_changed():
                due = now + self._period
                self._line.send(self._news.lease())
                self._look_around()
            while not self._words.empty():
                message, sent = self._words.get()
                self._line.send({**self._news.lease(), **message})
                sent.set()

    def tail(self) -> list[list[Any]]:
        """Return the last entries of the ledger."""
        return [entry_to_list(entry) for entry in self._recorder.ledger.tail(TAIL)]

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it is awake, or at its end
            self._waker.send(b"\0")

    def _signals(self, numbers: bytes) -> None:
        """Free the main thread for a Ctrl-C that came while it was blocked in a wait."""
        ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if signal.SIGINT in numbers and ours and self._main in self._recorder.waits:
            what = "KeyboardInterrupt"
            word = {"is": "raised", "what": what, "headline": what, "tail": self.tail()}
            self._line.send({**self._news.lease(), **word})
            break_gloo_groups()

    def _hear(self) -> None:
        for message in self._line.receive():
            kind = message["is"]
            if kind == "welcome":
                self._neighbours = [(rank, pid) for rank, pid in message["watch"]]
                self._first = message["first"]
                self.welcome.set()
            elif kind == "ask":
                answer = {"is": "answer", "number": message["number"], "tail": self.tail()}
                stack = thread_stack(self._main)
                self._line.send({**self._news.lease(), **answer, "stack": stack})
            elif kind == "look":
                signs = process_signs(message["pid"])
                self._line.send({"is": "signs", "ranks": [message["rank"]], "signs": signs})
            elif kind == "warn":
                logger.warning("%s", message["text"])
            elif kind == "fault":
                self._finish((message["kind"], tuple(message["ranks"]), message["text"]))
            elif kind == "off":
                self._turn_off(message["why"])
            elif kind == "end":
                self._finish(None)
        if not self._line.open and not self._over:
            self._monitor_gone()

    def _look_around(self) -> None:
        """Look at the neighbours' processes."""
        stopped = {rank for rank, pid in self._neighbours if process_state(pid) == "T"}
        if stopped:  # as long as it lasts: this rank may be the next to fall silent
            self._line.send({"is": "stopped", "ranks": sorted(stopped)})
        if self._stopped - stopped:
            self._line.send({"is": "running", "ranks": sorted(self._stopped - stopped)})
        self._stopped = stopped

    def _monitor_gone(self) -> None:
        """Conclude what happened to the monitor: it went with rank 0, or by itself."""
        deadline = time.monotonic() + LAST
        while self._first is not None and time.monotonic() < deadline:
            if process_state(self._first) == "X":
                self._first_gone()
                return
            time.sleep(0.02)
        self._turn_off("its monitor, a process beside rank 0, has ended or is out of reach")

    def _first_gone(self) -> None:
        """Conclude from the ledgers of this host what happened to rank 0."""
        picture = picture_of_folder(self._folder)
        label = picture.reports[0].label if 0 in picture.reports else "rank 0"
        died = Fault("death", (0,), f"{label} died: its process ended without a word")
        fault = find_mismatch(picture, time.monotonic()) or died
        self._finish((fault.kind, fault.ranks, tell(fault, picture, self._folder)))

    def _turn_off(self, why: str) -> None:
        """Go on without a guard: its own fault is none of the job's."""
        level = logging.INFO if self._rank else logging.WARNING
        logger.log(level, "the guard is off: %s", why.rstrip())
        self._finish(None)

    def _finish(self, verdict: Conclusion | None) -> None:
        self._over = True
        self._conclude(verdict)
        if verdict is not None:
            for pause in (0.002, 0.01, 0.05, 0.2, 1.0):  # a call may have begun just before
                break_gloo_groups()
                time.sleep(pause)
                if not self._recorder.waits:
                    return
