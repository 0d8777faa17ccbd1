"""Measurements of training ways on one rank; every rank runs the same."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ..harness.memory import forget_peak, resident
from ..harness.overlap import Hidden, hidden
from ..harness.turns import Spent, collected, in_turns, timed
from .alternatives import MainGradientsDDP
from .checks import Plan, errors
from .models import Batch, Size, Transformer, make_batches, make_model, shared_copy
from .trainer import Trainer, Way
from .ways import ALONE


@dataclass
class Figures:
    """Measurements of one way on one rank.

    Attributes:
        steps: Time of each repeat.
        error: Error of the gradients, or of the parameters after optimizer steps.
        hidden: Communication of each recorded step.
        state: Bytes of the optimizer's state.
    """

    steps: list[Spent] = field(default_factory=list)
    error: float = 0.0
    hidden: list[Hidden] = field(default_factory=list)
    state: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank's model, and peaks above it: of three steps, and of the last one."""

    model: int
    above: int
    steady: int


def measure(plan: Plan) -> dict[str, Figures]:
    """Measure every way, after a check of its results."""
    model = make_model(plan.size)
    batches = make_batches(plan.size, dist.get_rank())
    found = {name: Figures() for name in plan.ways}
    with trainers(plan, model) as ways:
        for name, error in errors(plan, model, ways).items():
            found[name].error = error
        for name, figures in take_turns(plan, ways):
            found[name].steps.append(figures)
        for name, way in ways.items():
            found[name].state = way.state_bytes()
            if name != ALONE:
                found[name].hidden = record(way, batches, plan.recorded)
    return found


@contextmanager
def trainers(plan: Plan, model: Transformer) -> Iterator[dict[str, Trainer]]:
    """Make a trainer for each way, each with its own process group."""
    # If nothing changes the parameters, the ways share their memory.
    duplicate = copy.deepcopy if plan.trains else shared_copy
    groups = {name: dist.new_group() for name in plan.ways}
    ways = {name: Trainer(way, duplicate(model), groups[name]) for name, way in plan.ways.items()}
    yield ways
    for way in ways.values():
        way.settle()
    ways.clear()
    gc.collect()  # destroying the group of a live DDP may block
    for group in groups.values():
        dist.destroy_process_group(group)


def take_turns(plan: Plan, ways: Mapping[str, Trainer]) -> Iterator[tuple[str, Spent]]:
    """Run all ways in turn; yield the time of each step.

    A way keeps its gradients while others run; freeing them is part of its next step.
    """
    batches = make_batches(plan.size, dist.get_rank())
    with collected():
        for name in in_turns(ways, plan.repeats):
            gc.collect()  # else a way would pay for another's garbage
            burst = partial(ways[name].steps, batches, plan.burst)
            yield name, timed(burst).over(plan.burst)


def record(way: Trainer, batches: list[Batch], repeats: int) -> list[Hidden]:
    """Record a way's communication; DDP gets a Python hook that does the same."""
    ddp = getattr(way.module, "ddp", way.module)
    if isinstance(ddp, DistributedDataParallel) and not isinstance(way.module, MainGradientsDDP):
        ddp.register_comm_hook(ddp.process_group, allreduce_hook)
    first = next(each for each in way.module.modules() if isinstance(each, nn.Embedding))
    return [hidden(partial(way.step, batches), first) for _ in range(repeats)]


def memory(plan: Plan, name: str) -> Memory:
    """Measure one way's memory, on a rank that ran nothing else."""
    tiny = replace(plan.size, dim=64, layers=1, length=16)
    run_steps(plan.ways[name], tiny, make_model(tiny))  # load libraries first
    model = make_model(plan.size)
    gc.collect()
    size = sum(each.numel() * each.element_size() for each in model.parameters())
    before = forget_peak()
    first, last = run_steps(plan.ways[name], plan.size, model)
    return Memory(size, max(first, last) - before, last - before)


def run_steps(way: Way, size: Size, model: Transformer) -> tuple[int, int]:
    """Return the peak of two steps, in which buckets are rebuilt, and of a third."""
    batches, group = make_batches(size, dist.get_rank()), dist.new_group()
    trainer = Trainer(way, model, group)
    trainer.step(batches)
    trainer.step(batches)
    first = resident("HWM")
    forget_peak()
    trainer.step(batches)
    trainer.settle()
    last = resident("HWM")
    del trainer
    gc.collect()
    dist.destroy_process_group(group)
    return first, last
