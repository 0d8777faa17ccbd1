"""What stands in the place of a list's experts while the block around it loops over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

from torch import Tensor, nn

from ....dist.errors import InvalidArgumentError, StateError
from ...pg_manager import describe_rank

Call = Callable[[int, Tensor], Tensor]  # expert, what it is called with -> its result
_computing = ContextVar("experts that other ranks asked for compute", default=False)


class StandIn:
    """An expert, whoever has it: it can be called with one tensor, and nothing else.

    Args:
        name: The list's.
        number: The expert's.
        call: What is done in a call.
    """

    def __init__(self, name: str, number: int, call: Call) -> None:
        self._name, self._number, self._call = name, number, call

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the result for one tensor [..., H]."""
        given = [*args, *kwargs.values()]
        if len(given) != 1 or not isinstance(given[0], Tensor) or not given[0].dim():
            raise InvalidArgumentError(
                f"{describe_rank()}: expert {self._number} of '{self._name}' must be called with "
                f"one tensor [..., H], got {[type(each).__name__ for each in given]}: put what it "
                "needs besides into the module"
            )
        return self._call(self._number, given[0])

    forward = __call__

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python and torch ask whether there is such a method
            raise AttributeError(name)
        raise InvalidArgumentError(
            f"{describe_rank()}: the block around '{self._name}' takes '{name}' of expert "
            f"{self._number}, which may be another rank's: in a loop over experts it can call "
            "them, and no more"
        )


class LoopedList(nn.ModuleList):
    """Comes before a list's class: while its block runs, it has all experts, as stand-ins."""

    _standing: Mapping[str, StandIn] | None = None

    def __getitem__(self, idx: Any) -> Any:
        """Return an expert, or a list of some."""
        return super().__getitem__(idx) if self._standing is None else [*self][idx]

    def __len__(self) -> int:
        return len(_now(self))

    def __iter__(self) -> Iterator[Any]:
        return iter(_now(self).values())


class LoopedDict(nn.ModuleDict):
    """The same before a dict's class."""

    _standing: Mapping[str, StandIn] | None = None

    def __getitem__(self, key: str) -> Any:
        """Return an expert."""
        return _now(self)[key]

    def __len__(self) -> int:
        return len(_now(self))

    def __iter__(self) -> Iterator[str]:
        return iter(_now(self))

    def __contains__(self, key: str) -> bool:
        return key in _now(self)

    def keys(self) -> Any:
        """Return the names of experts."""
        return _now(self).keys()

    def items(self) -> Any:
        """Return names and experts."""
        return _now(self).items()

    def values(self) -> Any:
        """Return experts."""
        return _now(self).values()


def _now(experts: LoopedList | LoopedDict) -> Mapping[str, Any]:
    return experts._modules if experts._standing is None else experts._standing


@contextmanager
def standing_in(
    experts: LoopedList | LoopedDict, name: str, keys: Sequence[str], call: Call
) -> Iterator[None]:
    """Let a list be one of stand-ins, which is what its block then loops over.

    Args:
        experts: This rank's of the list.
        name: The list's.
        keys: Names of all experts in it.
        call: Called for each call of one.
    """
    state = vars(experts)
    state["_standing"] = {key: StandIn(name, at, call) for at, key in enumerate(keys)}
    try:
        yield
    finally:
        del state["_standing"]


@contextmanager
def computing() -> Iterator[None]:
    """Let this rank's experts be called, for all ranks."""
    token = _computing.set(True)
    try:
        yield
    finally:
        _computing.reset(token)


def refuse_alone(expert: nn.Module, args: Any) -> None:
    """Refuse a call of an expert that no other rank knows of; a hook of this rank's experts.

    Raises:
        StateError: It is one.
    """
    if not _computing.get():
        raise StateError(
            f"{describe_rank()}: an expert ({type(expert).__name__}) of a divided list was called "
            "outside of the forward of the block that holds the list, so with this rank's tokens "
            "alone: only that block can loop over them"
        )
