"""The layout by a plan, and whether the run is as it was planned."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from statistics import median
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from ..dist import all_gather_object
from ..dist.errors import InvalidArgumentError
from ..parallel.data_parallel import DataParallelBucket
from ..parallel.pg_manager import ProcessGroupManager
from ..plan import Estimate, Memory, Options, describe, plan, read_cluster, usual_cuts
from ..plan.layout import CHUNKS
from ..plan.memory import kept_by_autograd, summed_gradients
from ..plan.memory.measured import Kept, held
from ..plan.timing import time as time_of
from .checks import check_config
from .config import PretrainConfig
from .data import load_corpus
from .sizes import plain_model, sizes_of

STEPS = 10  # after which what was planned is put beside what was found
LEARNING = 2  # steps that are not timed: buffers are made, forms of messages learned
APART = 0.1  # of what was planned, from which on it is a warning


def chosen(config: PretrainConfig) -> tuple[PretrainConfig, Estimate | None]:
    """Return the settings on the best layout for the cluster, if they name one; and its costs.

    Of activations these are what autograd keeps at its most, which is what `AsPlanned` finds.

    Raises:
        InvalidArgumentError: A layout is given too, the file is no cluster, or no layout fits.
    """
    if config.plan is None:
        return config, None
    check_config(config)
    if config.grid.world_size > 1:
        raise InvalidArgumentError(
            f"--plan chooses the layout, and {config.grid} is given: leave one of them out"
        )
    cluster = read_cluster(config.plan)
    corpus = load_corpus(config.data, config.tokenizer, seq_len=config.seq_len)
    sizes = replace(sizes_of(config), vocab_size=corpus.vocab_size)
    sides = [size for size in range(1, cluster.ranks + 1) if cluster.ranks % size == 0]
    cuts = usual_cuts(cluster.ranks, tp=sides, cp=sides, sequence_parallel=(False,))
    description = describe(lambda: computing(config, plain_model(sizes)), config.seq_len, cuts=cuts)
    options = Options(
        sequence_parallel=(False,), recompute=("none",), zero=(0, 1, 2),
        schedules=((config.schedule, CHUNKS.get(config.schedule, 1)),),
        micro_rows=(1, 2, 4, 8, 16),
    )  # fmt: skip
    best = plan(description, config.batch_size, cluster, options=options, time=time_of).best()
    layout, grid = best.layout, best.layout.grid
    # What a run is compared with: the most that autograd keeps, and gradients behind a step.
    kept, summed = (of(description, layout) for of in (kept_by_autograd, summed_gradients))
    each = zip(best.memory, kept, summed, strict=True)
    best = replace(
        best, memory=tuple(replace(m, activations=a, gradients=g) for m, a, g in each)
    )  # fmt: skip
    return replace(
        config, tp=grid.tp, cp=grid.cp, pp=grid.pp, dp=grid.dp, ep=grid.ep,
        zero=cast(Any, layout.zero), micro_batches=layout.micro_batches,
    ), best  # fmt: skip


def computing(config: PretrainConfig, model: nn.Module) -> nn.Module:
    """Return a plain model that computes in the run's dtype."""
    if config.dtype == "bfloat16":  # around forward alone: backward must not run under autocast
        kind = "cpu" if next(model.parameters()).is_meta else next(model.parameters()).device.type
        cast = torch.autocast(kind, torch.bfloat16)(type(model).forward)
        model.__dict__["forward"] = MethodType(cast, model)
    return model.to(torch.float64 if config.dtype == "float64" else torch.float32)


class AsPlanned:
    """Watches the first steps of a run, and says whether they are as planned.

    Args:
        planned: What the plan says; None watches nothing.
        model: What `parallelize` returned.
        optimizer: Of the run.
        manager: Of the run.
    """

    def __init__(
        self,
        planned: Estimate | None,
        model: DataParallelBucket,
        optimizer: Optimizer,
        manager: ProcessGroupManager,
    ) -> None:
        self._planned, self._model, self._optimizer = planned, model, optimizer
        self._manager = manager
        self._seconds: list[float] = []
        self.lines: list[str] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surround a step; after the last that is watched `lines` say how it compares."""
        number = len(self._seconds)
        if self._planned is None or number >= STEPS:
            yield
            return
        start = time.perf_counter()
        if number < STEPS - 1:
            yield
            self._seconds.append(time.perf_counter() - start)
            return
        with self._weighed() as found:  # which makes it slower: it is not timed
            yield
        self._seconds.append(0.0)
        self._compare(self._planned, found[0])

    @contextmanager
    def _weighed(self) -> Iterator[list[Memory]]:
        """Yield what is held when the optimizer has stepped: gradients are still there then."""
        kept, found = Kept(self._model), list[Memory]()

        def weigh(*_: object) -> None:
            found.append(held(self._model, self._optimizer, kept.most))

        hook = self._optimizer.register_step_post_hook(weigh)
        try:
            with kept:
                yield found
        finally:
            hook.remove()

    def _compare(self, planned: Estimate, own: Memory) -> None:
        seconds = median(self._seconds[LEARNING : STEPS - 1])
        found: list[tuple[int, tuple[int, ...], float]] = all_gather_object(
            (self._manager.pp_rank, astuple(own), seconds)
        )
        place, sizes, _ = max(found, key=lambda each: sum(each[1]))
        expected, fullest = planned.memory[place], Memory(*sizes)
        self.lines = [
            _line(name, getattr(expected, name) / 2**20, getattr(fullest, name) / 2**20, "MiB")
            for name in ("parameters", "gradients", "optimizer", "activations")
        ]
        if planned.time is not None:
            slowest = max(each[2] for each in found)
            self.lines.append(_line("step", planned.time.step, slowest, "s"))


def _line(name: str, planned: float, found: float, unit: str) -> str:
    apart = found / planned - 1 if planned else 0.0 if not found else float("inf")
    text = f"{name}: planned {planned:.3f} {unit}, found {found:.3f} ({apart:+.1%})"
    return f"warning: {text}: the plan was wrong" if abs(apart) > APART else text
