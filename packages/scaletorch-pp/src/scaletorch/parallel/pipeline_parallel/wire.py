"""How hidden states and their gradients travel between stages: one message each way at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...dist.dist import exchange
from ...dist.errors import InvalidArgumentError
from ..pg_manager import describe_rank


@dataclass(frozen=True, slots=True)
class Wire:
    """The form of every message of one step.

    Attributes:
        shape: shape of the hidden states of one micro-batch, ``[B, L, H]``.
        dtype: dtype in which they travel.
        device: device on which they are received.
        ranks: global ranks of the stages, in stage order.
        group: their process group; None in one process.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    ranks: tuple[int, ...]
    group: ProcessGroup | None

    def swap(
        self, tensor: Tensor | None, to_stage: int | None, from_stage: int | None
    ) -> Tensor | None:
        """Send ``tensor`` and receive another at the same time; a None stage leaves that way out.

        Returns:
            The received tensor, not attached to any graph; None where nothing is received.
        """
        sends: list[tuple[Tensor, int]] = []
        recvs: list[tuple[Tensor, int]] = []
        if tensor is not None and to_stage is not None:
            sends.append((tensor, self.ranks[to_stage]))
        if from_stage is not None:
            buffer = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            recvs.append((buffer, self.ranks[from_stage]))
        if sends or recvs:
            exchange(sends, recvs, group=self.group)
        return recvs[0][0] if recvs else None

    def checked(self, output: Tensor) -> Tensor:
        """Return a stage's output as it may be sent.

        Under autocast it is cast to the wire's dtype, and its gradient comes back through the cast.

        Raises:
            InvalidArgumentError: another shape, dtype or device than the receiver expects.
        """
        expected = (self.shape, self.dtype, self.device.type)
        dtype = self.dtype if autocasts(self.device) else output.dtype
        came = (tuple(output.shape), dtype, output.device.type)
        if came != expected:
            raise InvalidArgumentError(
                f"{describe_rank()}: the next stage expects hidden states of shape "
                f"{self.shape}, {self.dtype}, on {self.device.type}, and this stage's output has "
                f"shape {tuple(output.shape)}, {output.dtype}, on {output.device.type}; pass the "
                "tensor_shapes, dtype and device that the layers return (torch.autocast casts)"
            )
        return output.to(dtype)


def autocasts(device: torch.device) -> bool:
    """Tell whether autocast is on for this kind of device; false where there is none."""
    available = torch.amp.is_autocast_available(device.type)
    return available and torch.is_autocast_enabled(device.type)


def checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return ``shape`` as a tuple.

    Raises:
        InvalidArgumentError: not a sequence of positive ints.
    """
    sizes = tuple(shape) if isinstance(shape, Sequence) else ()
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise InvalidArgumentError(
            "tensor_shapes is the shape of one micro-batch's hidden states, such as "
            f"(micro_batch_size, sequence_length, hidden_size), got {shape!r}"
        )
    return sizes


def checked_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return ``dtype``.

    Raises:
        InvalidArgumentError: not a floating point dtype.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        message = f"dtype is that of the hidden states, such as torch.bfloat16, got {dtype!r}"
        raise InvalidArgumentError(message)
    return dtype
