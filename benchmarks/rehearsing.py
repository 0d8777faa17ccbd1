"""Cost of a rehearsal compared with a training step, in time and memory.

A Llama in float32 on two and four ranks, one thread each. A step and a rehearsal of it take turns
in the same processes; the slower rank's time and the largest rank's peak count.

    python -m benchmarks.rehearsing --hidden 512 --layers 8 --tokens 4096

- step: median milliseconds of a training step.
- rehearsal / step: median and quartiles of each repeat's ratio.
- peak: MiB by which a step and a rehearsal raise the process's memory; the rehearsal is measured
  after the step.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from scaletorch.compose import parallelize, rehearse, shard_global_batch, train_step
from scaletorch.dist import launch
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.pg_manager import setup_process_group_manager

from .harness.memory import forget_peak, resident
from .harness.tables import machine, parser, ratio, table
from .harness.turns import of_slowest_rank, repeated, seconds

LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "dp 2": (2, {"dp_size": 2}, {}),
    "tp 2": (2, {"tp_size": 2}, {}),
    "tp 2, `sequence_parallel`": (2, {"tp_size": 2}, {"sequence_parallel": True}),
    "cp 2": (2, {"cp_size": 2}, {}),
    "pp 2": (2, {"pp_size": 2}, {}),
    "tp 2 x dp 2": (4, {"tp_size": 2, "dp_size": 2}, {}),
}
ROWS, MICRO_BATCHES, WORDS = 8, 2, 4096
MIB = 2**20


def measure(
    sizes: dict[str, int], options: dict[str, Any], given: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, float], int]:
    """Return seconds and peaks of a step and of a rehearsal, and the number of parameters."""
    torch.set_num_threads(1)
    manager = setup_process_group_manager(**sizes)
    torch.manual_seed(0)
    hidden: dict[str, Any] = {"hidden_size": given.hidden, "intermediate_size": 3 * given.hidden}
    plain = Llama(LlamaConfig(vocab_size=WORDS, num_layers=given.layers, **hidden))
    count = sum(parameter.numel() for parameter in plain.parameters())
    model = parallelize(plain, manager, rehearse=True, **options)
    drawn = torch.randint(WORDS, (ROWS, given.tokens // ROWS + 1), generator=torch.Generator())
    batch = {"input_ids": drawn[:, :-1], "labels": drawn[:, 1:]}
    micro_batches = shard_global_batch(batch, MICRO_BATCHES, model=model)
    runs: dict[str, Callable[[], object]] = {
        "step": partial(train_step, model, micro_batches),
        "rehearsal": partial(rehearse, model, micro_batches),
    }
    rehearse(model, micro_batches)  # the first rehearsal and the first step do more checks
    train_step(model, micro_batches)
    model.reset()
    peaks = {name: _raised(run, model.reset) for name, run in runs.items()}
    clean = {name: partial(_then, run, model.reset) for name, run in runs.items()}
    times = repeated(seconds, clean, given.repeats)
    found = {name: of_slowest_rank(each) for name, each in times.items()}
    return found, {n: of_slowest_rank([each])[0] for n, each in peaks.items()}, count


def _then(run: Callable[[], object], clean: Callable[[], None]) -> None:
    run()
    clean()


def _raised(run: Callable[[], object], clean: Callable[[], None]) -> float:
    before = forget_peak()
    run()
    clean()
    return (resident("HWM") - before) / MIB


def main() -> None:
    """Measure every layout and print a table."""
    command = parser(__doc__)
    command.add_argument("--hidden", type=int, default=512)
    command.add_argument("--layers", type=int, default=8)
    command.add_argument("--tokens", type=int, default=4096, help=f"of a step; {ROWS} rows")
    command.add_argument("--repeats", type=int, default=7)
    command.add_argument("--layouts", nargs="+", choices=[*LAYOUTS], default=[*LAYOUTS])
    given = command.parse_args()
    rows, count = [], 0
    for name in given.layouts:
        ranks, sizes, options = LAYOUTS[name]
        times, peaks, count = launch(measure, ranks, sizes, options, given, timeout=1200)[0]
        step = statistics.median(times["step"])
        figures = [f"{1e3 * step:,.0f}", ratio(times["rehearsal"], times["step"])]
        rows.append([name, *figures, *(f"{peaks[each]:,.0f}" for each in ("step", "rehearsal"))])
    print(f"{machine()}; {count / 1e6:.1f} M parameters, {given.tokens} tokens a step\n")
    columns = ["layout", "step, ms", "rehearsal / step", "peak of a step, MiB", "of a rehearsal"]
    print(table(columns, rows))


if __name__ == "__main__":
    main()
