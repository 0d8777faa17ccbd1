"""The layout by a plan, and whether the run is as it was planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, cast

from ..dist.errors import InvalidArgumentError
from ..parallel.pipeline_parallel import SCHEDULES
from ..plan import Estimate, Options, describe, plan, read_cluster, usual_cuts
from ..plan import time as time_of
from .checks import check_config
from .config import PretrainConfig, computing, plain_model, sizes_of
from .data import load_corpus

STEPS = 10  # after which the time that was planned is put beside what was found
LEARNING = 2  # steps that do not count: buffers are made, forms of messages learned
APART = 0.1  # of what was planned, from which on it is a warning


def chosen(config: PretrainConfig) -> tuple[PretrainConfig, Estimate | None]:
    """Return the settings on the best layout for the cluster, if they name one; and its costs.

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
    chunks = SCHEDULES[config.schedule](2, 1).num_stages // 2  # of each rank
    options = Options(
        sequence_parallel=(False,), recompute=("none",), zero=(0, 1, 2),
        schedules=((config.schedule, chunks),),
        micro_rows=(1, 2, 4, 8, 16),
    )  # fmt: skip
    best = plan(description, config.batch_size, cluster, options=options, time=time_of).best()
    layout, grid = best.layout, best.layout.grid
    return replace(
        config, tp=grid.tp, cp=grid.cp, pp=grid.pp, dp=grid.dp, ep=grid.ep,
        zero=cast(Any, layout.zero), micro_batches=layout.micro_batches,
    ), best  # fmt: skip


def compare_time(planned: Estimate, seconds: Sequence[float]) -> str:
    """Say how long a step takes, beside what was planned; steps are the first of a run."""
    found = median(seconds[LEARNING:])
    if planned.time is None:
        return f"a step takes {found:.3f} s"
    apart = found / planned.time.step - 1
    text = f"a step: planned {planned.time.step:.3f} s, found {found:.3f} ({apart:+.1%})"
    return f"warning: {text}: the plan was wrong" if abs(apart) > APART else text
