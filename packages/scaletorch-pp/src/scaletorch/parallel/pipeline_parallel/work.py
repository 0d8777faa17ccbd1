"""What training does with the micro-batches of a step on one stage: forward, loss, backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...dist.errors import InvalidArgumentError
from ..pg_manager import describe_rank
from .hidden import tensor_of
from .loss import Batch, LossFunction
from .wire import Wire, autocasts

# Entries of a micro-batch that the model's forward is not given by keyword.
NOT_PASSED = ("input_ids", "labels")
SYNC_SWITCH = "require_backward_grad_sync"


@dataclass(slots=True)
class TrainWork:
    """What the actions of a training schedule do.

    Attributes:
        model: the outermost module: its forward and backward are called.
        batches: this step's micro-batches.
        wire: the form of the hidden states.
        stage: this stage.
        loss_fn: loss of one micro-batch; not used before the last stage.
        switches: wrappers whose gradient sync waits for the last backward, and what it was.
        total: the sum of the losses so far, 0-d.
    """

    model: nn.Module
    batches: list[Batch]
    wire: Wire
    stage: int
    loss_fn: LossFunction | None
    switches: dict[nn.Module, bool]
    total: Tensor = field(init=False)
    _remaining: int = field(init=False)

    def __post_init__(self) -> None:
        dtype = torch.promote_types(self.wire.dtype, torch.float32)
        self.total = torch.zeros((), dtype=dtype, device=self.wire.device)
        self._remaining = len(self.batches)

    def forward(self, micro_batch: int, hidden: Tensor | None) -> Tensor:
        """Run the stage on one micro-batch; return its output, or its loss on the last stage."""
        batch = self.batches[micro_batch]
        first, entries = entries_of(batch, hidden, self.wire.device)
        output = self.model(first, **entries)
        if self.stage < len(self.wire.ranks) - 1 or self.loss_fn is None:
            return self.wire.checked(tensor_of(output))
        loss = checked_loss(self.loss_fn(output, batch))
        self.total += loss.detach()
        return loss

    def backward(
        self, micro_batch: int, hidden: Tensor | None, output: Tensor, gradient: Tensor | None
    ) -> Tensor | None:
        """Backpropagate one micro-batch; wrappers sync gradients in the last one."""
        self._remaining -= 1
        for wrapper, wanted in self.switches.items():
            setattr(wrapper, SYNC_SWITCH, wanted and self._remaining == 0)
        backward: Any = self.model.backward
        with _no_autocast(self.wire.device):
            input_gradient: Tensor | None = backward(hidden, output, gradient)
        return input_gradient


def entries_of(
    batch: Batch, hidden: Tensor | None, device: torch.device
) -> tuple[Tensor, dict[str, Any]]:
    """Return what a stage's forward is given: ``hidden`` or the ids, and all else by keyword."""
    entries = {name: _on(device, v) for name, v in batch.items() if name not in NOT_PASSED}
    return _on(device, batch["input_ids"]) if hidden is None else hidden, entries


def checked_loss(loss: Any) -> Tensor:
    """Return a micro-batch's loss as a 0-d tensor.

    Raises:
        InvalidArgumentError: not a tensor of one element, or one without a gradient.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss.reshape(())
    came = f"a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        came = f"a tensor of shape {tuple(loss.shape)} with requires_grad={loss.requires_grad}"
    raise InvalidArgumentError(
        f"{describe_rank()}: loss_fn(output, batch) must return a scalar tensor with a gradient, "
        f"got {came}; add the losses up and do not detach them"
    )


def _no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast is for forwards: a backward runs in the dtypes that its forward chose."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
