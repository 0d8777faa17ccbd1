"""What the actions of a schedule do on one rank: forward, loss, backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ..runtime.forms import Hidden
from ..runtime.mail import Key, Mail
from ..schedules.schedule import BACKWARD_WEIGHT, FORWARD, Action
from ..stages.stage import PipelineParallel
from ..stages.weights import WeightGradients
from .autocast import no_autocast
from .batches import MicroBatches
from .loss import LossFunction

SYNC_SWITCH = "require_backward_grad_sync"


@dataclass(frozen=True, slots=True)
class Stages:
    """A rank's stages and what they run on.

    Attributes:
        model: The outermost module: its forward and backward are called.
        pipeline: The stages within.
        inputs: The micro-batches.
        mail: What stages give each other.
        group: The pipeline's ranks.
    """

    model: nn.Module
    pipeline: PipelineParallel
    inputs: MicroBatches
    mail: Mail
    group: ProcessGroup | None

    def is_last(self, stage: int) -> bool:
        """Whether what a stage returns is the model's output."""
        return stage == self.pipeline.num_stages - 1

    def needs(self, action: Action) -> Key | None:
        """Return what must be here before an action can run."""
        stage = self.pipeline.stages[action.chunk]
        if action.kind == FORWARD:
            return Key(stage - 1, action.micro_batch, gradient=False) if stage > 0 else None
        if action.kind == BACKWARD_WEIGHT or self.is_last(stage):
            return None
        return Key(stage + 1, action.micro_batch, gradient=True)

    def forward(self, action: Action) -> tuple[Hidden | None, Any]:
        """Run a stage on a micro-batch; return what it was given by another stage, and its output.

        What is not the model's output is passed on.
        """
        key = self.needs(action)
        hidden = None if key is None else self.mail.take_hidden(key)
        self.pipeline.select(action.chunk)
        first, entries = self.inputs.inputs(action.micro_batch, hidden)
        output = self.model(first, **entries)
        stage = self.pipeline.stages[action.chunk]
        if not self.is_last(stage):
            output = self.inputs.checked(output)
            self.mail.put(Key(stage, action.micro_batch, gradient=False), output)
        return hidden, output


@dataclass(slots=True)
class Training:
    """What the actions of a training schedule do.

    Attributes:
        stages: This rank's stages.
        loss_fn: Loss of one micro-batch; not used before the last stage.
        switches: Wrappers whose gradient sync waits for the last backward, and what it was.
        actions: This rank's actions of the step.
        total: The sum of the losses so far, 0-d.
    """

    stages: Stages
    loss_fn: LossFunction | None
    switches: Mapping[nn.Module, bool]
    actions: Sequence[Action]
    total: Tensor = field(init=False)
    _live: dict[tuple[int, int], tuple[Hidden | None, Any]] = field(default_factory=dict)
    _later: dict[tuple[int, int], WeightGradients] = field(init=False)
    _backwards: int = field(init=False)

    def __post_init__(self) -> None:
        parted = [action for action in self.actions if action.kind == BACKWARD_WEIGHT]
        self._later = {(a.micro_batch, a.chunk): WeightGradients() for a in parted}
        self._backwards = sum(action.kind != FORWARD for action in self.actions)
        first = next(self.stages.pipeline.parameters(), torch.empty(0))
        dtype = self.stages.inputs.dtype or first.dtype
        wide = torch.promote_types(dtype, torch.float32)
        self.total = torch.zeros((), dtype=wide, device=self.stages.inputs.device)

    def run(self, action: Action) -> None:
        """Run an action; what it needs is here."""
        place = action.micro_batch, action.chunk
        deferral = self.stages.pipeline.deferral
        if action.kind == FORWARD:
            with deferral.to(self._later.get(place)):
                hidden, output = self.stages.forward(action)
            last = self.stages.is_last(self.stages.pipeline.stages[action.chunk])
            if last and self.loss_fn is not None:
                batch = self.stages.inputs.batches[action.micro_batch]
                output = checked_loss(self.loss_fn(output, batch))
                self.total += output.detach()
            self._live[place] = hidden, output
            return
        self._switch_sync()
        if action.kind == BACKWARD_WEIGHT:
            self._backward(None, self._later.pop(place), None)
        else:
            with deferral.to(self._later.get(place)):  # for forwards that are recomputed
                self._backward_of_inputs(action)

    def _backward_of_inputs(self, action: Action) -> None:
        """Run a backward, or the part of it that others wait for."""
        place = action.micro_batch, action.chunk
        key = self.stages.needs(action)
        gradients = None if key is None else self.stages.mail.take_gradients(key)
        hidden, output = self._live.pop(place)
        self.stages.pipeline.select(action.chunk)  # a recomputed forward may look for its modules
        made = self._backward(hidden, output, gradients)
        stage = self.stages.pipeline.stages[action.chunk]
        if stage > 0:
            self.stages.mail.put(Key(stage, action.micro_batch, gradient=True), made)

    def _backward(self, hidden: Hidden | None, output: Any, gradient: Any) -> Any:
        backward: Any = self.stages.model.backward
        with no_autocast(self.stages.inputs.device):
            return backward(hidden, output, gradient)

    def _switch_sync(self) -> None:
        """Let wrappers sync gradients in the last backward alone."""
        self._backwards -= 1
        for wrapper, wanted in self.switches.items():
            setattr(wrapper, SYNC_SWITCH, wanted and self._backwards == 0)


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
