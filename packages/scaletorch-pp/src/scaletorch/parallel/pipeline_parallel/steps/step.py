"""A step of a pipeline: its micro-batches, the agreement of all ranks, and a rank's forwards."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ....dist import get_comm_device, group_ranks
from ....dist.building import agree, map_tensors, tell_guard, tensors_in
from ....dist.errors import InvalidArgumentError, ScaletorchError, StateError
from ...pg_manager import describe_rank
from ..runtime.forms import Hidden, autocasts, checked_dtype, checked_shape, signature
from ..runtime.mail import Mail, Posts, execute
from ..schedules.builders import AnySchedule
from ..schedules.schedule import FORWARD, Schedule, Task
from ..schedules.simulate import plan_of
from ..stages.stage import PipelineParallel

Batch = Mapping[str, Any]

# Entries of a micro-batch that are not passed to the model's forward by keyword.
NOT_PASSED = ("input_ids", "labels")


class Step:
    """One step on this rank, after all ranks of the pipeline agree about it.

    `subject` is the step's name in messages, `with_labels` whether micro-batches need labels on the
    last stage, `trains` whether it runs backwards; the rest is as for `train_step_pipeline`.
    """

    def __init__(
        self,
        subject: str,
        model: nn.Module,
        schedule: AnySchedule | None,
        data_loader: Iterable[Batch],
        tensor_shapes: Sequence[int] | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        group: ProcessGroup | None,
        *,
        with_labels: bool = False,
        trains: bool = True,
    ) -> None:
        self.model = model  # the outermost module: its forward and backward are called
        self.wrappers, self.pipeline = unwrap(model)
        self.group = _same_ranks(self.pipeline, group)
        pipeline, lines = self.pipeline, list[str]()
        failed: list[Exception] = []
        try:
            batches = read(data_loader, with_labels=with_labels and pipeline.is_last_stage)
            if device is None:  # a stage without parameters takes the group's device
                first = next(pipeline.parameters(), None)
                device = get_comm_device(pipeline.group) if first is None else first.device
            self.inputs = MicroBatches(
                batches,
                torch.device(device),
                None if tensor_shapes is None else checked_shape(tensor_shapes),
                None if dtype is None else checked_dtype(dtype),
            )
            chosen = pipeline.schedule if schedule is None else schedule
            self.plan = plan_of(chosen, len(pipeline.ranks), len(batches), pipeline.rank)
            _require_stages(self.plan.schedule, pipeline)
            pipeline.check_ties()
            if pipeline.num_stages > 1:
                pipeline.select_all()
                pipeline.runtime.watch(pipeline.module, pipeline.runtime.gates)
            if trains:
                self._require_training(self.plan.schedule)
            lines = [*self.inputs.describe(), self.plan.text]
        except Exception as found:  # a data loader may raise anything, and other ranks must know
            failed.append(found)
            if not isinstance(found, ScaletorchError) and tell_guard(found):
                raise
        runtime = pipeline.runtime
        note = runtime.note_parameters(pipeline)
        # Popped, since the error's traceback refers to this frame, and so to the list.
        notes = agree(subject, lines, self.group, error=failed.pop() if failed else None, note=note)
        runtime.compare_parameters(notes)
        posts = Posts(pipeline.ranks, self.group, self.inputs.device)
        self.mail = Mail(posts, self.inputs.signatures, runtime.forms)

    def forward(self, task: Task) -> tuple[Hidden | None, Any]:
        """Run a stage on a micro-batch; return the hidden states it received, and its output.

        Unless it is the last stage, the output goes to the next one.
        """
        hidden = None if task.needs is None else self.mail.take_hidden(task.needs)
        self.pipeline.select(task.action.chunk)
        ids, entries = self.inputs.inputs(task.action.micro_batch, first=hidden is None)
        runtime = self.pipeline.runtime
        runtime.ids, runtime.in_step = ids if isinstance(ids, Tensor) else None, True
        try:
            output = self.model(ids if hidden is None else hidden, **entries)
        finally:
            runtime.ids, runtime.in_step = None, False
        if task.makes is not None:
            output = self.inputs.checked(output)
            self.mail.put(task.makes, output)
        return hidden, output

    def execute(
        self, perform: Callable[[Task], None], note: Callable[[], bool] = lambda: False
    ) -> bool:
        """Execute this rank's program; return whether `note` returned true on any rank."""

        def shown(task: Task) -> None:
            with torch.profiler.record_function(f"{task.action} of stage {task.stage}"):
                perform(task)

        run = shown if torch.autograd.profiler._is_profiler_enabled else perform
        early = self.mail.may_receive_early(self.plan.program)
        try:
            program = self.plan.early if early else self.plan.program
            return execute(program, self.mail, run, self.group, note)
        finally:
            self.pipeline.select_all()

    def _require_training(self, schedule: Schedule) -> None:
        if not torch.is_grad_enabled():
            raise StateError(
                f"{describe_rank()}: a train step needs gradients; call it outside "
                "torch.no_grad(), or call pipeline_forward, which only returns outputs"
            )
        if all(action.kind == FORWARD for rank in schedule.ranks for action in rank):
            raise InvalidArgumentError(
                f"schedule {schedule.name!r} has no backward: no gradient would be computed; call "
                "pipeline_forward, or choose another schedule"
            )
        for wrapper in self.wrappers:
            if not callable(getattr(wrapper, "backward", None)):
                raise InvalidArgumentError(
                    f"{describe_rank()}: {type(wrapper).__name__} around a PipelineParallel must "
                    "have backward(input_tensor, output_tensor, output_tensor_grad), as "
                    "DataParallelBucket has; torch's DistributedDataParallel has none"
                )


def unwrap(model: nn.Module) -> tuple[list[nn.Module], PipelineParallel]:
    """Return the wrappers around a `PipelineParallel`, outermost first, and the pipeline itself."""
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


def _require_stages(schedule: Schedule, pipeline: PipelineParallel) -> None:
    if schedule.stages != pipeline.all_stages:
        raise InvalidArgumentError(
            f"{describe_rank()}: schedule {schedule.name!r} has stages {schedule.stages} on its "
            f"ranks, and this model was split into {pipeline.all_stages}; pass the schedule to "
            "PipelineParallel(model, schedule=...) and call train_step_pipeline"
        )


def _same_ranks(pipeline: PipelineParallel, group: ProcessGroup | None) -> ProcessGroup | None:
    if group is None:
        return pipeline.group
    if group_ranks(group) != pipeline.ranks:
        raise InvalidArgumentError(
            f"{describe_rank()}: the model's stages are ranks {pipeline.ranks} and the group "
            f"given has ranks {group_ranks(group)}; pass one group to both, or to the model alone"
        )
    return group


@dataclass(frozen=True)
class MicroBatches:
    """The input of a step."""

    batches: list[Batch]
    device: torch.device  # on which the stage computes them
    shape: tuple[int, ...] | None = None  # required of hidden states; None takes any
    dtype: torch.dtype | None = None  # required too, and autocast casts to it; None takes any

    def inputs(self, micro_batch: int, *, first: bool) -> tuple[Any, dict[str, Any]]:
        """Return a micro-batch's `input_ids` and the rest by name, for the first stage or another.

        Other stages use integer ids, or the form of a tensor, so the rest is not moved there.
        """
        batch = self.batches[micro_batch]
        entries = {name: self._moved(v) for name, v in batch.items() if name not in NOT_PASSED}
        ids = batch["input_ids"]
        used = first or (isinstance(ids, Tensor) and not ids.is_floating_point())
        return self._moved(ids) if used else ids, entries

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
        return [
            f"{len(self.batches)} micro-batches",
            f"hidden states {self.shape} of {self.dtype}",
            *(f"{len([*run])} in a row of {kind}" for kind, run in groupby(self.signatures)),
        ]

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
                "device that the layers return, or None for the first two to accept any"
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
        message = "data_loader has no micro-batches; every rank needs all micro-batches of a step"
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
                f"{name} of micro-batch {index} requires grad, but every stage has its own copy, "
                "so its gradient would be incomplete; make it a parameter of a layer, or detach it"
            )
    return ""
