"""Checkpoints' folders: killed programs, other jobs, other names and files, what is removed."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import nn
from training import grid

from scaletorch.checkpoint import (
    CheckpointError,
    DamagedCheckpointError,
    export_safetensors,
    import_safetensors,
    load,
    save,
    weights,
)
from scaletorch.checkpoint.format import folders, safetensors_files
from scaletorch.dist import RankFailedError, launch
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pg_manager import setup_process_group_manager

LOCK = "scaletorch.lock"


def filled(value):
    model = nn.Linear(2, 2, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def loaded(folder):
    """Return the step of a checkpoint, and the value of all of its weights."""
    model = filled(0.0)
    step, (value,) = load(folder, model).step, model.weight.unique().tolist()
    return step, value


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


def write_slowly(seconds):
    """Return a `write_tensor` that takes its time for weights."""
    write = safetensors_files.write_tensor

    def slow(file, tensor):
        time.sleep(seconds if tensor.numel() == 4 else 0)
        return write(file, tensor)

    return slow


def test_ctrl_c_while_a_save_waits_leaves_the_one_before_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_files, "write_tensor", write_slowly(1))
    model = filled(1.0)
    first = save(tmp_path, model, step=1, asynchronous=True)
    nn.init.constant_(model.weight, 2.0)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, model, step=2, asynchronous=True)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not first.done()
    save(tmp_path, model, step=2, asynchronous=True).wait()  # in memory that the first had
    assert first.done()
    for step in (1, 2):
        assert loaded(tmp_path / f"step-{step:08d}") == (step, step)


def save_and_return(root):
    folders.executor = ThreadPoolExecutor(1)  # left open: its worker is not waited for
    folders.executor.submit(os.getpid).result()
    setup_process_group_manager(dp_size=2)
    safetensors_files.write_tensor = write_slowly(0.3)
    save(root, filled(4.0), step=1, asynchronous=True)


def test_ranks_that_return_finish_the_writing_first(tmp_path):
    launch(save_and_return, 2, tmp_path)
    assert loaded(tmp_path) == (1, 4)


def test_names_of_a_folder_are_flushed(tmp_path, monkeypatch):
    flushed, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (flushed.append(os.fstat(fd).st_ino), fsync(fd)))
    folder = save(tmp_path, filled(1.0), step=1).wait()
    assert {path.stat().st_ino for path in (tmp_path, folder, *folder.iterdir())} == {*flushed}


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_files, "write_tensor", write_slowly(0.1))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    saving = save("run", filled(1.0), step=1, asynchronous=True)
    found = load("run", filled(0.0))
    monkeypatch.chdir("elsewhere")
    saving.wait()
    assert names(tmp_path / "elsewhere") == []
    assert found.folder == saving.folder == tmp_path / "run" / "step-00000001"


def test_a_checkpoint_by_another_name(tmp_path, monkeypatch):
    folder = save(tmp_path, filled(3.0), step=3).wait()
    (tmp_path / "best").symlink_to(folder.name)
    shutil.copytree(folder, tmp_path / "copy")
    monkeypatch.chdir(folder)
    for name in (tmp_path / "best", tmp_path / "copy", "."):
        assert loaded(name) == (3, 3)
    with pytest.raises(CheckpointError, match="is a file: pass the folder"):
        loaded(folder / "metadata.json")


def test_only_old_checkpoints_of_ours_are_removed(tmp_path):
    model = filled(1.0)
    (tmp_path / "step-00000000").mkdir()
    (tmp_path / "step-00000000" / "precious").write_text("not ours")
    (tmp_path / "step-00000007").write_text("a file")
    for step in (1, 2, 3, 4, 9):
        save(tmp_path, model, step=step)
    (tmp_path / "step-00000002" / "mine.txt").touch()
    save(tmp_path, model, step=5, keep=2)
    assert names(tmp_path) == [
        "step-00000000", "step-00000002.removed", "step-00000004", "step-00000005",
        "step-00000007", "step-00000009",  # saved by a run that went on from here
    ]  # fmt: skip
    assert names(tmp_path / "step-00000002.removed") == ["mine.txt"]
    with pytest.raises(CheckpointError, match="is no checkpoint; it stays"):
        save(tmp_path, model, step=0)
    save(tmp_path, model, step=5, keep=1)  # again: in the place of the first
    assert names(tmp_path)[2:] == ["step-00000005", "step-00000007", "step-00000009"]


def dying(folder, rename):
    """Save, and be killed at a rename, or where an older checkpoint is to be deleted."""
    number, real = 0, os.replace

    def replace(old, new):
        nonlocal number
        number += 1
        if number == rename:
            os.kill(os.getpid(), signal.SIGKILL)
        real(old, new)

    folders.os.replace = replace
    folders._delete = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    save(folder, filled(7.0), step=5, keep=1)


def die(folder, rename):
    save(folder, filled(1.0), step=5)
    with pytest.raises(RankFailedError, match="SIGKILL"):
        run_ranks(dying, 1, folder, rename, init=False)


def test_killed_between_the_renames_of_a_step_saved_twice(tmp_path):
    die(tmp_path, 2)
    assert names(tmp_path) == ["step-00000005.removed", "step-00000005.unfinished"]
    assert loaded(tmp_path) == (5, 7)


def test_files_of_killed_programs_are_removed(tmp_path):
    die(tmp_path, 3)
    assert names(tmp_path) == ["step-00000005", "step-00000005.removed"]
    for step, file in ((6, "rank-00000.safetensors"), (7, "notes"), (9, "rank-00000.safetensors")):
        half = tmp_path / f"step-{step:08d}.unfinished"
        half.mkdir()
        (half / file).write_text("half")
    save(tmp_path, filled(1.0), step=8, keep=1)
    assert names(tmp_path) == [
        "step-00000007.unfinished", "step-00000008", "step-00000009.unfinished",
    ]  # fmt: skip
    assert names(tmp_path / "step-00000007.unfinished") == ["notes"]


def test_extra_is_checked_before_anything_changes(tmp_path):
    save(tmp_path, filled(1.0), step=1, extra={"data": "a"})
    model = filled(0.0)

    def check(extra):
        raise ValueError(f"of {extra['data']}")

    with pytest.raises(ValueError, match="of a"):
        load(tmp_path, model, check=check)
    assert not model.weight.any()


def test_an_export_that_was_killed_does_not_count_and_is_not_in_the_way(tmp_path, monkeypatch):
    model = nn.Linear(2, 2)

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(safetensors_files, "write_tensor", die)
        with pytest.raises(KeyboardInterrupt):
            export_safetensors(model, tmp_path)
    assert names(tmp_path) == ["model.safetensors.unfinished"]
    with pytest.raises(DamagedCheckpointError, match="neither"):
        import_safetensors(model, tmp_path)
    monkeypatch.setattr(weights, "MAX_FILE", 1)
    export_safetensors(model, tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) <= set(names(tmp_path))
    import_safetensors(model, tmp_path)


@pytest.mark.parametrize(
    "name", [".metadata", "step-100/__0_0.distcp", "model-00001.safetensors", "global_step10/a.pt"]
)
def test_a_folder_of_other_files_is_no_empty_one(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=f"has no checkpoint of .*{name}, .* no log"):
        load(tmp_path, filled(1.0))
    save(tmp_path, filled(2.0), step=3)  # beside ours it does no harm
    assert load(tmp_path, filled(1.0)).step == 3


def test_a_first_run_may_have_logs_and_files_of_killed_saves(tmp_path):
    assert load(tmp_path / "new", filled(1.0)) is None
    for name in ("train.log", "config.json", "tensorboard/events.out.tfevents.1.host.2", LOCK,
                 "step-00000001.unfinished/rank-00000.safetensors", ".gitignore"):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert load(tmp_path, filled(1.0)) is None
    assert names(tmp_path / "step-00000001.unfinished") == ["rank-00000.safetensors"]


# Other jobs.

JOB = """
import sys, torch
from scaletorch.checkpoint import save
save(sys.argv[1], model := torch.nn.Linear(2, 2), step=1)
print("saved", flush=True)
sys.stdin.read()
"""


def refused(root, sizes, process):
    with grid(sizes):
        model = nn.Linear(2, 2)
        host = os.uname().nodename
        words = rf"{root} is being written by process {process} on host {host}: end it"
        for asynchronous in (False, True):
            with pytest.raises(CheckpointError, match=words):
                save(root, model, step=2, asynchronous=asynchronous)
        assert load(root, model).step == 1  # reading needs no lock


def saves(root, sizes, step):
    with grid(sizes):
        model = nn.Linear(2, 2)
        for asynchronous in (False, True, True):
            step += 1
            saving = save(root, model, step=step, keep=2, asynchronous=asynchronous)
        saving.wait()


def test_a_second_job_is_refused_on_every_rank_until_the_first_is_killed(four, tmp_path):
    command = [sys.executable, "-c", JOB, str(tmp_path)]
    pipes, sizes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE), {"dp_size": 2, "tp_size": 2}
    with subprocess.Popen(command, text=True, **pipes) as job:
        assert job.stdout.readline() == "saved\n"
        four.run(refused, tmp_path, sizes, job.pid)
        with pytest.raises(CheckpointError, match=f"by process {job.pid} on host"):
            save(tmp_path, nn.Linear(2, 2), step=2)
        job.kill()
        job.wait(20)
        assert f"process {job.pid} " in (tmp_path / LOCK).read_text()
        four.run(saves, tmp_path, sizes, 1)
        four.run(saves, tmp_path, sizes, 4)
        save(tmp_path, nn.Linear(2, 2), step=8)  # the ranks' models are gone


def test_a_wrapper_that_ends_after_its_save_keeps_the_folder_locked(tmp_path):
    (tmp_path / LOCK).write_text("process 7 on host elsewhere\n")  # of a job that ended
    model = nn.Linear(2, 2)
    save(tmp_path, nn.Sequential(model), step=1)
    gc.collect()
    command = [sys.executable, "-c", JOB, str(tmp_path)]
    other = subprocess.run(command, input="", capture_output=True, text=True, timeout=60)
    assert f"is being written by process {os.getpid()} on host" in other.stderr
    assert f"process {os.getpid()} " in (tmp_path / LOCK).read_text()  # closing it ends the lock
