"""What became of the job, as far as this process knows: the errors of all its threads ask here."""

from __future__ import annotations

import re
import threading

from ..dist.errors import RankFaultError
from .facts import Fault

PATIENCE = 3.0  # s that an error of the network waits for the verdict on its cause

_NETWORK = re.compile(r"gloo|pair closure|connect|timed? ?out|broken pipe|nccl|peer", re.IGNORECASE)


class Verdict:
    """The verdict on the job.

    Attributes:
        over: Is set when the guard has ended, with a fault or without one.
        fault: The fault, or None.
    """

    def __init__(self) -> None:
        self.over = threading.Event()
        self.fault: Fault | None = None

    def conclude(self, fault: Fault | None) -> None:
        """End the guard, with a fault or without one."""
        self.fault = fault
        self.over.set()

    def check(self) -> None:
        """Raise the fault, if there is one.

        Raises:
            RankFaultError: There is a fault.
        """
        if self.fault is not None:
            raise self.error()

    def error(self) -> RankFaultError:
        """Return the error that tells of the fault."""
        kind, ranks, text = self.fault or Fault("", (), "")
        return RankFaultError(text, ranks=ranks, kind=kind)

    def await_it(self) -> bool:
        """Wait a moment for the verdict; return whether the guard has ended."""
        return self.over.wait(PATIENCE)

    def explain(self, error: Exception) -> BaseException:
        """Return the fault that an error of the network comes from, or the error itself."""
        if self.fault is None and not _NETWORK.search(str(error)):
            return error
        self.await_it()
        return error if self.fault is None else self.error()

    def caused(self, error: BaseException) -> bool:
        """Return whether an error comes from a fault that was found."""
        return isinstance(error, RankFaultError) or (
            isinstance(error, RuntimeError) and self.explain(error) is not error
        )
