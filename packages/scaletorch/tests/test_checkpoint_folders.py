"""Checkpoints' folders: programs that are killed or interrupted, other names, what is removed."""

import json
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
import torch
from torch import nn

from scaletorch import checkpoint
from scaletorch.checkpoint import (
    CheckpointError,
    DamagedCheckpointError,
    export_safetensors,
    import_safetensors,
    load,
    save,
)
from scaletorch.checkpoint.format import folders, safetensors_files
from scaletorch.checkpoint.format.folders import LOCK
from scaletorch.dist import RankFailedError, get_rank, launch
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pg_manager import setup_process_group_manager


def filled(value):
    model = nn.Linear(2, 2, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


def write_slowly(monkeypatch, seconds):
    write = checkpoint.storage.write_tensor

    def slow(file, tensor):
        time.sleep(seconds if tensor.numel() == 4 else 0)
        return write(file, tensor)

    monkeypatch.setattr(checkpoint.storage, "write_tensor", slow)


def test_ctrl_c_while_a_save_waits_leaves_the_one_before_whole(tmp_path, monkeypatch):
    write_slowly(monkeypatch, 1)
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
        load(tmp_path / f"step-{step:08d}", model)
        assert model.weight.unique().tolist() == [step]


def test_names_of_a_folder_are_flushed(tmp_path):
    with patch.object(os, "fsync", side_effect=lambda fd: seen.append(os.fstat(fd).st_ino)):
        seen = []
        safetensors_files.flush_folder(tmp_path)
        with (tmp_path / "file").open("wb") as file:
            safetensors_files.flush(file)
    assert seen == [path.stat().st_ino for path in (tmp_path, tmp_path / "file")]


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    write_slowly(monkeypatch, 0.1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    saving = save("run", filled(1.0), step=1, asynchronous=True)
    loaded = load("run", filled(0.0))
    monkeypatch.chdir("elsewhere")
    saving.wait()
    assert names(tmp_path / "elsewhere") == []
    assert loaded.folder == saving.folder == tmp_path / "run" / "step-00000001"


def test_a_checkpoint_by_another_name(tmp_path, monkeypatch):
    folder = save(tmp_path, filled(3.0), step=3).wait()
    (tmp_path / "best").symlink_to(folder.name)
    shutil.copytree(folder, tmp_path / "copy")
    monkeypatch.chdir(folder)
    for name in (tmp_path / "best", tmp_path / "copy", "."):
        model = filled(0.0)
        assert load(name, model).step == 3
        assert model.weight.unique().tolist() == [3]
    with pytest.raises(CheckpointError, match="is a file; pass the folder"):
        load(folder / "metadata.json", model)


def test_the_checkpoint_just_saved_is_kept(tmp_path):
    model = filled(1.0)
    for step in (9, 10, 20, 30):
        save(tmp_path, model, step=step)
    assert save(tmp_path, model, step=11, keep=2).wait().is_dir()
    assert names(tmp_path) == [f"step-{step:08d}" for step in (10, 11, 20, 30)]


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
    with pytest.raises(RankFailedError, match="SIGKILL"):
        run_ranks(dying, 1, folder, rename, init=False)


def test_killed_between_the_renames_of_a_step_saved_twice(tmp_path):
    save(tmp_path, filled(1.0), step=5)
    die(tmp_path, 2)
    assert names(tmp_path) == ["step-00000005.removed", "step-00000005.unfinished"]
    model = filled(0.0)
    assert load(tmp_path, model).step == 5
    assert model.weight.unique().tolist() == [7]


def test_what_killed_programs_left_is_removed(tmp_path):
    save(tmp_path, filled(1.0), step=5)
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


def test_a_description_too_deep_to_read_is_damage(tmp_path):
    folder = save(tmp_path, filled(1.0), step=1).wait()
    text = '{"format":"scaletorch-checkpoint","extra":' + "[" * 100_000
    (folder / "metadata.json").write_text(text)
    with pytest.raises(DamagedCheckpointError, match="RecursionError"):
        load(folder, filled(1.0))


def test_extra_is_checked_before_anything_changes(tmp_path):
    save(tmp_path, filled(1.0), step=1, extra={"data": "a"})
    model = filled(0.0)

    def check(extra):
        raise ValueError(f"of {extra['data']}")

    with pytest.raises(ValueError, match="of a"):
        load(tmp_path, model, check=check)
    assert not model.weight.any()


def test_an_export_that_was_killed_is_not_there_and_is_not_in_the_way(tmp_path, monkeypatch):
    model = nn.Linear(2, 2)

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.weights_export, "write_tensor", die)
        with pytest.raises(KeyboardInterrupt):
            export_safetensors(model, tmp_path)
    assert names(tmp_path) == ["model.safetensors.unfinished"]
    with pytest.raises(DamagedCheckpointError, match="neither"):
        import_safetensors(model, tmp_path)
    export_safetensors(model, tmp_path, max_file_bytes=1)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) <= set(names(tmp_path))
    import_safetensors(model, tmp_path)


def save_and_return(root):
    checkpoint.executor = ThreadPoolExecutor(1)  # left open: its worker is not waited for
    checkpoint.executor.submit(get_rank).result()
    setup_process_group_manager(dp_size=2)
    write = checkpoint.storage.write_tensor

    def slow(*arguments):
        time.sleep(0.3)
        return write(*arguments)

    checkpoint.storage.write_tensor = slow
    save(root, filled(4.0), step=1, asynchronous=True)


def test_ranks_that_return_finish_the_writing_first(tmp_path):
    launch(save_and_return, 2, tmp_path)
    model = filled(0.0)
    assert load(tmp_path, model).step == 1
    assert torch.equal(model.weight, filled(4.0).weight)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (".metadata", "torch.distributed.checkpoint .*import_dcp"),
        ("step-100/__0_0.distcp", "torch.distributed.checkpoint .*step-100.*import_dcp"),
        ("model-00001-of-00002.safetensors", "save_pretrained .*import_safetensors"),
        ("checkpoint-500/pytorch_model.bin", "no log .*pytorch_model.bin.*library that wrote it"),
        ("global_step10/mp_rank_00_model_states.pt", "no log .*mp_rank_00_model_states.pt"),
        ("logs/state.npz", "no log .*logs/state.npz.*before parallelize"),
        ("latest", "no log"),
    ],
)
def test_a_folder_of_other_files_is_no_empty_one(tmp_path, name, words):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=f"has no checkpoint that .*{words}"):
        load(tmp_path, filled(1.0))
    save(tmp_path, filled(2.0), step=3)  # beside ours it does no harm
    assert load(tmp_path, filled(1.0)).step == 3


def test_a_first_run_may_have_logs_and_what_killed_saves_left(tmp_path):
    assert load(tmp_path / "new", filled(1.0)) is None
    assert load(tmp_path, filled(1.0)) is None
    for name in ("train.log", "config.json", "tensorboard/events.out.tfevents.1.host.2", LOCK,
                 "step-00000001.unfinished/rank-00000.safetensors", ".gitignore"):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert load(tmp_path, filled(1.0)) is None
    assert names(tmp_path / "step-00000001.unfinished") == ["rank-00000.safetensors"]
