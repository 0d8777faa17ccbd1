"""One job writes into a folder of checkpoints: another is refused, a dead one not obeyed."""

import gc
import os
import signal
import subprocess
import sys

import pytest
from torch import nn

from scaletorch.checkpoint import CheckpointError, load, save
from scaletorch.checkpoint.format.folders import LOCK
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
    setup_process_group_manager(**sizes)
    model = nn.Linear(2, 2)
    for asynchronous in (False, True, True):
        step += 1
        saving = save(root, model, step=step, keep=2, asynchronous=asynchronous)
    saving.wait()
    destroy_process_group_manager()


def test_a_second_job_is_refused_on_every_rank_until_the_first_is_killed(job, tmp_path):
    sizes = {"dp_size": 2, "tp_size": 2}
    with RankPool(4, seed=0) as four:
        four.run(refused, tmp_path, sizes, job.pid)
        with pytest.raises(CheckpointError, match=f"by process {job.pid} on host"):
            save(tmp_path, nn.Linear(2, 2), step=2)
        job.send_signal(signal.SIGKILL)
        job.wait(20)
        assert f"process {job.pid} " in (tmp_path / LOCK).read_text()
        four.run(saves, tmp_path, sizes, 1)
        four.run(saves, tmp_path, sizes, 4)
        save(tmp_path, nn.Linear(2, 2), step=8)  # the ranks' models are gone


def test_a_wrapper_that_ends_after_its_save_keeps_the_folder_locked(tmp_path):
    model = nn.Linear(2, 2)
    save(tmp_path, nn.Sequential(model), step=1)
    gc.collect()
    command = [sys.executable, "-c", JOB, str(tmp_path)]
    other = subprocess.run(command, input="", capture_output=True, text=True, timeout=60)
    assert f"is being written by process {os.getpid()} on host" in other.stderr


def test_a_lock_of_another_user_is_not_ignored(tmp_path, monkeypatch):
    (tmp_path / LOCK).touch()
    opens = os.open

    def denied(path, *arguments):  # root, who may run this, is denied nothing
        if str(path).endswith(LOCK):
            raise PermissionError(13, "Permission denied", str(path))
        return opens(path, *arguments)

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(CheckpointError, match=rf"{LOCK} cannot be opened for writing, so another"):
        save(tmp_path, nn.Linear(2, 2), step=1)


def test_what_a_job_has_left_is_taken_over(tmp_path):
    (tmp_path / LOCK).write_text("process 7 on host elsewhere since Sun\n")
    model = nn.Linear(2, 2)
    save(tmp_path, model, step=1)
    assert f"process {os.getpid()} " in (tmp_path / LOCK).read_text()
