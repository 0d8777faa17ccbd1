"""What is to be trained, and how one layout would divide it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.pg_manager import Grid
from scaletorch.parallel.pipeline_parallel import (
    SCHEDULES,
    Schedule,
    distribute_layers,
    infer_split,
    layers_of,
)
from scaletorch.parallel.tensor_parallel import Explanation, explain

ITEM = 4  # bytes of a float32


@dataclass(frozen=True, slots=True)
class Job:
    """A model of float32 and its batches.

    Attributes:
        config: Sizes of the model.
        length: Tokens in a sequence.
        rows: Sequences in the global batch of a step.
        micro_rows: Sequences in a micro-batch of one rank.
        schedule: Of the pipeline: "1f1b" or "afab", of one stage on a rank and whole backwards.
        method: How cp ranks attend.
        zero: 1 shards the optimizer's state over dp x cp.
    """

    config: LlamaConfig
    length: int
    rows: int
    micro_rows: int = 1
    schedule: str = "1f1b"
    method: str = "ring"
    zero: int = 0


@dataclass(frozen=True, slots=True)
class Division:
    """A job on a layout: who holds which modules, and what tensor parallelism does to them.

    Attributes:
        job: What is trained.
        grid: On which layout.
        model: The plain model, on the meta device.
        stages: For each stage of the pipeline the names of its modules.
        explanation: Shapes of all parameters on each tp rank, and what is sent for them.
        micro_batches: Of a step, on each data-parallel rank.
    """

    job: Job
    grid: Grid
    model: Llama
    stages: tuple[tuple[str, ...], ...]
    explanation: Explanation
    micro_batches: int

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a rank; cp pads sequences to two equal chunks a rank."""
        parts = 2 * self.grid.cp
        padded = -(-self.job.length // parts) * parts if self.grid.cp > 1 else self.job.length
        return self.job.micro_rows * padded // self.grid.cp

    def schedule(self) -> Schedule:
        """Return what the pipeline runs in a step."""
        return SCHEDULES[self.job.schedule](self.grid.pp, self.micro_batches)

    def num_layers(self, stage: int) -> int:
        """Return how many layers a stage has."""
        return len({*layers_of(self.model)}.intersection(self.stages[stage]))

    def parameters(self, stage: int, tp_rank: int = 0) -> list[int]:
        """Return the sizes of a rank's parameters in elements; a tied one counts once."""
        named = dict(self.model.named_parameters(remove_duplicate=False))
        found = {
            id(named[each.name]): torch.Size(each.local_shapes[tp_rank]).numel()
            for each in self.explanation.parameters
            if inside(each.name, self.stages[stage])
        }
        return list(found.values())

    def tied(self, stage: int, tp_rank: int = 0) -> int:
        """Return elements of a rank's embedding if it is the head too, on another stage."""
        last = self.grid.pp - 1
        if not self.job.config.tie_embeddings or last == 0 or 0 < stage < last:
            return 0
        return next(
            torch.Size(each.local_shapes[tp_rank]).numel()
            for each in self.explanation.parameters
            if each.name == "embed_tokens.weight"
        )


def divide(job: Job, grid: Grid) -> Division:
    """Put a job on a layout.

    Raises:
        ValueError: The layout is not legal for this job; the message says why.
    """
    rows = grid.dp * job.micro_rows
    if job.rows % rows:
        message = f"{job.rows} rows are no multiple of dp {grid.dp} x {job.micro_rows} rows"
        raise ValueError(message)
    if job.length < 2 * grid.cp and grid.cp > 1:
        raise ValueError(f"{job.length} tokens are too few for {2 * grid.cp} chunks (cp {grid.cp})")
    with torch.device("meta"):
        model = Llama(job.config)
    explanation = explain(model, grid.tp)
    split, names = infer_split(model), layers_of(model)
    stages = [
        [names[index] for index in indices] for indices in distribute_layers(len(names), grid.pp)
    ]
    stages[0] = [*split.first, *stages[0]]
    stages[-1] = [*stages[-1], *split.last]
    modules = tuple(tuple(each) for each in stages)
    return Division(job, grid, model, modules, explanation, job.rows // rows)


def inside(name: str, modules: tuple[str, ...]) -> bool:
    """Tell whether a dotted name is one of the modules, or in one."""
    return any(name == each or name.startswith(f"{each}.") for each in modules)
