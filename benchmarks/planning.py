"""Planned and measured step times: 12 layouts of 2 to 4 ranks, of three models.

This machine is calibrated as by `python -m benchmarks.calibrating`, with 2 ranks and with 4.
Then every layout is predicted, and trained on real ranks: forward, backward, AdamW. The layouts of
a model take turns.

    python -m benchmarks.planning --quick
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.dist import launch
from scaletorch.models import Llama, LlamaConfig, Mixture, MixtureConfig
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import Grid, setup_process_group_manager
from scaletorch.plan import Cluster, Layout, Time
from scaletorch.plan import time as planned
from scaletorch.plan.describing import describe

from .calibrating import calibrate
from .harness.tables import machine, parser, publish, row, table
from .harness.turns import collected, in_turns, of_slowest_rank, seconds

CLOSE, APART = 0.15, 0.15  # relative error of a good prediction; difference of unequal times


class Job(NamedTuple):
    """A model, its batch, and the layouts to train it on."""

    config: LlamaConfig
    length: int
    rows: int
    layouts: tuple[Layout, ...]


JOBS = {
    "small": Job(
        LlamaConfig(2048, 256, 704, 4, 4, 4), 128, 16, (
            Layout(Grid(dp=2), micro_rows=8),
            Layout(Grid(tp=2), micro_rows=16),
            Layout(Grid(pp=2), micro_rows=4, micro_batches=4),
            Layout(Grid(cp=2), micro_rows=16),
        ),
    ),
    "wide": Job(
        LlamaConfig(8192, 512, 1408, 4, 8, 8), 256, 8, (
            Layout(Grid(dp=2), micro_rows=4, zero=1),
            Layout(Grid(tp=2), sequence_parallel=True, micro_rows=8),
            Layout(Grid(pp=2, dp=2), micro_rows=1, micro_batches=4),
            Layout(Grid(pp=4), micro_rows=2, micro_batches=4, recompute="full"),
        ),
    ),
    "mixture": Job(
        MixtureConfig(2048, 256, 512, 4, 4, 4, num_experts=4), 128, 16, (
            Layout(Grid(dp=2), micro_rows=8),
            Layout(Grid(dp=2, ep=2), micro_rows=8),
            Layout(Grid(tp=2, dp=2), micro_rows=8),
            Layout(Grid(pp=2), schedule="afab", micro_rows=4, micro_batches=4),
        ),
    ),
}  # fmt: skip


def built(config: LlamaConfig) -> nn.Module:
    """Return the model."""
    return Mixture(config) if isinstance(config, MixtureConfig) else Llama(config)


def train(job: Job, layout: Layout, steps: int) -> list[float]:
    """Return the seconds of steps on the slowest rank; two warm-up steps are left out."""
    grid = layout.grid
    manager = setup_process_group_manager(
        tp_size=grid.tp, cp_size=grid.cp, pp_size=grid.pp, dp_size=grid.dp, ep_size=grid.ep
    )
    torch.manual_seed(0)
    model = parallelize(
        built(job.config), manager, schedule=layout.schedule,
        recompute=layout.recompute == "full", sequence_parallel=layout.sequence_parallel,
        cp_method=layout.cp_method, rehearse=False,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if layout.zero:
        shard_optimizer(optimizer, model, stage=layout.zero)
    ids = torch.randint(job.config.vocab_size, (job.rows, job.length + 1))
    whole = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    batch = shard_global_batch(whole, layout.micro_batches, manager, model=model)

    def step() -> None:
        train_step(model, batch, manager)
        optimizer.step()
        model.reset()

    for _ in range(2):
        step()
    with collected():
        return of_slowest_rank([seconds(step) for _ in range(steps)])


def predicted(job: Job, clusters: dict[int, Cluster]) -> list[Time]:
    """Return the planned time of each layout."""
    cuts = [layout.cut for layout in job.layouts]
    description = describe(lambda: built(job.config), job.length, cuts=cuts, kernels="cpu")
    return [
        planned(description, layout, clusters[layout.grid.world_size]) for layout in job.layouts
    ]


def order(pairs: Sequence[tuple[float, float]]) -> tuple[int, int]:
    """Return the number of pairs whose measured times differ, and of those planned in order."""
    apart = [
        (one, two) for one, two in combinations(pairs, 2)
        if max(one[1], two[1]) > (1 + APART) * min(one[1], two[1])
    ]  # fmt: skip
    return len(apart), sum((one[0] < two[0]) == (one[1] < two[1]) for one, two in apart)


def lines(jobs: dict[str, Job], steps: int, repeats: int, share: float) -> Iterator[str]:
    """Yield the table, a row for each layout, and the quality of the predictions."""
    begin = time.perf_counter()
    sizes = sorted({layout.grid.world_size for job in jobs.values() for layout in job.layouts})
    clusters = {size: calibrate(size, seconds=share) for size in sizes}
    took = time.perf_counter() - begin
    yield f"{machine()}; calibrated with {' and '.join(map(str, sizes))} ranks in {took:.0f} s\n"
    yield table(["model", "layout", "predicted ms", "from-to", "measured ms", "ratio"], [])
    all_ratios: list[float] = []
    told = [0, 0]
    for name, job in jobs.items():
        plans = predicted(job, clusters)
        found: dict[int, list[float]] = {at: [] for at in range(len(plans))}
        for at in in_turns(found, repeats):
            found[at] += launch(
                train, job.layouts[at].grid.world_size, job, job.layouts[at], steps
            )[0]
        measured = [statistics.median(each) for each in found.values()]
        for layout, plan, real in zip(job.layouts, plans, measured, strict=True):
            all_ratios.append(plan.step / real)
            yield row(
                name, words(layout), f"{plan.step * 1e3:.1f}",
                f"{plan.low * 1e3:.1f}-{plan.high * 1e3:.1f}", f"{real * 1e3:.1f}",
                f"{all_ratios[-1]:.2f}",
            )  # fmt: skip
        pairs, right = order([(p.step, m) for p, m in zip(plans, measured, strict=True)])
        told = [told[0] + pairs, told[1] + right]
    near = sum(abs(each - 1) <= CLOSE for each in all_ratios)
    yield (
        f"\n{near} of {len(all_ratios)} within {CLOSE:.0%}, the worst "
        f"{max(all_ratios, key=lambda each: abs(each - 1)):.2f}; of {told[0]} pairs of a model's "
        f"layouts that differ by more than {APART:.0%}, {told[1]} in the right order"
    )


def words(layout: Layout) -> str:
    """Return a layout in a few words."""
    grid = layout.grid
    parts = [f"{axis} {getattr(grid, axis)}" for axis in ("dp", "pp", "cp", "tp", "ep")
             if getattr(grid, axis) > 1]  # fmt: skip
    parts += [f"zero {layout.zero}"] * bool(layout.zero)
    parts += ["sequence parallel"] * layout.sequence_parallel
    parts += [layout.schedule] * (grid.pp > 1)
    parts += ["recompute"] * (layout.recompute != "none")
    return ", ".join([*parts, f"{layout.micro_batches} x {layout.micro_rows} rows"])


def main() -> None:
    """Print the table."""
    command = parser(__doc__)
    command.add_argument("--quick", action="store_true", help="the small model, few steps")
    command.add_argument("--models", nargs="+", choices=[*JOBS], default=[*JOBS])
    command.add_argument("--steps", type=int, default=15)
    command.add_argument("--repeats", type=int, default=3, help="launches of each layout (3)")
    command.add_argument("--out", type=Path, help="a file for the table")
    given = command.parse_args()
    jobs = {name: JOBS[name] for name in given.models}
    if given.quick:
        publish(lines({"small": JOBS["small"]}, 5, 1, 0.1), given.out)
    else:
        publish(lines(jobs, given.steps, given.repeats, 0.5), given.out)


if __name__ == "__main__":
    main()
