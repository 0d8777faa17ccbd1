"""What a block asks experts for: noted in its first run, and answered in its second one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from .standing import Call

Sort = tuple[torch.dtype, torch.dtype | None]  # of a call: the dtype of rows, and of autocast
Kinds = dict[Sort, torch.dtype]  # the dtype of results of a sort of call
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
