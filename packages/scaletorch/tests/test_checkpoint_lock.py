"""One job writes into a folder of checkpoints: another is refused, a dead one not obeyed."""

import gc
import os
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist
from torch import nn

from scaletorch.checkpoint import CheckpointError, load, save
from scaletorch.checkpoint.format.lock import LOCK
from scaletorch.dist import RankPool
from scaletorch.dist.testing import preload
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

preload("torch.distributed.checkpoint")
JOB = """
import sys, time, torch
from scaletorch.checkpoint import save
model = torch.nn.Linear(2, 2)
save(sys.argv[1], model, step=1)
print("saved", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def job(tmp_path):
    """A job that has saved and lives on."""
    command = [sys.executable, "-c", JOB, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "saved\n"
    yield process
    process.stdin.close()
    process.stdout.close()
    process.wait(20)


@pytest.fixture
def four():
    with RankPool(4, seed=0) as pool:
        yield pool


def refused(root, sizes, process):
    setup_process_group_manager(**sizes)
    model = nn.Linear(2, 2)
    for asynchronous in (False, True):
        words = rf"{root} is being written by process {process} on host {os.uname().nodename} since"
        with pytest.raises(CheckpointError, match=words):
            save(root, model, step=2, asynchronous=asynchronous)
    assert load(root, model).step == 1  # reading needs no lock
    destroy_process_group_manager()


def saves(root, sizes, step):
    manager = setup_process_group_manager(**sizes)
    model = nn.Linear(2, 2)
    for asynchronous in (False, True, True):
        step += 1
        saving = save(root, model, step=step, keep=2, asynchronous=asynchronous)
    saving.wait()
    dist.barrier()
    held = os.path.exists(root / LOCK)
    dist.barrier()
    del model, manager
    destroy_process_group_manager()
    gc.collect()
    return held, os.getpid()


def test_a_second_job_is_refused_on_every_rank_until_the_first_is_killed(four, job, tmp_path):
    sizes = {"dp_size": 2, "tp_size": 2}
    four.run(refused, tmp_path, sizes, job.pid)
    with pytest.raises(CheckpointError, match=f"by process {job.pid} on host"):
        save(tmp_path, nn.Linear(2, 2), step=2)
    job.send_signal(signal.SIGKILL)
    job.wait(20)
    assert f"process {job.pid} " in (tmp_path / LOCK).read_text()  # it could not take it away
    found = four.run(saves, tmp_path, sizes, 1)
    assert [held for held, _ in found] == [True] * 4
    assert not (tmp_path / LOCK).exists()
    four.run(saves, tmp_path, sizes, 4)
    save(tmp_path, nn.Linear(2, 2), step=8)


def test_a_lock_ends_with_its_job(job, tmp_path):
    assert (tmp_path / LOCK).exists()
    job.stdin.close()
    job.wait(20)
    assert not (tmp_path / LOCK).exists()


def test_what_a_job_has_left_is_taken_over(tmp_path):
    (tmp_path / LOCK).write_text("process 7 on host elsewhere since Sun\n")
    model = nn.Linear(2, 2)
    save(tmp_path, model, step=1)
    assert f"process {os.getpid()} " in (tmp_path / LOCK).read_text()


def leave(root):
    model = nn.Linear(2, 2)
    setup_process_group_manager(dp_size=2)
    save(root, model, step=1)
    held = os.path.exists(root / LOCK)
    dist.barrier()
    destroy_process_group_manager()
    dist.destroy_process_group()
    gc.collect()
    return held, model


def test_a_lock_ends_with_the_process_group(tmp_path):
    with RankPool(2) as pool:
        assert [held for held, _ in pool.run(leave, tmp_path)] == [True] * 2
        assert not (tmp_path / LOCK).exists()
