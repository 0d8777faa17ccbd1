"""The errors of every scaletorch package: one root, and one class for each kind of mistake."""

from __future__ import annotations


class ScaletorchError(Exception):
    """Root of all errors that scaletorch raises on purpose."""


class InvalidArgumentError(ScaletorchError, ValueError):
    """A bad argument, found on this rank before any communication."""


class NotInGroupError(InvalidArgumentError):
    """A rank that is not a member of the process group; the message names the members."""


class StateError(ScaletorchError, RuntimeError):
    """A call at the wrong time, or an environment that is not as a launcher leaves it."""


class MismatchError(ScaletorchError, RuntimeError):
    """Ranks disagree about something they must agree on; the message shows both sides."""


class RehearsalError(ScaletorchError, RuntimeError):
    """A layout computes something else than one process; the message says where, and how far."""


class VersionMismatchError(ScaletorchError, ImportError):
    """Wheels of this project that do not fit together; the message names both and the way out."""


class RankFaultError(ScaletorchError, RuntimeError):
    """A guard has found that a rank failed, died, stopped, left or makes other calls than the rest.

    Attributes:
        ranks: The guilty ranks; both sides if it cannot be told which one is.
        kind: `exception`, `death`, `left`, `stopped`, `mismatch`, `cycle` or `slow`.
        text: The whole story, which is the message too.
    """

    def __init__(self, text: str, *, ranks: tuple[int, ...] = (), kind: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.ranks = ranks
        self.kind = kind


class NonFiniteError(ScaletorchError, RuntimeError):
    """Gradients, or their norm, are infinite or NaN; the message says where."""


class RankFailedError(ScaletorchError, RuntimeError):
    """One or more launched ranks failed, hung or died; the message holds every traceback.

    Attributes:
        failures: Rank → traceback text, in the order in which the ranks failed.
        exceptions: Rank → the exception itself, if it could be sent over.
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
