"""The exceptions of every scaletorch package: one root, and one class for each kind of error."""

from __future__ import annotations


class ScaletorchError(Exception):
    """Root of all exceptions that scaletorch raises deliberately."""


class InvalidArgumentError(ScaletorchError, ValueError):
    """An invalid argument, found on this rank before any communication."""


class NotInGroupError(InvalidArgumentError):
    """A rank is not a member of the process group; the message names the members."""


class StateError(ScaletorchError, RuntimeError):
    """A call at the wrong time, or a missing or inconsistent environment."""


class MismatchError(ScaletorchError, RuntimeError):
    """Ranks disagree on values that must be equal; the message shows both sides."""


class RehearsalError(ScaletorchError, RuntimeError):
    """A layout's results differ from one process's; the message says where and by how much."""


class VersionMismatchError(ScaletorchError, ImportError):
    """Wheels of this project are incompatible; the message names both and the remedy."""


class RankFaultError(ScaletorchError, RuntimeError):
    """The guard found a rank that failed, died, left, hangs or makes different calls.

    Attributes:
        ranks: The guilty ranks; both sides if the guard cannot decide.
        kind: `exception`, `death`, `left`, `mismatch`, `cycle` or `slow`.
        text: The full report, which is also the message.
    """

    def __init__(self, text: str, *, ranks: tuple[int, ...] = (), kind: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.ranks = ranks
        self.kind = kind


class NonFiniteError(ScaletorchError, RuntimeError):
    """Gradients, or their norm, are infinite or NaN; the message says where."""


class RankFailedError(ScaletorchError, RuntimeError):
    """One or more launched ranks failed, hung or died; the message has every traceback.

    Attributes:
        failures: Rank → traceback text, in the order in which the ranks failed.
        exceptions: Rank → the exception itself, if it could be pickled.
        finished: Ranks that returned.
        hung: Ranks that had neither returned nor failed when they were stopped.
    """

    def __init__(
        self,
        message: str,
        *,
        failures: dict[int, str] | None = None,
        exceptions: dict[int, BaseException] | None = None,
        finished: tuple[int, ...] = (),
        hung: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.failures = failures or {}
        self.exceptions = exceptions or {}
        self.finished = finished
        self.hung = hung
