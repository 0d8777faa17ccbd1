"""What stands in the place of a list's experts while the block around it loops over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ....dist.errors import InvalidArgumentError, StateError
from ...pg_manager import describe_rank
from ..module import LoopedList

Sort = tuple[torch.dtype, torch.dtype | None]  # of a call: the dtype of rows, and of autocast
Kinds = dict[Sort, torch.dtype]  # the dtype of results of a sort of call
Call = Callable[[int, Tensor], Tensor]  # expert, what it is called with -> its result
_computing = ContextVar("experts that other ranks asked for compute", default=False)
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Ask:
    """One call of an expert.

    Attributes:
        expert: Its number in the whole list.
        given: What it was called with, [..., H].
        version: Of `given` at the call; -1 if it has none.
    """

    expert: int
    given: Tensor
    version: int

    @property
    def rows(self) -> Tensor:
        """What it was called with as rows, [n, H]."""
        return self.given.reshape(-1, self.given.shape[-1])


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


@contextmanager
def standing_in(experts: LoopedList, name: str, number: int, call: Call) -> Iterator[None]:
    """Let a list be one of stand-ins, which is what its block then loops over.

    Args:
        experts: This rank's of the list.
        name: The list's.
        number: Of all experts.
        call: Called for each call of one.
    """
    state = vars(experts)
    state["_standing"] = [StandIn(name, expert, call) for expert in range(number)]
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


def sort_of_call(dtype: torch.dtype, device: torch.device) -> Sort:
    """Return what the dtype of results hangs on: that of rows, and autocast."""
    on = torch.is_autocast_enabled(device.type)
    return dtype, torch.get_autocast_dtype(device.type) if on else None


def recording(asks: list[Ask], kinds: Kinds) -> Call:
    """Return what notes each call, and answers zeros.

    Args:
        asks: Gets the calls.
        kinds: The dtype of results, as far as it is known; else it is autocast's, or the rows'.
    """

    def call(expert: int, given: Tensor) -> Tensor:
        kept = given.clone() if given.is_inference() else given
        asks.append(Ask(expert, kept, -1 if kept.is_inference() else kept._version))
        sort = sort_of_call(given.dtype, given.device)
        kind = kinds.get(sort) or sort[1] or given.dtype
        return torch.zeros_like(given, dtype=kind, requires_grad=False)

    return call


def answering(name: str, asks: Sequence[Ask], results: Sequence[Tensor], used: list[int]) -> Call:
    """Return what answers each call with its result, if it is the call that was noted.

    Args:
        name: The list's.
        asks: The calls that were noted.
        results: Their results, [n, H].
        used: Gets a number for each answer.
    """

    def call(expert: int, given: Tensor) -> Tensor:
        number = len(used)
        ask = asks[number] if number < len(asks) else None
        if ask is None or ask.expert != expert or not _same(ask.given, given):
            raise unlike(name, ask, f"expert {expert} on {tuple(given.shape)}")
        used.append(number)
        # A copy, which the block may write to as it may to a result of a module.
        return results[number].clone().view_as(given)

    return call


def unlike(name: str, ask: Ask | None, now: str) -> InvalidArgumentError:
    """Return the error of a block whose second run is not the first one again."""
    first = "nothing more" if ask is None else f"expert {ask.expert} on {tuple(ask.given.shape)}"
    return InvalidArgumentError(
        f"{describe_rank()}: the block around '{name}' is run twice, to see what it asks experts "
        f"for and with their results; the first time it asked {first}, the second time {now}"
        f"{'' if ask is None else ', or other values'}: what one expert is asked for must not "
        "hang on another's result, nor on anything that changes between two calls"
    )


def check_kept(name: str, asks: Sequence[Ask]) -> None:
    """Refuse what was written to after an expert was called with it.

    Raises:
        InvalidArgumentError: A tensor is not what the expert was called with.
    """
    for ask in asks:
        if ask.version != -1 and ask.version != ask.given._version:
            raise InvalidArgumentError(
                f"{describe_rank()}: the block around '{name}' writes to what it has called expert "
                f"{ask.expert} with: give the expert a copy"
            )


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether both have the same bits; NaNs are like themselves."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    kind = _BITS.get(one.element_size())
    if kind is None or not one.is_floating_point():
        return torch.equal(one, other)
    return torch.equal(one.detach().view(kind), other.detach().view(kind))
