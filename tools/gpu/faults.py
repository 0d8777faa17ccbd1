"""Ranks that are killed, frozen or wrong, and checkpoints that are written while a step runs."""

from __future__ import annotations

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

from scaletorch import dist
from scaletorch.checkpoint import load, save
from scaletorch.compose import full_state_dict
from scaletorch.dist import RankFaultError, guard
from scaletorch.dist.startup.rendezvous import free_port
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

from .checks import Checks, Found, gap
from .ranks import join, on_ranks
from .training import Problem, on_grid, stepping

GUILTY, WORLD, CALLS = 1, 3, 6
BEFORE = 3  # calls before the fault
KINDS = {"killed": "death", "frozen": "stopped", "mismatched": "mismatch"}
FREE = 15.0  # s after which a rank that still waits is not free


def guarded(checks: Checks, fault: str) -> None:
    """Have one of three ranks fail; the others must name it and come free."""
    checks.run(fault, _guarded, checks, fault)


def _guarded(checks: Checks, fault: str) -> Found:
    with TemporaryDirectory() as folder:
        ranks = [_start(checks.device, fault, folder, rank) for rank in range(WORLD)]
        try:
            said = _wait(ranks, folder, FREE * checks.slack)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    assert not (late := {0, 2} - set(said)), f"ranks that did not come free: {sorted(late)}"
    for rank in (0, 2):
        kind, names, _ = said[rank]
        assert kind == KINDS[fault], f"rank {rank} says {said[rank]}"
        assert GUILTY in names, f"rank {rank} says {said[rank]}"
    return Found(figures={"seconds to the error": round(max(said[r][2] for r in (0, 2)), 2)})


def _start(device: str, fault: str, folder: str, rank: int) -> subprocess.Popen[bytes]:
    names = {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1"}
    port = Path(folder, "port")
    if rank == 0:
        port.write_text(str(free_port()))
    env = {**os.environ, **names, "MASTER_PORT": port.read_text(), "TMPDIR": folder}
    command = [sys.executable, "-m", __spec__.name, device, fault, folder]
    return subprocess.Popen(command, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})


def _wait(ranks: list[subprocess.Popen[bytes]], folder: str, limit: float) -> dict[int, Any]:
    """Wait until the innocent have written what they heard, `limit` after the fault at most."""
    end = None
    said: dict[int, Any] = {}
    while end is None or time.monotonic() < end:
        files = {rank: Path(folder, f"said-{rank}") for rank in range(WORLD)}
        said = {rank: json.loads(f.read_text()) for rank, f in files.items() if f.exists()}
        if {0, 2} <= set(said) or all(process.poll() is not None for process in ranks):
            break
        if end is None and Path(folder, "fault").exists():
            end = time.monotonic() + limit
        time.sleep(0.05)
    return said


def rank_main(device: str, fault: str, folder: str) -> None:
    """Be one rank: calls under the guard, the fault on one rank, and what the others hear."""
    join(device)
    dist.init_dist("pytorch", backend="gloo" if device == "cpu" else "nccl", timeout=60)
    rank, began = dist.get_rank(), Path(folder, "fault")
    try:
        with guard.watch(folder, silence=3.0):
            for number in range(CALLS):
                if (rank, number) == (GUILTY, BEFORE):
                    began.touch()
                    if fault != "mismatched":
                        os.kill(os.getpid(), {"killed": signal.SIGKILL}.get(fault, signal.SIGSTOP))
                wrong = fault == "mismatched" and (rank, number) == (GUILTY, BEFORE)
                shared = torch.ones(4, device=device)
                dist.all_reduce(shared, "max" if wrong else "sum")
                guard.step()
                float(shared[0])  # a loop that reads its loss
    except RankFaultError as error:
        heard = [error.kind, error.ranks, time.time() - began.stat().st_mtime]
        written = Path(folder, f"said-{rank}.new")
        written.write_text(json.dumps(heard))
        written.rename(Path(folder, f"said-{rank}"))
    finally:
        os._exit(0)  # a group that is broken need not be taken down


Weights = dict[str, torch.Tensor]
SAVED = Problem({"tp_size": 2, "dp_size": 2}, zero=1)
LOADED = (Problem({"pp_size": 2}), Problem({"cp_size": 2}, zero=2))


def checkpoints(checks: Checks) -> None:
    """Save in the background while the next steps run; load on other layouts and compare."""
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
    assert exact, "nothing was saved"
    return Found(max(gap(mine[name], exact[name]) for mine in every for name in exact), 1e-6)


def _second_step(device: str, problem: Problem, folder: str, saves: bool) -> Weights:
    """Return the weights after the second step: of a run that saves meanwhile, or loads before."""
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
