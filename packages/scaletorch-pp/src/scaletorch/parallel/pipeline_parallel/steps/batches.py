"""The micro-batches of a step: reading, checks, and the default loss."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....dist.building import map_tensors, tensors_in
from ....dist.dist import all_reduce
from ....dist.errors import InvalidArgumentError
from ...pg_manager import IGNORED, describe_rank, get_process_group_manager, token_loss_sum
from ..runtime.forms import Hidden, autocasts, signature, tensor_of

Batch = Mapping[str, Any]
LossFunction = Callable[[Any, Batch], Tensor]

# Entries of a micro-batch that are not passed to the model's forward by keyword.
NOT_PASSED = ("input_ids", "labels")


@dataclass(frozen=True)
class MicroBatches:
    """The input of a step.

    Attributes:
        batches: The micro-batches.
        device: Device on which the stage computes them.
        shape: Required shape of hidden states; None takes any.
        dtype: Required dtype of hidden states, to which autocast casts them; None takes any.
    """

    batches: list[Batch]
    device: torch.device
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None

    def inputs(self, micro_batch: int, hidden: Hidden | None) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of a stage's forward: `hidden` or the ids, and the rest by name."""
        batch = self.batches[micro_batch]
        entries = {name: self._moved(v) for name, v in batch.items() if name not in NOT_PASSED}
        return self._moved(batch["input_ids"]) if hidden is None else hidden, entries

    def ids(self, micro_batch: int) -> Tensor | None:
        """Return a micro-batch's `input_ids`; None if they are not a tensor.

        Integers are moved to the device. Floating point inputs are not, since later stages use
        their form alone.
        """
        ids = self.batches[micro_batch]["input_ids"]
        if not isinstance(ids, Tensor):
            return None
        return ids if ids.is_floating_point() else self._moved(ids)

    @cached_property
    def signatures(self) -> list[Hashable]:
        """For each micro-batch, the facts that decide the form of its hidden states."""
        cast = autocasts(self.device) and torch.get_autocast_dtype(self.device.type)
        mode = torch.is_grad_enabled(), cast, cast and self.dtype
        return [
            (*((n, signature(batch[n])) for n in sorted(batch) if n != "labels"), *mode)
            for batch in self.batches
        ]

    def describe(self) -> list[str]:
        """Return a few lines with the facts that must be the same on all ranks."""
        lines = [
            f"{len(self.batches)} micro-batches",
            f"hidden states {self.shape} of {self.dtype}",
        ]
        first = 0
        for kind, run in groupby(self.signatures):
            count = len(list(run))
            lines.append(f"micro-batches {first} to {first + count - 1}: {kind}")
            first += count
        return lines

    def checked(self, output: Hidden) -> Hidden:
        """Return a stage's output, checked against the announced shape and dtype, to be sent.

        Under autocast it is cast to `dtype`, and its gradient comes back through the cast.
        """
        announced = self.shape is not None or self.dtype is not None
        tensors = list(tensors_in(output))
        if len(tensors) > 1 or not (announced or tensors[0].device != self.device):
            return output
        (tensor,) = tensors
        cast = self.dtype is not None and autocasts(self.device)
        came = tuple(tensor.shape), self.dtype if cast else tensor.dtype, tensor.device.type
        expected = self.shape or came[0], self.dtype or came[1], self.device.type
        if came != expected:
            raise InvalidArgumentError(
                f"{describe_rank()}: the next stage expects hidden states of shape "
                f"{expected[0]}, {expected[1]}, on {expected[2]}, and this stage's output has "
                f"shape {came[0]}, {tensor.dtype}, on {came[2]}; pass the tensor_shapes, dtype and "
                "device that the layers return, or None for the first two (torch.autocast casts)"
            )
        return map_tensors(lambda t: t.to(self.dtype), output) if cast else output

    def _moved(self, value: Any) -> Any:
        return value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value


def read(
    data_loader: Iterable[Batch], *, with_labels: bool, first: str = "input_ids"
) -> list[Batch]:
    """Return this step's micro-batches.

    Args:
        data_loader: The micro-batches.
        with_labels: Whether each needs `labels`.
        first: The entry that each needs: the first argument of the model's forward.

    Raises:
        InvalidArgumentError: There is no micro-batch, or one is not a mapping, lacks an entry, has
            labels that are not a tensor, or has an entry that requires grad.
    """
    batches = list(data_loader)
    if not batches:
        message = "data_loader has no micro-batches: every stage needs all of a step's"
        raise InvalidArgumentError(f"{describe_rank()}: {message}")
    needed = (first, "labels") if with_labels else (first,)
    for index, batch in enumerate(batches):
        problem = _problem(batch, needed, index)
        if problem:
            raise InvalidArgumentError(f"{describe_rank()}: {problem}")
    return batches


def _problem(batch: Any, needed: Sequence[str], index: int) -> str:
    """Return the reason why a micro-batch cannot be used, or ""."""
    if not isinstance(batch, Mapping):
        return f"micro-batch {index} must be a mapping, got {type(batch).__name__}"
    missing = [name for name in needed if name not in batch]
    if missing:
        return f"micro-batch {index} has no {' and no '.join(missing)}, only {list(batch)}"
    if "labels" in needed and not isinstance(batch["labels"], Tensor):
        came = type(batch["labels"]).__name__
        return f"labels of micro-batch {index} must be a tensor [B, L], got {came}"
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.requires_grad:
            return (
                f"{name} of micro-batch {index} requires grad, and every stage has a copy of its "
                "own, so no gradient of it would be whole; make it a parameter of a layer, or "
                "detach it"
            )
    return ""


def checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return `shape` as a tuple; refuse anything but a sequence of positive ints."""
    sizes = tuple(shape) if isinstance(shape, Sequence) else ()
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise InvalidArgumentError(
            "tensor_shapes is the shape of one micro-batch's hidden states, such as "
            f"(micro_batch_size, sequence_length, hidden_size), got {shape!r}"
        )
    return sizes


def checked_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return `dtype`; refuse anything but a floating point dtype."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        message = f"dtype is that of the hidden states, such as torch.bfloat16, got {dtype!r}"
        raise InvalidArgumentError(message)
    return dtype


def token_mean_loss(
    batches: Iterable[Batch], device: torch.device, group: ProcessGroup | None
) -> LossFunction:
    """Return the loss of a micro-batch: the sum of its token losses over the step's valid tokens.

    The valid tokens of all `batches` count. If the pipeline is the manager's pp axis, the tokens of
    all ranks of its CP x DP group count, so that losses and gradients add up over micro-batches and
    ranks. A pipeline over another group counts its own tokens alone. `labels` [B, L] are aligned
    with the outputs, and -100 marks tokens to ignore.
    """
    count = torch.zeros((), dtype=torch.int64, device=device)
    for batch in batches:
        count += (batch["labels"] != IGNORED).sum().to(device)
    manager = get_process_group_manager()
    if manager is not None and group is manager.group("pp"):
        all_reduce(count, group=manager.cp_dp_group)
    count.clamp_(min=1)

    def loss(output: Any, batch: Batch) -> Tensor:
        return token_loss_sum(tensor_of(output), batch["labels"].to(device)) / count

    return loss
