"""A loss of the user's own: called for each micro-batch, checked, and compared over ranks.

A mistake that one rank finds in it is kept until the step has run to its end, so that no rank waits
for another; then all ranks raise.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..dist.building import agree, caught, tensors_in
from ..dist.errors import InvalidArgumentError, MismatchError
from ..parallel.pg_manager import IGNORED, ProcessGroupManager
from ..parallel.tensor_parallel import ColumnParallelLinear
from .batches import Batch, Called, token_count
from .loss_batch import LossBatch

Number = int | float | Tensor
LossFunction = Callable[[Any, Any], tuple[Tensor, Number]]
CountFunction = Callable[[Any], Number]

_ALIKE = 1e-3  # how far sums on ranks that compute the same may be apart
_PAIR = "loss_fn(output, micro_batch) must return (sum of the losses, how many they are)"


class OwnLoss:
    """A loss_fn on this rank.

    Args:
        loss_fn: Returns the sum of a micro-batch's losses and how many they are.
        count_fn: Returns the latter from the micro-batch alone; None counts labels.
        head: The layer whose logits stay sharded.
        manager: The grid.
        trains: Whether there is a backward.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        count_fn: CountFunction | None,
        head: ColumnParallelLinear | None,
        manager: ProcessGroupManager,
        *,
        trains: bool,
    ) -> None:
        self._loss_fn, self._count_fn = loss_fn, count_fn
        self._head, self._manager, self._trains = head, manager, trains
        self._counts: list[tuple[Number, float]] = []
        self._problem: Exception | None = None

    def require_functions(self) -> None:
        """Refuse what cannot be called.

        Raises:
            InvalidArgumentError: It is no function.
        """
        for name, function in (("loss_fn", self._loss_fn), ("count_fn", self._count_fn)):
            if function is not None and not callable(function):
                raise InvalidArgumentError(
                    f"{name} must be a function, got {type(function).__name__}"
                )

    def count(self, batch: Batch) -> float:
        """Return how many losses a micro-batch has, from its entries alone."""
        seen = LossBatch(batch, self._head, self._manager)
        return checked_count(token_count(seen) if self._count_fn is None else self._count_fn(seen))

    def call(self, output: Any, batch: Called) -> tuple[Tensor, Number]:
        """Return the sum and the count of a micro-batch; nothing, with a graph, if it fails."""
        try:
            seen = LossBatch(batch.micro_batch, self._head, self._manager)
            total, count = _checked_pair(self._loss_fn(output, seen), trains=self._trains)
        except Exception as error:  # the other ranks are told at the end of the step
            self._problem = self._problem or error
            return _nothing(output), 0
        self._counts.append((count, batch.count))
        return total, count

    def settle(self, total: Tensor | float) -> None:
        """Raise what a rank has found in this step, on every rank.

        Args:
            total: The sum of this rank's losses, which ranks that differ in tp alone share.

        Raises:
            InvalidArgumentError: The loss_fn's return does not do.
            MismatchError: Another rank has raised, or its sum differs.
        """
        world = self._manager.world_group
        (bits,) = struct.unpack("q", struct.pack("d", float(total)))
        notes = agree("this step with a loss_fn", [], world, error=self._found(), note=bits)
        _require_alike([struct.unpack("d", struct.pack("q", n))[0] for n in notes], self._manager)

    def _found(self) -> Exception | None:
        """Return the problem, which is held no longer: its traceback has frames that hold this."""
        problem, self._problem = self._problem, None
        return problem or caught(self._require_counts)

    def _require_counts(self) -> None:
        for count, expected in self._counts:
            found = checked_count(count)
            if self._trains and not math.isclose(found, expected, rel_tol=1e-6):
                said = "count_fn" if self._count_fn else f"counting labels other than {IGNORED}"
                raise InvalidArgumentError(
                    f"loss_fn counted {found:g} losses in a micro-batch, and {said} gave "
                    f"{expected:g} before, by which gradients were divided: pass "
                    "train_step(..., count_fn=), a function of the micro-batch that returns the "
                    "count which loss_fn returns; drop this step's gradients"
                )


def checked_count(count: Any) -> float:
    """Return a count as a number.

    Raises:
        InvalidArgumentError: It is no finite number of at least 0.
    """
    one = isinstance(count, Tensor) and count.numel() == 1 and not count.is_complex()
    value = count.item() if one else count
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        came = f"a tensor {list(count.shape)}" if isinstance(value, Tensor) else repr(value)
        raise InvalidArgumentError(
            f"a count of losses must be a finite number of at least 0, got {came}"
        )
    return float(value)


def _checked_pair(found: Any, *, trains: bool) -> tuple[Tensor, Number]:
    """Return what a loss_fn returned, if its form will do; the count's value is read later."""
    if not isinstance(found, tuple | list) or len(found) != 2:
        came = f"{len(found)} values" if isinstance(found, tuple | list) else type(found).__name__
        raise InvalidArgumentError(f"{_PAIR}; it returned {came}")
    total, count = found
    if not isinstance(total, Tensor) or total.numel() != 1 or not total.is_floating_point():
        came = type(total).__name__
        if isinstance(total, Tensor):
            came = f"a tensor of shape {list(total.shape)}, {total.dtype}"
        raise InvalidArgumentError(f"{_PAIR}: the sum is one floating-point element, got {came}")
    if trains and not total.requires_grad:
        raise InvalidArgumentError(f"{_PAIR}: the sum has no gradient; do not detach it")
    if not isinstance(count, int | float | Tensor):
        raise InvalidArgumentError(f"{_PAIR}: the count is a number, got {type(count).__name__}")
    wide = torch.promote_types(total.dtype, torch.float32)
    return total.reshape(()).to(wide), count.detach() if isinstance(count, Tensor) else count


def _nothing(output: Any) -> Tensor:
    """Return zero, from which backward reaches all of an output."""
    found = [x.nan_to_num(0, 0, 0).sum() * 0 for x in tensors_in(output) if x.is_floating_point()]
    return torch.stack(found).sum() if found else torch.zeros(())


def _require_alike(sums: Sequence[float], manager: ProcessGroupManager) -> None:
    """Refuse sums that differ between ranks which differ in tp alone."""
    first: dict[Any, tuple[int, float]] = {}
    for rank, value in enumerate(sums):
        place = manager.grid.coordinates(rank)._replace(tp=0)
        other, usual = first.setdefault(place, (rank, value))
        size = max(abs(value), abs(usual))
        if abs(value - usual) > _ALIKE * size or math.isnan(value) != math.isnan(usual):
            raise MismatchError(
                f"loss_fn gave {value:g} on rank {rank} and {usual:g} on rank {other}, which hold "
                "the same positions and differ in tp alone: sum over shards of the vocabulary "
                "(vocabulary_sums), and draw nothing at random in it"
            )
