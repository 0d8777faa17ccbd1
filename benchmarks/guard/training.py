"""Seeded faults in real training programs: which ones the guard finds and how it names them.

    python -m benchmarks.guard.training --count 120 --seed 0
    python -m benchmarks.guard.training --seed 0 --only 17          # that one again, with its text

Like `benchmarks.guard.faults`, with what bare calls do not have: a model on layouts of 2 to 4
ranks, a pipeline runtime, a store in rank 0's process, checkpoints, and different data, seeds and
numbers on one rank, which `check_replicas` finds. The kinds are in `kinds.py`.
"""

from __future__ import annotations

import os
import random
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as c10d

import scaletorch.dist as dist
from scaletorch import guard
from scaletorch.checkpoint import save
from scaletorch.compose import check_replicas, parallelize, shard_global_batch, train_step
from scaletorch.dist.ranks.process import get_server
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.pg_manager import describe_rank, setup_process_group_manager

from ..harness.tables import parser
from .faults import Row, campaign, counted, guarded, note, run_body, show, tell, write_end
from .kinds import BIG, KINDS, OWN, Leaves, Scene, swallowed
from .programs import make_call

LAYOUTS = (
    {"tp_size": 2}, {"dp_size": 2, "tp_size": 2}, {"pp_size": 2, "dp_size": 2},
    {"pp_size": 2, "tp_size": 2}, {"pp_size": 4}, {"cp_size": 2, "tp_size": 2},
)  # fmt: skip
STEPS, FAULT = 7, 3


@dataclass(frozen=True)
class Fault:
    """One rank's deviation in a step."""

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
    needs = KINDS[kind].needs
    layout = draw.choice([own for own in LAYOUTS if not needs or {*needs} & {*own}])
    size = 1
    for part in layout.values():
        size *= part
    rank = draw.randrange(size)
    wanted = KINDS[kind].rank
    return Training(size, layout, Fault(kind, rank if wanted is None else wanted % size))


def body(program: Training, folder: str) -> None:
    """Train on this rank, and record how it ended."""
    write_end(folder, int(os.environ["RANK"]), lambda: train(program, folder))


def train(program: Training, folder: str) -> list[float]:
    """Train under the guard; the faulty rank makes its fault."""
    dist.init_dist("pytorch", "gloo", timeout=300)
    manager = setup_process_group_manager(**program.layout)
    with guarded(describe_rank(), patience=4.0):
        try:
            return _train(program, manager, folder)
        except Leaves:
            return []


def _train(program: Training, manager: Any, folder: str) -> list[float]:
    kind = KINDS[program.fault.kind]

    def act(moment: str, step: int, scene: Scene) -> None:
        if (moment, step, dist.get_rank()) == (kind.moment, FAULT, program.fault.rank):
            note(folder)
            kind.act(scene)

    torch.manual_seed(0)
    scene = Scene(torch.nn.Module(), torch.optim.SGD([torch.ones(1)]), {}, manager, folder, [])
    act("seed", FAULT, scene)
    scene.model = plain = Llama(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=4, num_heads=4,
        num_kv_heads=2,
    ))  # fmt: skip
    act("model", FAULT, scene)
    scene.model = model = parallelize(plain, manager)
    scene.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(64, (8, 33), generator=torch.Generator().manual_seed(0))
    groups = {"world": c10d.group.WORLD, "dp": manager.dp_group}
    for step in range(STEPS):
        scene.batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()}
        scene.count, scene.calls = 2, list(OWN)
        if program.fault.kind == "big shape":
            scene.calls[0] = replace(OWN[0], shape=(BIG,))
        act("step", step, scene)
        with swallowed(scene):
            train_step(model, shard_global_batch(scene.batch, scene.count, manager))
        act("gradients", step, scene)
        check_replicas(model, optimizer=scene.optimizer, step=step, values=scene.batch)
        scene.optimizer.step()
        scene.optimizer.zero_grad()
        act("weights", step, scene)
        for call in scene.calls:
            make_call(call, groups)
        if kind.saves:
            path, beside = os.path.join(folder, "checkpoint"), kind.saves == "beside"
            saving = save(path, model, scene.optimizer, step=step, asynchronous=beside)
        guard.step(step)
    if kind.saves:
        saving.wait()
    return []


def judge(program: Training, ends: dict[int, Any], begun: float | None) -> dict[str, Any]:
    """Return the counted properties of one run."""
    kind, guilty = KINDS[program.fault.kind], program.fault.rank
    others = {rank: end for rank, end in ends.items() if kind.told == "all" or rank != guilty}
    survivors = {r: e for r, e in others.items() if e is None or e["error"] != "aborted"}
    counts = counted(guilty, survivors, partial(_names, program), begun)
    return counts | {"aborted": len(others) - len(survivors), "ends": ends}


def _names(program: Training, end: dict[str, Any]) -> bool:
    """Return whether a rank's error says what its kind of fault requires."""
    kind, rank = KINDS[program.fault.kind], program.fault.rank
    if not end["error"]:
        return False
    first, said = end["text"].partition("\n")[0], rf"ranks? [\d, ]*\b{rank}\b"
    if kind.told == "alike":
        return bool(end["error"] == "CheckpointError")
    if kind.told == "all" or end["error"] == "MismatchError":  # found before the call
        return re.search(said, end["text"]) is not None
    if rank not in end.get("ranks", ()):
        return False
    return f"rank {rank} " in (first if kind.told == "named" else end["text"]) and (
        kind.cause in first
    )


def main() -> None:
    """Parse the command line and run it."""
    command = parser(__doc__)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--count", type=int, default=2 * len(KINDS))
    command.add_argument("--log")
    command.add_argument("--only", type=int)
    options = command.parse_args()
    get_server().preload(
        ["torch._dynamo", "scaletorch.compose", "scaletorch.models", "scaletorch.checkpoint"]
    )
    kinds = list(KINDS)

    def one(number: int) -> Row:
        kind = kinds[number % len(kinds)]
        program = make_training(options.seed * 1_000_003 + number, kind)
        result = run_body(body, program, judge, init=False)
        tell(number, kind, program, result, options.only is not None)
        return number, kind, program.size, result

    if options.only is not None:
        one(options.only)
    else:
        show(campaign(options.count, one, options.log), kinds)


if __name__ == "__main__":
    main()
