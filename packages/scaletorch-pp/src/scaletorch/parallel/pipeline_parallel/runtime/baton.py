"""Two works on two threads that hand a baton to and fro: who has it computes, the other waits."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from ....dist.building import acting_for
from .carried import carried

Work = Callable[[], object]
SetAside = Callable[[], Work]


class Abandoned(BaseException):
    """Ends a work whose other one has raised; no handler of errors on its way is meant by it."""


class Baton:
    """Runs two works, of which only one computes at any time.

    The first has the baton until it calls `hand_over`; then the second runs on a thread of its own
    until it does so too, or ends. So which of them computes next depends on their own calls alone,
    and ranks whose works make the same calls make them in the same order.

    Args:
        set_aside: Sets aside what belongs to the work that runs, and returns what puts it back.

    Attributes:
        seconds: How long each of the two has had the baton.
    """

    def __init__(self, set_aside: SetAside) -> None:
        self.seconds = [0.0, 0.0]
        self._set_aside = set_aside
        self._turn = 0
        self._since = time.perf_counter()
        self._over = [False, False]
        self._wakes = threading.Semaphore(0), threading.Semaphore(0)
        self._failed: BaseException | None = None

    def hand_over(self) -> None:
        """Let the other work run until it hands the baton back, or ends.

        Raises:
            Abandoned: The other one has raised.
        """
        own = self._turn  # not the thread's: autograd runs nodes of a device on threads of its own
        if self._failed is None and not self._over[1 - own]:
            put_back = self._set_aside()
            self._give(1 - own)
            self._wakes[own].acquire()
            put_back()
        if self._failed is not None:
            raise Abandoned

    def run(self, first: Work, second: Work) -> None:
        """Run both; what one raises is raised here, and ends the other, which waits.

        Random draws of the first go on as if it ran alone, and so do those behind both.
        """
        work = carried(second, acting_for(threading.get_ident(), sys._getframe()))
        thread = threading.Thread(target=self._second, args=(work,), daemon=True)
        thread.start()
        try:
            first()
        except BaseException as error:
            self._failed = self._failed or error
        if self._turn == 0:  # else a signal has ended its wait, and the other may be stuck
            put_back = self._set_aside()
            self._over[0] = True
            self._give(1)
            thread.join()
            put_back()
        failed, self._failed = self._failed, None
        if failed is not None:
            try:
                raise failed
            finally:
                failed = None  # its traceback has this frame

    def _second(self, work: Work) -> None:
        self._wakes[1].acquire()
        if self._failed is None:
            try:
                work()
            except BaseException as error:
                self._failed = self._failed or error
        self._over[1] = True
        self._give(0)

    def _give(self, to: int) -> None:
        now = time.perf_counter()
        self.seconds[self._turn] += now - self._since
        self._turn, self._since = to, now
        self._wakes[to].release()
