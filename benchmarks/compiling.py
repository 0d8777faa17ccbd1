"""Gain of `torch.compile` of the layers in a training step, on each axis.

A small Llama in float32, in one process and on two ranks, one thread each: as it is, and with each
layer compiled by inductor before `parallelize`. Both versions take turns; the slower rank's time
counts. Losses and gradient norms are compared first.

    python -m benchmarks.compiling --tokens 2048 --repeats 15

- ms: median of a step, as it is and compiled.
- tokens/s: of the global batch, by these medians.
- gain: median and quartiles of each repeat's ratio, as it is to compiled; above 1 the compiled
  step is faster.
"""

from __future__ import annotations

import shutil
import statistics
from functools import partial
from typing import Any

import torch

from scaletorch.compose import global_grad_norm, parallelize, shard_global_batch, train_step
from scaletorch.dist import launch
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.pg_manager import setup_process_group_manager

from .harness.checks import check
from .harness.tables import machine, parser, ratio, table
from .harness.turns import of_slowest_rank, repeated, seconds

LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one process": ({}, {}),
    "tp 2": ({"tp_size": 2}, {}),
    "tp 2, `sequence_parallel`": ({"tp_size": 2}, {"sequence_parallel": True}),
    "cp 2": ({"cp_size": 2}, {}),
    "pp 2": ({"pp_size": 2}, {}),
    "dp 2": ({"dp_size": 2}, {}),
}
ROWS, MICRO_BATCHES = 8, 2
BOUND = 1e-4  # relative error allowed in float32
Times = dict[str, list[float]]


def make(hidden: int, compiled: bool) -> Llama:
    """Return the plain model, the same on every rank."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_layers": 4,
    }
    model = Llama(LlamaConfig(vocab_size=1024, **sizes))
    for layer in model.layers if compiled else ():
        layer.compile()
    return model


def measure(
    sizes: dict[str, int], options: dict[str, Any], hidden: int, tokens: int, repeats: int
) -> Times:
    """Return the seconds of each step as it is and compiled, on the slowest rank."""
    torch.set_num_threads(1)
    manager = setup_process_group_manager(**sizes)
    drawn = torch.randint(1024, (ROWS, tokens // ROWS + 1), generator=torch.Generator())
    batch = {"input_ids": drawn[:, :-1], "labels": drawn[:, 1:]}
    runs, found = {}, []
    for name, compiled in (("as it is", False), ("compiled", True)):
        model = parallelize(make(hidden, compiled), manager, **options)
        run = partial(step, model, shard_global_batch(batch, MICRO_BATCHES, model=model))
        run()  # the first step does more than later ones
        run()
        found.append([run(), global_grad_norm(model)])
        runs[name] = run
    check("compiled", found[1], found[0], BOUND)
    times = repeated(seconds, runs, repeats)
    return {name: of_slowest_rank(each) for name, each in times.items()}


def step(model: Any, batches: list[Any]) -> torch.Tensor:
    """Run forward and backward of a global batch; return the loss."""
    model.reset()
    return train_step(model, batches)


def main() -> None:
    """Measure every layout and print a table."""
    command = parser(__doc__)
    command.add_argument("--hidden", type=int, default=256)
    command.add_argument("--tokens", type=int, default=2048, help=f"of a step; {ROWS} rows")
    command.add_argument("--repeats", type=int, default=15)
    options = command.parse_args()
    if shutil.which("g++") is None:
        command.error("inductor needs g++")
    print(f"{machine()}; hidden {options.hidden}, {options.tokens} tokens a step\n")
    rows = []
    for name, layout in LAYOUTS.items():
        ranks = 2 if layout[0] else 1
        given = (*layout, options.hidden, options.tokens, options.repeats)
        found = launch(measure, ranks, *given, timeout=900)[0]
        plain, compiled = (found[way] for way in ("as it is", "compiled"))
        middle = [statistics.median(each) for each in (plain, compiled)]
        figures = [f"{1e3 * each:.1f}" for each in middle]
        figures += [f"{options.tokens / each:,.0f}" for each in middle]
        rows.append([name, *figures, ratio(plain, compiled)])
    columns = ["layout", "ms", "compiled ms", "tokens/s", "compiled tokens/s", "gain (quartiles)"]
    print(table(columns, rows))


if __name__ == "__main__":
    main()
