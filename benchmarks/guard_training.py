"""What the guard finds of seeded faults in real training programs, and how it names them.

    python benchmarks/guard_training.py --count 100 --seed 0
    python benchmarks/guard_training.py --seed 0 --only 17          # that one again, with its text

As `guard_faults.py`, with what bare calls do not have: a model on layouts of 2 to 4 ranks, a
pipeline's runtime, a store in rank 0's process, checkpoints. What a rank raises is *told* where the
first line, or the error that all ranks raise alike, has it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import re
import resource
import signal
from dataclasses import dataclass
from typing import Any

import torch
from guard_faults import CAUSE, guarded, note, run_body, table, tell, write_end

import scaletorch.dist as dist
from scaletorch.checkpoint import save
from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.dist import guard
from scaletorch.dist.ranks.process import get_server
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.pg_manager import describe_rank, setup_process_group_manager

LAYOUTS = (
    {"tp_size": 2}, {"dp_size": 2, "tp_size": 2}, {"pp_size": 2, "dp_size": 2},
    {"pp_size": 2, "tp_size": 2}, {"pp_size": 4}, {"cp_size": 2, "tp_size": 2},
)  # fmt: skip
KINDS = (
    "forward", "backward", "loss", "lines", "lock", "regex", "kill", "stop", "stop first",
    "disk", "batches", "rows",
)  # fmt: skip
STEPS, FAULT = 7, 3
REFUSALS = ("disk", "batches", "rows")  # which all ranks may raise alike


@dataclass(frozen=True)
class Fault:
    """What one rank does otherwise in a step."""

    kind: str
    rank: int


@dataclass(frozen=True)
class Training:
    """A training program with a fault."""

    size: int
    layout: dict[str, int]
    fault: Fault


def make_training(seed: int, kind: str) -> Training:
    """Return the program of a seed."""
    draw = random.Random(f"{seed} {kind}")
    layouts = [layout for layout in LAYOUTS if kind not in ("batches", "rows") or len(layout) > 1]
    layout = draw.choice(layouts)
    size = 1
    for part in layout.values():
        size *= part
    rank = draw.randrange(size)
    if kind == "stop first":
        rank = 0
    if kind == "loss":
        rank = size - 1  # of the last stage
    return Training(size, layout, Fault(kind, rank))


def body(program: Training, folder: str) -> None:
    """Train on this rank, and write down how it ended."""
    write_end(folder, int(os.environ["RANK"]), lambda: train(program, folder))


def train(program: Training, folder: str) -> list[float]:
    """Train under the guard; the faulty rank goes wrong."""
    dist.init_dist("pytorch", "gloo", timeout=300)
    manager = setup_process_group_manager(**program.layout)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=4, num_heads=4,
        num_kv_heads=2,
    )  # fmt: skip
    model = parallelize(Llama(config), manager)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(64, (8, 33))
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()}
    guilty = dist.get_rank() == program.fault.rank
    with guarded(folder, describe_rank()):
        for step in range(STEPS):
            count = 2
            if guilty and step == FAULT:
                note(folder)
                batch, count = _go_wrong(program.fault.kind, model, batch)
            train_step(model, shard_global_batch(batch, count, manager), manager)
            optimizer.step()
            optimizer.zero_grad()
            if program.fault.kind == "disk":
                save(os.path.join(folder, "checkpoint", str(step)), model, optimizer, step=step)
            guard.step(step)
    return []


def _go_wrong(
    kind: str, model: torch.nn.Module, batch: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], int]:
    """Do it, or see to it; return what the rank trains on, in how many micro-batches."""
    if kind in ("forward", "loss", "lines", "backward"):
        _raise_in(model, kind)
    if kind == "disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind.startswith("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "lock":
        ctypes.PyDLL(None).sleep(1000)
    if kind == "regex":
        re.match("(a+)+$", 64 * "a" + "b")
    if kind == "rows":
        return {name: data[:4] for name, data in batch.items()}, 2
    return batch, 4 if kind == "batches" else 2


def _raise_in(model: torch.nn.Module, kind: str) -> None:
    more = "\n  + another line\n  - and one more" if kind == "lines" else ""

    def fail(*_: Any) -> None:
        raise ValueError(f"the seeded exception{more}")

    leaves = [m for m in model.modules() if not list(m.children()) and list(m.parameters(False))]
    if kind == "backward":
        next(iter(leaves[-1].parameters())).register_hook(fail)
    else:
        leaves[-1 if kind == "loss" else 0].register_forward_pre_hook(fail)


def judge(program: Training, ends: dict[int, Any], begun: float | None) -> dict[str, Any]:
    """Return what is counted of one run."""
    kind, guilty = program.fault.kind, program.fault.rank
    others = {rank: end for rank, end in ends.items() if kind in REFUSALS or rank != guilty}
    survivors = {r: e for r, e in others.items() if e is None or e["error"] != "aborted"}
    found = [end for end in survivors.values() if end is not None]
    named = [_names(program, end) for end in found]
    return {
        "hang": len(found) < len(survivors),
        "silent": any(not end["error"] for end in found),
        "named": all(named) and len(named) == len(survivors),
        "exact": all(list(end.get("ranks", ())) == [guilty] for end in found),
        "aborted": len(others) - len(survivors),
        "seconds": max((e["time"] for e in found if e["error"]), default=0.0) - (begun or 0.0),
        "ends": ends,
    }


def _names(program: Training, end: dict[str, Any]) -> bool:
    """Tell whether a rank's error names the guilty rank and, of an exception, what it was."""
    kind, rank = program.fault.kind, program.fault.rank
    first = end["text"].partition("\n")[0]
    if kind in REFUSALS:
        return re.search(rf"ranks? [\d, ]*\b{rank}\b", end["text"]) is not None
    cause = kind not in ("forward", "backward", "loss", "lines") or CAUSE in first
    return rank in end.get("ranks", ()) and f"rank {rank} " in first and cause


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--only", type=int)
    options = parser.parse_args()
    numbers = range(options.count) if options.only is None else [options.only]
    get_server().preload(["scaletorch.compose", "scaletorch.models", "scaletorch.checkpoint"])
    rows = []
    for number in numbers:
        kind = KINDS[number % len(KINDS)]
        program = make_training(options.seed * 1_000_003 + number, kind)
        result = run_body(body, program, judge, init=False)
        tell(number, kind, program, result, options.only is not None)
        rows.append((number, kind, program.size, result))
    table(rows, KINDS)


if __name__ == "__main__":
    main()
