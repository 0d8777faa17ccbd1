"""The contenders: our pipeline and torch's, by the name of our schedule."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Protocol
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from scaletorch.parallel.pipeline_parallel import (
    Action,
    PipelineParallel,
    Schedule,
    Timeline,
    train_step_pipeline,
)
from scaletorch.parallel.pipeline_parallel.schedules import Span
from scaletorch.parallel.pipeline_parallel.steps.training import Training

from .models import Batch, Model, Size, StagePart, token_loss


class Pipeline(Protocol):
    """A model over the ranks, ready for steps."""

    @property
    def module(self) -> nn.Module:
        """Parameters of this rank, under their names in the full model."""

    def step(self) -> Tensor:
        """Accumulate gradients; return the loss on the rank with the last stage."""

    def recorded(self) -> Timeline:
        """Run a step; return the times of every rank's actions, on every rank."""


class Ours:
    """A pipeline of scaletorch."""

    def __init__(self, name: str, size: Size, model: Model, batches: list[Batch]) -> None:
        loss = token_loss(size)
        self._name, self._batches = name, batches
        self._loss_fn = lambda output, batch: loss(output, batch["labels"])
        whole = copy.deepcopy(model)
        self.module = PipelineParallel(whole, group=dist.group.WORLD, schedule=name)

    def step(self) -> Tensor:
        """Run a step."""
        return train_step_pipeline(self.module, self._batches, loss_fn=self._loss_fn)

    def recorded(self) -> Timeline:
        """Run a step and time its actions."""
        spans: list[Span] = []
        run = Training.run

        def timed(training: Training, task: Any) -> None:
            start = time.perf_counter()
            run(training, task)
            spans.append(Span(dist.get_rank(), task.action, start, time.perf_counter()))

        with patch.object(Training, "run", timed):
            return _timeline(self.step, spans, self._name, self.module.all_stages)


@dataclass(frozen=True)
class Theirs:
    """Torch's form of a schedule.

    Attributes:
        kind: Class of torch's schedule.
        chunks: Stages of each rank.
        v_shape: Whether the second stages are on the ranks in reverse order.
    """

    kind: Any
    chunks: int = 1
    v_shape: bool = False

    def stages(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """Return a rank's stages."""
        if self.v_shape:
            return rank, 2 * num_ranks - 1 - rank
        return tuple(range(rank, num_ranks * self.chunks, num_ranks))


THEIRS: Mapping[str, Theirs] = {
    "afab": Theirs(ScheduleGPipe),
    "1f1b": Theirs(Schedule1F1B),
    "interleaved_1f1b": Theirs(ScheduleInterleaved1F1B, 2),
    "looped_bfs": Theirs(ScheduleLoopedBFS, 2),
    "zb_h1": Theirs(ScheduleInterleavedZeroBubble),  # with one stage a rank: ZB1P
    "zb_v": Theirs(ScheduleZBVZeroBubble, 2, v_shape=True),
    "dualpipe_v": Theirs(ScheduleDualPipeV, 2, v_shape=True),
}
# Methods that torch's actions call, with the micro-batch first, and the kind of action of each.
CALLS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "forward_one_chunk": lambda options: "F",
    "backward_one_chunk": lambda options: "B" if options.get("full_backward", True) else "I",
    "backward_weight_one_chunk": lambda options: "W",
}


class Torch:
    """A pipeline of `torch.distributed.pipelining`."""

    def __init__(self, name: str, size: Size, model: Model, batches: list[Batch]) -> None:
        way, rank, num_ranks = THEIRS[name], dist.get_rank(), dist.get_world_size()
        self._name, self._size = name, size
        self._placed = tuple(way.stages(r, num_ranks) for r in range(num_ranks))
        self._stages = [
            PipelineStage(
                StagePart(model, stage, num_ranks * way.chunks), stage, num_ranks * way.chunks,
                torch.device("cpu"),
            )
            for stage in self._placed[rank]
        ]  # fmt: skip
        one = issubclass(way.kind, PipelineScheduleSingle)
        # The losses are divided by all tokens of the step, so gradients need no further scale.
        self._runner = way.kind(
            self._stages[0] if one else self._stages, size.micro_batches,
            loss_fn=token_loss(size), scale_grads=False,
        )  # fmt: skip
        first, last = self._stages[0].is_first, self._stages[-1].is_last
        whole = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
        self._inputs = [whole["input_ids"]] if first else []
        self._labels = whole["labels"] if last else None

    @cached_property
    def module(self) -> nn.Module:
        """The modules of all stages."""
        return _Parts([stage.submod for stage in self._stages])

    def step(self) -> Tensor:
        """Run a step."""
        losses: list[Tensor] = []
        self._runner.step(*self._inputs, target=self._labels, losses=losses, return_outputs=False)
        return sum((loss.detach() for loss in losses), torch.zeros(()))

    def recorded(self) -> Timeline:
        """Run a step and time the methods that its actions call."""
        spans: list[Span] = []
        with _clocks(self._stages, spans):
            return _timeline(self.step, spans, self._name, self._placed)


def _timeline(
    step: Callable[[], object], spans: list[Span], name: str, placed: tuple[tuple[int, ...], ...]
) -> Timeline:
    """Run a step that appends its actions to `spans`; return those of all ranks, in seconds."""
    dist.barrier()
    zero = time.perf_counter()
    step()
    own = [span._replace(start=span.start - zero, end=span.end - zero) for span in spans]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    actions = tuple(tuple(span.action for span in spans) for spans in ranks)
    count = 1 + max(action.micro_batch for rank in actions for action in rank)
    return Timeline(Schedule(name, count, placed, actions), tuple(chain(*ranks)), "s")


class _Parts(nn.Module):
    """The modules of several stages, with parameter names unchanged."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for part in self.parts:
            yield from part.named_parameters(*args, **kwargs)


@contextmanager
def _clocks(stages: list[PipelineStage], spans: list[Span]) -> Iterator[None]:
    """Record the start and end of each action of these stages."""

    def timed(chunk: int, call: Any, kind_of: Callable[[Mapping[str, Any]], str]) -> Any:
        def wrapper(micro_batch: int, *args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = call(micro_batch, *args, **options)
            action = Action(kind_of(options), micro_batch, chunk)
            spans.append(Span(dist.get_rank(), action, start, time.perf_counter()))
            return result

        return wrapper

    for chunk, stage in enumerate(stages):
        for call, kind_of in CALLS.items():
            setattr(stage, call, timed(chunk, getattr(stage, call), kind_of))
    try:
        yield
    finally:
        for stage in stages:
            for call in CALLS:
                delattr(stage, call)


CONTENDERS: Mapping[str, type[Ours] | type[Torch]] = {"scaletorch": Ours, "torch": Torch}
