"""The work of a schedule's actions on one rank: forward, loss, backward."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ..runtime.forms import Hidden, autocasts, form_of
from ..runtime.mail import Mail
from ..runtime.program import Task
from ..schedules.schedule import BACKWARD_WEIGHT, FORWARD, Action
from ..stages.gates import check_output
from ..stages.stage import PipelineParallel
from ..stages.weights import WeightGradients
from .batches import LossFunction, MicroBatches

SYNC_SWITCH = "require_backward_grad_sync"


@dataclass(frozen=True, slots=True)
class Stages:
    """A rank's stages and their input.

    Attributes:
        model: The outermost module: its forward and backward are called.
        pipeline: The stages within.
        inputs: The micro-batches.
        mail: Outputs on their way between stages.
        group: The pipeline's ranks.
    """

    model: nn.Module
    pipeline: PipelineParallel
    inputs: MicroBatches
    mail: Mail
    group: ProcessGroup | None

    def forward(self, task: Task) -> tuple[Hidden | None, Any]:
        """Run a stage on a micro-batch; return the hidden states it was given, and its output.

        An output that is not the model's is passed on.
        """
        hidden = None if task.needs is None else self.mail.take_hidden(task.needs)
        self.pipeline.select(task.action.chunk)
        first, entries = self.inputs.inputs(task.action.micro_batch, hidden)
        runtime = self.pipeline.runtime
        runtime.ids, runtime.in_step = self.inputs.ids(task.action.micro_batch), True
        try:
            output = self.model(first, **entries)
        finally:
            runtime.ids, runtime.in_step = None, False
        if task.makes is not None:
            output = self.inputs.checked(output)
            self.mail.put(task.makes, output)
        return hidden, output


@dataclass(slots=True)
class Training:
    """The work of the actions of a training schedule.

    Attributes:
        stages: This rank's stages.
        loss_fn: Loss of one micro-batch; not used before the last stage.
        switches: Wrappers whose gradient sync waits for the last backward, with its own value.
        actions: This rank's actions of the step.
        total: The sum of the losses so far, 0-d, in the widest of their dtypes.
    """

    stages: Stages
    loss_fn: LossFunction | None
    switches: Mapping[nn.Module, bool]
    actions: Sequence[Action]
    total: Tensor = field(init=False)
    _live: dict[tuple[int, int], tuple[Hidden | None, Any]] = field(default_factory=dict)
    _later: dict[tuple[int, int], WeightGradients] = field(init=False)
    _backwards: int = field(init=False)
    _lost: dict[Hashable, str] = field(default_factory=dict)  # inputs without a gradient so far
    _autocasts: bool = field(init=False)

    def __post_init__(self) -> None:
        parted = [action for action in self.actions if action.kind == BACKWARD_WEIGHT]
        self._later = {(a.micro_batch, a.chunk): WeightGradients() for a in parted}
        self._backwards = sum(action.kind != FORWARD for action in self.actions)
        self._autocasts = autocasts(self.stages.inputs.device)
        self.total = torch.zeros((), dtype=torch.float32, device=self.stages.inputs.device)

    def is_wide(self) -> bool:
        """Return whether the losses were float64."""
        return self.total.dtype == torch.float64

    def run(self, task: Task) -> None:
        """Run a task whose input is here."""
        kind, micro_batch, chunk = task.action
        into = self._later.get((micro_batch, chunk))
        if kind == FORWARD:
            self._forward(task, into)
            return
        self._switch_sync()
        # A recomputed forward may look for its modules, and wrappers for what a backward may reach.
        self.stages.pipeline.select(chunk)
        if kind == BACKWARD_WEIGHT:
            self._backward(None, into, None)
        else:
            self._backward_of_inputs(task, into)
        if self._lost and not self._backwards:
            raise InvalidArgumentError(next(iter(self._lost.values())))

    def _forward(self, task: Task, into: WeightGradients | None) -> None:
        _, micro_batch, chunk = task.action
        with self._leaving(into):
            hidden, output = self.stages.forward(task)
        if task.makes is None and self.loss_fn is not None:
            output = checked_loss(self.loss_fn(output, self.stages.inputs.batches[micro_batch]))
            self.total = self.total + output.detach()
        self._live[micro_batch, chunk] = hidden, output

    def _backward_of_inputs(self, task: Task, into: WeightGradients | None) -> None:
        """Run a backward, or the part of it that others wait for."""
        _, micro_batch, chunk = task.action
        mail = self.stages.mail
        gradients = None if task.needs is None else mail.take_gradients(task.needs)
        hidden, output = self._live.pop((micro_batch, chunk))
        with self._leaving(into, backward=True):
            made = self._backward(hidden, output, gradients)
        if task.makes is not None:
            self._look_for_gradients(task, hidden)
            mail.put(task.makes, made)

    def _look_for_gradients(self, task: Task, hidden: Hidden | None) -> None:
        """Note whether what the stage before passed on got a gradient, until it has once.

        In one micro-batch it may get none, as if none of its tokens counts.
        """
        reached = self.stages.pipeline.runtime.reached
        key = task.stage, self.stages.inputs.signatures[task.action.micro_batch]
        trained = [t for t in tensors_in(hidden) if t.requires_grad]
        if key in reached or not trained:
            return
        if any(tensor.grad is not None for tensor in trained):
            reached.add(key)
            self._lost.pop(key, None)
        elif key not in self._lost:
            self._lost[key] = (
                f"{describe_rank()}: stage {task.stage} gives no gradient back to stage "
                f"{task.stage - 1}, whose hidden states {form_of(trained)} require one: what the "
                "loss is computed from does not depend on them for autograd. If the model detaches "
                "them on purpose, freeze all modules before (requires_grad_(False)); else run its "
                "layers outside of torch.no_grad() and of autograd functions of its own "
                "(checkpoint with use_reentrant=False), or use no pipeline (pp_size=1)"
            )

    def _leaving(
        self, into: WeightGradients | None, *, backward: bool = False
    ) -> AbstractContextManager[None]:
        """Return a context that leaves weight gradients for later, if some are to be left."""
        if into is None:
            return nullcontext()
        return self.stages.pipeline.runtime.deferral.to(into, backward=backward)

    def _backward(self, hidden: Hidden | None, output: Any, gradient: Any) -> Any:
        backward: Any = self.stages.model.backward
        if not self._autocasts:
            return backward(hidden, output, gradient)
        # Autocast is for forwards: a backward runs in the dtypes that its forward chose.
        with torch.autocast(self.stages.inputs.device.type, enabled=False):
            return backward(hidden, output, gradient)

    def _switch_sync(self) -> None:
        """Let wrappers sync gradients in the last backward alone."""
        self._backwards -= 1
        for wrapper, wanted in self.switches.items():
            setattr(wrapper, SYNC_SWITCH, wanted and self._backwards == 0)


def unwrap(model: nn.Module) -> tuple[list[nn.Module], PipelineParallel]:
    """Return the wrappers around a `PipelineParallel`, outermost first, and itself.

    Raises:
        InvalidArgumentError: There is none beneath `model`.
    """
    wrappers: list[nn.Module] = []
    inner: Any = model
    while not isinstance(inner, PipelineParallel):
        if not isinstance(inner, nn.Module):
            raise InvalidArgumentError(
                f"{describe_rank()}: expected a PipelineParallel, or wrappers around one that hold "
                f"it as .module, got {type(model).__name__}; wrap the model in PipelineParallel"
            )
        wrappers.append(inner)
        inner = getattr(inner, "module", None)
    return wrappers, inner


@contextmanager
def deferred_sync(wrappers: Iterable[nn.Module]) -> Iterator[dict[nn.Module, bool]]:
    """Yield the wrappers that have a gradient sync switch with its value, and put it back after."""
    # A wrapper shows attributes of what it wraps as its own, so hasattr would find one twice.
    found = [w for w in wrappers if SYNC_SWITCH in vars(w) or hasattr(type(w), SYNC_SWITCH)]
    switches = {wrapper: bool(getattr(wrapper, SYNC_SWITCH)) for wrapper in found}
    try:
        yield switches
    finally:
        for wrapper, value in switches.items():
            setattr(wrapper, SYNC_SWITCH, value)


def checked_loss(loss: Any) -> Tensor:
    """Return a micro-batch's loss as a 0-d tensor.

    Raises:
        InvalidArgumentError: Not a tensor of one element, or one without a gradient; or it was
            computed with another stage's tensors.
    """
    check_output(loss)
    one = isinstance(loss, Tensor) and loss.numel() == 1
    if one and loss.requires_grad and loss.is_floating_point():
        scalar: Tensor = loss.reshape(())
        return scalar
    came = f"a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        came = f"a tensor of shape {tuple(loss.shape)} with requires_grad={loss.requires_grad}"
        came += f", {loss.dtype}"
    raise InvalidArgumentError(
        f"{describe_rank()}: loss_fn(output, batch) must return a scalar tensor with a gradient, "
        f"got {came}; add the losses up and do not detach them"
    )
