"""Ctrl-C: all ranks end together after the same step, so that a checkpoint can be written."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class StopFile:
    """How ranks on this machine learn that they are to stop, without a message of their own.

    Rank 0 finds the request at the beginning of a step and writes the number of the next one. No
    rank can begin that one before rank 0 has taken part in this one, so that all read the number.

    Args:
        path: Of the request; None if nobody will ask.
        leader: Whether this is rank 0.
    """

    def __init__(self, path: Path | None, *, leader: bool) -> None:
        self._path, self._leader = path, leader

    def before(self, step: int) -> bool:
        """Return whether to stop before 0-based `step`; called before each."""
        if self._path is None:
            return False
        last = self._path.with_suffix(".step")
        if self._leader and not last.exists() and self._path.exists():
            whole = last.with_suffix(".new")
            whole.write_text(str(step + 1))
            os.replace(whole, last)
        return last.exists() and step >= int(last.read_text())


@contextmanager
def stop_on_ctrl_c() -> Iterator[Path | None]:
    """Yield the file that the first Ctrl-C makes; the second one interrupts as ever.

    Outside of the main thread nothing is caught, and None is yielded.
    """
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="scaletorch-") as folder:
        path = Path(folder) / "stop"

        def ask(number: int, frame: FrameType | None) -> None:
            path.touch()
            signal.signal(number, before)
            sys.stderr.write("\nstopping after this step; Ctrl-C again stops at once\n")

        before = signal.signal(signal.SIGINT, ask)
        try:
            yield path
        finally:
            signal.signal(signal.SIGINT, before)
