"""Measurements of all pipelines' steps on one rank; every rank runs the same."""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..harness.checks import check as check_one
from ..harness.gauges import peak
from ..harness.turns import Run, Spent, collected, in_turns, timed
from .gauges import live_graphs, predicted
from .models import LAYERS, Size, accumulate, make
from .ways import CONTENDERS, THEIRS, Pipeline

Key = tuple[str, str]  # the schedule and the contender
ALONE: Key = ("one process", "")
LOSS = "the loss"


@dataclass(frozen=True)
class Plan:
    """A measurement.

    Attributes:
        repeats: Steps of each way.
        recorded: Steps whose actions are timed.
        memory: Whether memory is measured.
        latency: Seconds of a message.
    """

    repeats: int
    recorded: int = 1
    memory: bool = False
    latency: float = 0.0


@dataclass(frozen=True)
class Fill:
    """The ranks' use in a step, as measured and as simulated.

    Attributes:
        actions: Actions of all ranks.
        ratio: Measured time over simulated time.
        bubble: Measured share of idle time.
        least: Simulated share of idle time.
    """

    actions: int
    ratio: float
    bubble: float
    least: float


@dataclass
class Figures:
    """Measurements of one way on one rank.

    Attributes:
        equal: Whether its gradients are bit-identical to one process's.
        steps: Time of each repeat.
        fills: Use of the ranks in each recorded step, the same on all ranks.
        live: Largest number of (stage, micro-batch) graphs alive.
        peak: Peak bytes.
    """

    equal: bool = True
    steps: list[Spent] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    live: float = 0.0
    peak: int = 0


def measure(size: Size, plan: Plan) -> dict[Key, Figures]:
    """Measure every way, after a check of its gradients."""
    model, batches = make(size)
    whole = copy.deepcopy(model)
    alone = partial(accumulate, size, whole, batches)
    loss = alone()
    expected = {name: torch.as_tensor(p.grad) for name, p in whole.named_parameters()}
    expected[LOSS] = loss
    ways: dict[Key, Pipeline] = {
        (name, who): contender(name, size, model, batches)
        for name in THEIRS
        for who, contender in CONTENDERS.items()
    }
    found = {key: Figures(check(key, way, expected, size.dtype)) for key, way in ways.items()}
    runs: dict[Key, tuple[Run, nn.Module]] = {
        key: (way.step, way.module) for key, way in ways.items()
    }
    runs[ALONE] = (alone if dist.get_rank() == 0 else _nothing), whole  # the others wait
    found[ALONE] = Figures()
    with collected():
        for key in in_turns(runs, plan.repeats):
            found[key].steps.append(timed_step(*runs[key]))
    for _ in range(plan.recorded):
        for key, way in ways.items():
            found[key].fills.append(fill(way, plan.latency))
    if plan.memory:
        for key, way in ways.items():
            found[key].live, found[key].peak = memory(key[0], way, size)
    return found


def check(key: Key, way: Pipeline, expected: Mapping[str, Tensor], dtype: str) -> bool:
    """Stop if a way is wrong; return whether its gradients are bit-identical to one process's."""
    bound = 1e-4 if dtype == "float32" else 1e-1
    loss = way.step()
    dist.all_reduce(loss)  # only one rank has it
    found = {name: torch.as_tensor(p.grad) for name, p in way.module.named_parameters()}
    for name, value in (found | {LOSS: loss}).items():
        check_one(f"{key}: {name}", [value], [expected[name]], bound)
    held = torch.tensor(len(found))
    dist.all_reduce(held)
    if held != len(expected) - 1:
        raise SystemExit(f"{key}: ranks have {held} of {len(expected) - 1} gradients")
    return all(torch.equal(value, expected[name]) for name, value in found.items())


def timed_step(run: Run, module: nn.Module) -> Spent:
    """Time a step."""
    module.zero_grad()
    gc.collect()  # else a way would pay for another's garbage
    return timed(run)


def fill(way: Pipeline, latency: float) -> Fill:
    """Run a recorded step and simulate it."""
    way.module.zero_grad()
    timeline = way.recorded()
    simulated = predicted(timeline, latency)
    ratio = timeline.makespan / simulated.makespan
    return Fill(len(timeline.spans), ratio, timeline.bubble, simulated.bubble)


def memory(schedule: str, way: Pipeline, size: Size) -> tuple[float, int]:
    """Return the largest number of stages' graphs alive, and the peak bytes of tensors."""
    kind: Any = LAYERS[size.layer]
    layers = [module for module in way.module.modules() if isinstance(module, kind)]
    of_stage = size.num_layers / dist.get_world_size() / THEIRS[schedule].chunks
    way.module.zero_grad()
    live = live_graphs(way.step, layers) / of_stage
    way.module.zero_grad()
    return live, peak(way.step)


def _nothing() -> None:
    """Do nothing while another rank runs alone."""
