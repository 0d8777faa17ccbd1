"""Ranks that are killed, frozen or wrong, and checkpoints that are saved during a step."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from scaletorch import dist, guard
from scaletorch.checkpoint import load, save
from scaletorch.compose import full_state_dict
from scaletorch.dist import RankFaultError
from scaletorch.dist.startup.rendezvous import free_port
from scaletorch.dist.testing import relative_error, worst
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

from .checks import Checks, Found
from .ranks import on_ranks
from .training import Problem, on_grid, stepping

GUILTY, WORLD, CALLS = 1, 3, 6
BEFORE = 3  # calls before the fault
SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
KINDS = {
    "killed": "death", "frozen": "slow", "raised": "exception", "mismatched": "mismatch"
}  # fmt: skip
FREE = 15.0  # s after the fault in which the other ranks must stop waiting


def guarded(checks: Checks) -> None:
    """Make one of three ranks fail in each way; the others must name it and stop waiting."""
    with TemporaryDirectory() as folder:
        started = {fault: _start(checks.device, fault, Path(folder, fault)) for fault in KINDS}
        try:
            for fault, ranks in started.items():
                checks.run(fault, _guarded, checks, fault, ranks, Path(folder, fault))
        finally:
            for process in itertools.chain(*started.values()):
                process.kill()
                process.wait()


Ranks = list[subprocess.Popen[bytes]]


def _start(device: str, fault: str, folder: Path) -> Ranks:
    folder.mkdir()
    names = {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD), "TMPDIR": str(folder)}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    names["SCALETORCH_SHARE_DEVICES"] = "1"  # three ranks on any number of devices
    command = [sys.executable, "-m", __spec__.name, device, fault, str(folder)]
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(WORLD)]
    return [subprocess.Popen(command, env={**os.environ, **names, **each}) for each in places]


def _guarded(checks: Checks, fault: str, ranks: Ranks, folder: Path) -> Found:
    said = _wait(ranks, folder, FREE * checks.slack)
    if late := {0, 2} - set(said):
        raise TimeoutError(f"ranks that did not come free in {FREE:.0f} s: {sorted(late)}")
    if any(said[rank][0] != KINDS[fault] or GUILTY not in said[rank][1] for rank in (0, 2)):
        raise AssertionError(f"the others say {said}")
    return Found(figures={"seconds to the error": round(max(said[0][2], said[2][2]), 2)})


def _wait(ranks: Ranks, folder: Path, limit: float) -> dict[int, Any]:
    """Wait until the innocent ranks have written their errors, at most `limit` after the fault."""
    end = None
    said: dict[int, Any] = {}
    while end is None or time.monotonic() < end:
        files = {rank: folder / f"said-{rank}" for rank in range(WORLD)}
        said = {rank: json.loads(f.read_text()) for rank, f in files.items() if f.exists()}
        if {0, 2} <= set(said) or all(process.poll() is not None for process in ranks):
            break
        if end is None and (folder / "fault").exists():
            end = time.monotonic() + limit
        time.sleep(0.05)
    return said


def rank_main(device: str, fault: str, folder: str) -> None:
    """Run one rank: calls under the guard, the fault on one rank, and the others' errors."""
    dist.init_dist("pytorch", backend="gloo" if device == "cpu" else "nccl", timeout=60)
    rank, began = dist.get_rank(), Path(folder, "fault")
    try:
        with guard.watch(patience=10.0):
            for number in range(CALLS):
                if (rank, number) == (GUILTY, BEFORE):
                    began.touch()
                    _fail(fault)
                wrong = fault == "mismatched" and (rank, number) == (GUILTY, BEFORE)
                shared = torch.ones(4, device=device)
                dist.all_reduce(shared, "max" if wrong else "sum")
                guard.step()
                float(shared[0])  # like a loop that reads its loss
    except RankFaultError as error:
        heard = [error.kind, error.ranks, time.time() - began.stat().st_mtime]
        dist.cleanup_dist()  # must return as well
        written = Path(folder, f"said-{rank}.new")
        written.write_text(json.dumps(heard))
        written.rename(Path(folder, f"said-{rank}"))
    except ValueError:
        time.sleep(2 * FREE)  # ending now would release the others
    finally:
        os._exit(0)


def _fail(fault: str) -> None:
    if fault == "raised":
        raise ValueError(fault)
    if fault in SIGNALS:
        os.kill(os.getpid(), SIGNALS[fault])


Weights = dict[str, torch.Tensor]
SAVED = Problem({"tp_size": 2, "dp_size": 2}, zero=1)
LOADED = (Problem({"pp_size": 2}), Problem({"cp_size": 2}, zero=2))


def checkpoints(checks: Checks) -> None:
    """Save in the background during the next step; load with other layouts and compare."""
    with TemporaryDirectory() as folder:
        saved = replace(SAVED, sizes={"dp_size": 2}) if checks.quick else SAVED
        exact: Weights = {}

        def first() -> Found:
            exact.update(on_ranks(checks, _second_step, saved.world_size, saved, folder, True)[0])
            return Found()

        checks.run("save", first)
        for problem in LOADED[: 1 if checks.quick else None]:
            checks.run(f"load on {dict(problem.sizes)}", _again, checks, problem, folder, exact)


def _again(checks: Checks, problem: Problem, folder: str, exact: Weights) -> Found:
    every = on_ranks(checks, _second_step, problem.world_size, problem, folder, False)
    errors = (relative_error(mine[name], exact[name]) for mine in every for name in exact)
    return Found(worst(errors), 1e-5)


def _second_step(device: str, problem: Problem, folder: str, saves: bool) -> Weights:
    """Return the weights after the second step of a run that saves meanwhile, or loads before."""
    manager = setup_process_group_manager(**problem.sizes)
    try:
        model = on_grid(problem, device, manager)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = stepping(problem, device, model, optimizer)
        if saves:
            step(0)
            saving = save(folder, model, optimizer, manager, step=1, asynchronous=True)
        else:
            load(folder, model, optimizer, manager)
        step(1)
        whole = {name: x.cpu() for name, x in full_state_dict(model, manager).items()}
        if saves:
            saving.wait()
        return whole
    finally:
        destroy_process_group_manager()


if __name__ == "__main__":
    rank_main(*sys.argv[1:])
