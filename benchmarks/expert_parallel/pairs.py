"""Steps of a pipeline of experts under dualpipe_v, its pairs together and one after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from scaletorch import compose
from scaletorch.compose.forward import pipeline_of
from scaletorch.models import Mixture, MixtureConfig
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

from ..harness.checks import check
from ..harness.gauges import exposed
from ..harness.turns import of_slowest_rank, repeated, seconds
from .measure import DTYPES, RANKS

LEAST, MOST = 9, 60  # repeats
ALONE, TOGETHER = "one after another", "in pairs"


@dataclass(frozen=True)
class Step:
    """A step: `stages` ranks of a pipeline, each with two of its stages, over 2 ranks of experts.

    Each stage is a layer; `tokens` are those of a micro-batch on a rank.
    """

    stages: int
    hidden: int
    tokens: int
    micro_batches: int
    dtype: str
    recompute: bool

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        return RANKS * self.stages


@dataclass(frozen=True)
class Figures:
    """Seconds of each repeat: of the step, and in communication of any kind."""

    seconds: list[float]
    exposed: list[float]


def measure(step: Step, budget: float) -> dict[str, Figures]:
    """Measure both ways on this rank, for about `budget` seconds each."""
    manager = setup_process_group_manager(dp_size=RANKS, pp_size=step.stages, ep_size=RANKS)
    runs = prepare(step, manager)
    (spent,) = of_slowest_rank([sum(map(seconds, runs.values()))])
    repeats = min(MOST, max(LEAST, int(budget * len(runs) / spent)))
    times, waits = repeated(seconds, runs, repeats), repeated(exposed, runs, repeats)
    destroy_process_group_manager()
    return {name: Figures(times[name], waits[name]) for name in runs}


def prepare(step: Step, manager: Any) -> dict[str, Callable[[], object]]:
    """Return each way's step, after a look at its gradients."""
    torch.manual_seed(0)
    config = MixtureConfig(
        vocab_size=64,
        hidden_size=step.hidden,
        intermediate_size=2 * step.hidden,
        num_layers=2 * step.stages,
    )
    plain = Mixture(config).to(DTYPES[step.dtype])
    model = compose.parallelize(plain, manager, schedule="dualpipe_v", recompute=step.recompute)
    ids = torch.randint(0, 64, (RANKS * step.micro_batches, step.tokens + 1))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    micro_batches = compose.shard_global_batch(batch, step.micro_batches, model=model)
    runtime = pipeline_of(model).runtime
    switching = runtime.switching

    def run(way: Any) -> None:
        runtime.switching = way
        model.zero_grad()
        compose.train_step(model, micro_batches)

    def gradients() -> list[torch.Tensor]:
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    runs: dict[str, Callable[[], object]]
    runs = {ALONE: partial(run, None), TOGETHER: partial(run, switching)}
    runs[ALONE]()
    expected = gradients()
    runs[TOGETHER]()
    check(TOGETHER, gradients(), expected, 0.0)
    return runs
