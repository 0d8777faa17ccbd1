"""Train steps and forwards: a schedule's actions on one rank, their gradients, loss and outputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ....dist.building import tensors_in
from ....dist.dist import all_reduce
from ....dist.errors import InvalidArgumentError
from ...pg_manager import IGNORED, describe_rank, get_process_group_manager, token_loss_sum
from ..runtime.forms import Form, Hidden, autocasts, tensor_of
from ..schedules.builders import AnySchedule, Builder, forward_only
from ..schedules.schedule import BACKWARD_WEIGHT, FORWARD, Task
from ..stages.calls import check_output
from ..stages.weights import WeightGradients
from .step import Batch, Step, unwrap

LossFunction = Callable[[Any, Batch], Tensor]

SYNC_SWITCH = "require_backward_grad_sync"


def train_step_pipeline(
    model: nn.Module,
    data_loader: Iterable[Batch],
    tensor_shapes: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    loss_fn: LossFunction | None = None,
    group: ProcessGroup | None = None,
    schedule: AnySchedule | None = None,
) -> Tensor:
    """Run one step's micro-batches in the order of the model's own schedule.

    Gradients are added to `.grad` and complete on return: the last backward syncs the gradients of
    a data parallel wrapper, and gradients of tied parameters are summed over their ranks. If a
    stage raises on any rank, all ranks raise, and the model may be used again; its gradients are
    incomplete.

    Args:
        model: A `PipelineParallel`, or wrappers around one (`.module`); the outermost is called.
        data_loader: This step's micro-batches, the same number on every rank: mappings with
            `input_ids` and `labels` [B, L] int64. Other entries are passed to forward by keyword on
            every stage. Sizes may differ between micro-batches.
        tensor_shapes: Shape of one micro-batch's hidden states, [B, L, H], to be checked; None
            takes any.
        device: Device on which the stage computes; None is the device of its parameters.
        dtype: Dtype of hidden states, to be checked, or cast to under autocast; None takes any.
        loss_fn: `loss_fn(output, batch) -> scalar`, summed over micro-batches. None is the token
            cross entropy of `labels` (aligned with the outputs, -100 ignored) divided by the
            number of valid tokens of all micro-batches and, if the pipeline is the manager's pp
            axis, of the manager's CP x DP group. Over another group, this pipeline's tokens count.
        group: The ranks in order; None is the model's own group.
        schedule: Another schedule of the same stages; None is the model's own.

    Returns:
        The sum of the micro-batches' losses on the rank of the last stage, zero on the others: 0-d,
        detached, in the losses' dtype but at least float32, on every rank. With the default loss,
        sums over the CP x DP group give the global batch's loss.

    Raises:
        InvalidArgumentError: A bad argument, or a stage's output of another shape, dtype or device
            than announced.
        MismatchError: Ranks differ in micro-batches, their shapes, or schedule.
        ScheduleError: The schedule would deadlock, or not compute every gradient.
        StageError: Another rank has failed in this step; the message has its error.
    """
    given = data_loader, tensor_shapes, device, dtype, group
    step = Step("this train step", model, schedule, *given, with_labels=loss_fn is None)
    if loss_fn is None and step.pipeline.is_last_stage:
        loss_fn = token_mean_loss(step.inputs.batches, step.inputs.device, step.group)
    return _train(step, loss_fn)


def train_step_pipeline_afab(
    model: nn.Module,
    data_loader: Iterable[Batch],
    tensor_shapes: Sequence[int] | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    *,
    loss_fn: LossFunction | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Run one step's micro-batches, all forwards first, then all backwards.

    Arguments, result and errors are those of `train_step_pipeline`; the model has one stage on each
    rank. The activations of all micro-batches are kept at once.
    """
    rest = tensor_shapes, device, dtype
    return train_step_pipeline(
        model, data_loader, *rest, loss_fn=loss_fn, group=group, schedule="afab"
    )


def train_step_pipeline_1f1b(
    model: nn.Module,
    data_loader: Iterable[Batch],
    tensor_shapes: Sequence[int] | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    *,
    loss_fn: LossFunction | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Run one step's micro-batches, alternating forwards and backwards (1F1B).

    Arguments, result and errors are those of `train_step_pipeline`; the model has one stage on each
    rank. Stage s of N keeps the activations of at most N - s micro-batches.
    """
    rest = tensor_shapes, device, dtype
    return train_step_pipeline(
        model, data_loader, *rest, loss_fn=loss_fn, group=group, schedule="1f1b"
    )


@torch.no_grad()
def pipeline_forward(
    model: nn.Module,
    data_loader: Iterable[Batch],
    tensor_shapes: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    group: ProcessGroup | None = None,
    each: Callable[[Any, Batch], Tensor] | None = None,
) -> list[Tensor]:
    """Run micro-batches forward through the stages, without gradients.

    The model's mode does not change: call `model.eval()` before if it matters.

    Other arguments and errors are those of `train_step_pipeline`; micro-batches need no `labels`.
    `each` is a function of output and batch; its result, such as a loss, is returned in place of
    the output. None returns the output's logits [B, L, V], or its first tensor.

    Returns:
        One tensor for each micro-batch, on the rank of the last stage; an empty list on others.
    """
    given = data_loader, tensor_shapes, device, dtype, group
    forwards = _forwards(unwrap(model)[1].all_stages)
    step = Step("these forwards", model, forwards, *given, trains=False)
    outputs: dict[int, Tensor] = {}

    def perform(task: Task) -> None:
        _, output = step.forward(task)
        if task.makes is None:
            number = task.action.micro_batch
            batch = step.inputs.batches[number]
            outputs[number] = tensor_of(output) if each is None else each(output, batch)

    step.execute(perform)
    return [outputs[micro_batch] for micro_batch in sorted(outputs)]


@lru_cache(maxsize=64)
def _forwards(stages: tuple[tuple[int, ...], ...]) -> Builder:
    """Return the same function object for the same stages, so that `plan_of` caches its plan."""
    return partial(forward_only, stages=stages)


def _train(step: Step, loss_fn: LossFunction | None) -> Tensor:
    """Execute a step, complete the gradients, and return the loss."""
    tied = step.pipeline.runtime.tied
    with _deferred_sync(step.wrappers) as switches:
        if tied is not None:
            tied.begin()
        training = Training(step, loss_fn, switches)
        wide = step.execute(training.run, lambda: training.total.dtype == torch.float64)
        if all(switches.values()):
            step.pipeline.sync_tied_gradients()
        elif tied is not None:  # gradient accumulation: a later step syncs all gradients
            tied.postpone()
    return training.total.to(torch.float64 if wide else torch.float32)


class Training:
    """The computation of the actions of a training schedule.

    `loss_fn` is the loss of one micro-batch, used on the last stage alone, and `switches` are the
    wrappers that sync gradients in the last backward, with their switch's own value.
    """

    def __init__(
        self, step: Step, loss_fn: LossFunction | None, switches: Mapping[nn.Module, bool]
    ) -> None:
        self.step, self.loss_fn, self.switches = step, loss_fn, switches
        actions = step.plan.schedule.ranks[step.pipeline.rank]
        split = [action for action in actions if action.kind == BACKWARD_WEIGHT]
        self._postponed = {(a.micro_batch, a.chunk): WeightGradients() for a in split}
        self._backwards = sum(action.kind != FORWARD for action in actions)
        self._graphs: dict[tuple[int, int], tuple[Hidden | None, Any]] = {}
        self._errors: dict[Hashable, str] = {}  # for inputs that got no gradient so far
        self._device = step.inputs.device
        self._autocasts = autocasts(self._device)
        # The sum of the losses so far, in the widest of their dtypes.
        self.total = torch.zeros((), dtype=torch.float32, device=self._device)

    def run(self, task: Task) -> None:
        """Run a task whose input has arrived."""
        kind, micro_batch, chunk = task.action
        into = self._postponed.get((micro_batch, chunk))
        if kind == FORWARD:
            self._forward(task, into)
            return
        self._switch_sync()
        # Recomputed forwards and wrappers' searches for parameters need the chunk's modules.
        self.step.pipeline.select(chunk)
        model: Any = self.step.model
        # Autocast is for forwards: a backward uses the dtypes that its forward chose.
        with torch.autocast(self._device.type, enabled=False) if self._autocasts else nullcontext():
            if kind == BACKWARD_WEIGHT:
                model.backward(None, into, None)
            else:
                self._backward_of_inputs(model, task, into)
        if self._errors and not self._backwards:
            raise InvalidArgumentError(next(iter(self._errors.values())))

    def _forward(self, task: Task, into: WeightGradients | None) -> None:
        _, micro_batch, chunk = task.action
        deferral = self.step.pipeline.runtime.deferral
        with deferral.to(into) if into else nullcontext():
            hidden, output = self.step.forward(task)
        if task.makes is None and self.loss_fn is not None:
            output = _checked_loss(self.loss_fn(output, self.step.inputs.batches[micro_batch]))
            self.total = self.total + output.detach()
        self._graphs[micro_batch, chunk] = hidden, output

    def _backward_of_inputs(self, model: Any, task: Task, into: WeightGradients | None) -> None:
        """Run a full backward, or only the gradient of the inputs, and pass that on."""
        _, micro_batch, chunk = task.action
        mail = self.step.mail
        gradients = None if task.needs is None else mail.take_gradients(task.needs)
        hidden, output = self._graphs.pop((micro_batch, chunk))
        deferral = self.step.pipeline.runtime.deferral
        with deferral.to(into, backward=True) if into else nullcontext():
            passed_back = model.backward(hidden, output, gradients)
        if task.makes is not None:
            self._look_for_gradients(task, hidden)
            mail.put(task.makes, passed_back)

    def _look_for_gradients(self, task: Task, hidden: Hidden | None) -> None:
        """Record an error if the received hidden states got no gradient in any micro-batch so far.

        A single micro-batch may give none, for example if all its tokens are ignored.
        """
        reached = self.step.pipeline.runtime.reached
        key = task.stage, self.step.inputs.signatures[task.action.micro_batch]
        trained = [] if key in reached else [t for t in tensors_in(hidden) if t.requires_grad]
        if any(tensor.grad is not None for tensor in trained):
            reached.add(key)
            self._errors.pop(key, None)
        elif trained and key not in self._errors:
            self._errors[key] = (
                f"{describe_rank()}: stage {task.stage} gives no gradient back to stage "
                f"{task.stage - 1}, whose hidden states {Form(trained)} require one: autograd "
                "finds no path from the loss to them. If the model detaches them on purpose, "
                "freeze all earlier modules (requires_grad_(False)). Otherwise run its layers "
                "outside torch.no_grad() and custom autograd functions (checkpoint with "
                "use_reentrant=False), or use no pipeline (pp_size=1)"
            )

    def _switch_sync(self) -> None:
        """Let wrappers sync gradients only in the last backward."""
        self._backwards -= 1
        for wrapper, wanted in self.switches.items():
            setattr(wrapper, SYNC_SWITCH, wanted and self._backwards == 0)


@contextmanager
def _deferred_sync(wrappers: Iterable[nn.Module]) -> Iterator[dict[nn.Module, bool]]:
    """Yield wrappers that have a gradient sync switch, with its value; restore it at the end."""
    # A wrapper shows its inner module's attributes as its own, so hasattr would find one twice.
    found = [w for w in wrappers if SYNC_SWITCH in vars(w) or hasattr(type(w), SYNC_SWITCH)]
    switches = {wrapper: bool(getattr(wrapper, SYNC_SWITCH)) for wrapper in found}
    try:
        yield switches
    finally:
        for wrapper, value in switches.items():
            setattr(wrapper, SYNC_SWITCH, value)


def _checked_loss(loss: Any) -> Tensor:
    """Return a micro-batch's loss as a 0-d tensor; refuse anything but a loss with a gradient."""
    check_output(loss)
    one = isinstance(loss, Tensor) and loss.numel() == 1
    if one and loss.requires_grad and loss.is_floating_point():
        scalar: Tensor = loss.reshape(())
        return scalar
    came = f"tensor of {Form(loss)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise InvalidArgumentError(
        f"{describe_rank()}: loss_fn(output, batch) must return a scalar tensor with a gradient, "
        f"got a {came}; sum the losses, and do not detach the sum"
    )


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
