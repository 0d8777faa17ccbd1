"""One step: agree on it, prove its schedule, execute it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ....dist import get_comm_device, group_ranks, guard
from ....dist.building import agree
from ....dist.errors import InvalidArgumentError, ScaletorchError, StateError
from ...pg_manager import describe_rank
from ..runtime.execute import Step, Task, execute, in_steps
from ..runtime.faults import Watch
from ..runtime.mail import Mail
from ..runtime.posts import Posts
from ..schedules.choose import AnySchedule, built
from ..schedules.messages import program_of
from ..schedules.schedule import FORWARD, Action, Schedule
from ..schedules.simulate import proven
from ..stages.stage import PipelineParallel
from .batches import MicroBatches, checked_dtype, checked_shape, read
from .loss import Batch, LossFunction, token_mean_loss
from .work import SYNC_SWITCH, Stages, Training

# Actions that a receive begins earlier than its message is due, so that where messages take long
# the sender knows of it in time. Each is one more buffer.
AHEAD = 4


class StepArguments(NamedTuple):
    """The arguments of a train step; see `train_step_pipeline`."""

    model: nn.Module
    data_loader: Iterable[Batch]
    tensor_shapes: Sequence[int] | None
    device: torch.device | str | None
    dtype: torch.dtype | None
    group: ProcessGroup | None


class Plan(NamedTuple):
    """A schedule that was proven to run to its end, as one rank executes it.

    Attributes:
        schedule: The schedule.
        text: Tells it from others.
        steps: The rank's program with receives in their place, and with receives begun early.
        crossings: The stages whose outputs this rank sends to, or receives from, another.
    """

    schedule: Schedule
    text: str
    steps: tuple[list[Step], list[Step]]
    crossings: frozenset[int]


def train_step(
    arguments: StepArguments, loss_fn: LossFunction | None, schedule: AnySchedule | None
) -> Tensor:
    """Run one step with a schedule; None is the pipeline's own."""
    wrappers, pipeline = unwrap(arguments.model)
    with_labels = loss_fn is None and pipeline.is_last_stage
    plan, inputs = agreed_step(
        "this train step", arguments, schedule, with_labels=with_labels, require=_require_training
    )
    if with_labels:
        group = _same_ranks(pipeline, arguments.group)
        loss_fn = token_mean_loss(inputs.batches, inputs.device, group)
    with deferred_sync(wrappers) as switches:
        pipeline.runtime.tied.begin()
        stages = stages_of_step(arguments, inputs)
        training = Training(stages, loss_fn, switches, plan.schedule.ranks[pipeline.rank])
        execute_plan(plan, stages, training.run)
        if all(switches.values()):
            pipeline.sync_tied_gradients()
        else:  # the wrapper has not summed this step's gradients yet: a later step will
            pipeline.runtime.tied.postpone()
    return training.total


def agreed_step(
    subject: str,
    arguments: StepArguments,
    schedule: AnySchedule | None,
    *,
    with_labels: bool,
    require: Callable[[nn.Module, Schedule], None] | None = None,
    facts: Iterable[str] = (),
) -> tuple[Plan, MicroBatches]:
    """Return the plan of a step and its input, compared over the ranks of the pipeline.

    Args:
        subject: Name of the step, for messages.
        arguments: The step's.
        schedule: The schedule; None is the pipeline's own.
        with_labels: Whether micro-batches need labels.
        require: Raises if a model and a schedule cannot be used for this.
        facts: Other facts that must be the same on all ranks.

    Raises:
        InvalidArgumentError: A bad argument.
        MismatchError: Ranks that differ, or another rank has a mistake.
    """
    pipeline = unwrap(arguments.model)[1]
    group = _same_ranks(pipeline, arguments.group)
    lines = list(facts)
    error: Exception | None = None
    try:
        inputs = _inputs(arguments, pipeline, with_labels=with_labels)
        chosen = pipeline.schedule if schedule is None else schedule
        plan = _plan(chosen, len(pipeline.ranks), len(inputs.batches), pipeline.rank)
        _require_stages(plan.schedule, pipeline)
        pipeline.check_ties()
        if require is not None:
            require(arguments.model, plan.schedule)
        recorded = " recorded" * (pipeline.runtime.timed is not None)
        lines += [*inputs.describe(), plan.text + recorded]
    except Exception as found:  # a data loader may raise anything; the others must learn of it
        error = found
        if not isinstance(found, ScaletorchError) and guard.tell(found):
            raise
    runtime = pipeline.runtime
    note = runtime.note_parameters(pipeline)
    runtime.forget_forms(agree(subject, lines, group, error=error, note=note))
    return plan, inputs


def stages_of_step(arguments: StepArguments, inputs: MicroBatches) -> Stages:
    """Return this rank's stages with the mail of one step."""
    pipeline = unwrap(arguments.model)[1]
    group = _same_ranks(pipeline, arguments.group)
    posts = Posts(pipeline.ranks, group, inputs.device)
    mail = Mail(posts, inputs.signatures, pipeline.runtime.forms)
    return Stages(arguments.model, pipeline, inputs, mail, group)


def execute_plan(plan: Plan, stages: Stages, perform: Callable[[Task], None]) -> None:
    """Execute this rank's part of a plan.

    Raises:
        StageError: Another rank has failed.
    """
    pipeline, mail = stages.pipeline, stages.mail
    runtime = pipeline.runtime
    if runtime.timed is not None:
        perform = runtime.timed(plan.schedule, perform)
    steps = plan.steps[mail.may_receive_early(plan.crossings)]
    watch = Watch(stages.group, f"{runtime.name} {next(runtime.serials)}")
    try:
        execute(steps, mail, perform, watch)
    finally:
        pipeline.select_all()


def _inputs(
    arguments: StepArguments, pipeline: PipelineParallel, *, with_labels: bool
) -> MicroBatches:
    _, data_loader, shape, device, dtype, _ = arguments
    if device is None:  # where the parameters are, but a stage may have none
        first = next(pipeline.parameters(), None)
        device = get_comm_device(pipeline.group) if first is None else first.device
    return MicroBatches(
        read(data_loader, with_labels=with_labels),
        torch.device(device),
        None if shape is None else checked_shape(shape),
        None if dtype is None else checked_dtype(dtype),
    )


@lru_cache(maxsize=64)
def _plan(schedule: AnySchedule, num_ranks: int, num_micro_batches: int, rank: int) -> Plan:
    """Prove a schedule, and derive the program of one rank.

    Raises:
        ScheduleError: It would not run to its end, or not compute every gradient.
    """
    chosen = built(schedule, num_ranks, num_micro_batches)
    program = program_of(*proven(chosen), rank)
    digest = hashlib.blake2b(str(chosen).encode(), digest_size=8).hexdigest()
    parted = partial(in_steps, program, chosen.stages[rank], chosen.num_stages)
    messages = [operation for operation in program if not isinstance(operation, Action)]
    return Plan(
        chosen,
        f"schedule {chosen.name!r} ({digest})",
        (parted(0), parted(AHEAD)),
        frozenset(message.stage - message.gradient for message in messages),
    )


def _require_training(model: nn.Module, schedule: Schedule) -> None:
    if not torch.is_grad_enabled():
        raise StateError(
            f"{describe_rank()}: a train step needs gradients; leave torch.no_grad(), or call "
            "pipeline_forward for outputs alone"
        )
    if all(action.kind == FORWARD for rank in schedule.ranks for action in rank):
        raise InvalidArgumentError(
            f"schedule {schedule.name!r} has no backward: no gradient would be computed; call "
            "pipeline_forward, or choose another schedule"
        )
    for wrapper in (model, *unwrap(model)[0]):
        if not callable(getattr(wrapper, "backward", None)):
            raise InvalidArgumentError(
                f"{describe_rank()}: {type(wrapper).__name__} around a PipelineParallel must have "
                "backward(input_tensor, output_tensor, output_tensor_grad), as DataParallelBucket "
                "has; torch's DistributedDataParallel has none"
            )


def _require_stages(schedule: Schedule, pipeline: PipelineParallel) -> None:
    if schedule.stages != pipeline.all_stages:
        raise InvalidArgumentError(
            f"{describe_rank()}: schedule {schedule.name!r} has stages {schedule.stages} on its "
            f"ranks, and this model was split into {pipeline.all_stages}; pass the schedule to "
            "PipelineParallel(model, schedule=...) and call train_step_pipeline"
        )


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


def _same_ranks(pipeline: PipelineParallel, group: ProcessGroup | None) -> ProcessGroup | None:
    if group is None:
        return pipeline.group
    if group_ranks(group) != pipeline.ranks:
        raise InvalidArgumentError(
            f"{describe_rank()}: the model's stages are ranks {pipeline.ranks} and the group "
            f"given has ranks {group_ranks(group)}; pass one group to both, or to the model alone"
        )
    return group
