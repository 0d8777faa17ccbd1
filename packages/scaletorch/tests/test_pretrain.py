"""The main job: the same curve on any layout, bitwise resume, real text, clear refusals."""

import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import safetensors.torch
import torch
from pretrained import MODEL, settings, tokenizer_of_words
from sweeps import today

from scaletorch.checkpoint import save
from scaletorch.dist import RankFailedError, launch
from scaletorch.dist.errors import InvalidArgumentError, StateError
from scaletorch.dist.testing import run_ranks
from scaletorch.pretrain import pretrain, train
from scaletorch.pretrain.data import load_corpus


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i:02}.txt").write_text(f"document {i}: " + "the quick brown fox " * (i + 1))
    (folder / "picture.bin").write_bytes(b"\xff" * 1000)
    return folder


@pytest.fixture
def config(text, tmp_path):
    tied = replace(MODEL, tie_embeddings=True)
    return settings(tmp_path, model=tied, dtype="float64", data=(text,))


def test_layouts_share_one_loss_curve(config):
    result = pretrain(replace(config, tp=2, pp=2, micro_batches=4, compare=True))
    assert len(result.losses) == len(result.reference) == 4
    assert result.worst_difference() < 1e-10
    assert result.losses[-1] < result.losses[0]


def test_log_curve_and_numbers(config):
    result = pretrain(config)
    rows = [json.loads(line) for line in (result.out / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["loss"] for row in rows] == result.losses
    assert all(row["tokens_per_s"] > 0 for row in rows)
    assert rows[0]["lr"] == pytest.approx(config.lr / 2)


def assert_same_files(one, other):
    """Weights, optimizer (moments, steps) and generators of every rank, bit for bit."""
    names = sorted(path.name for path in one.iterdir() if path.suffix != ".json")
    assert names == sorted(path.name for path in other.iterdir() if path.suffix != ".json")
    assert names
    for name in names:
        ours, theirs = (safetensors.torch.load_file(folder / name) for folder in (one, other))
        assert ours.keys() == theirs.keys()
        for key in ours:
            if not key.startswith("random"):  # Python's own, which nothing here draws from
                assert torch.equal(ours[key], theirs[key]), key


@pytest.mark.parametrize(
    ("experts", "first", "second"),
    [
        (0, {"dp": 2, "tp": 2, "zero": 1}, {"pp": 2, "cp": 2, "zero": 2}),
        (4, {"dp": 2, "ep": 2, "zero": 1}, {"dp": 2, "tp": 2, "ep": 4, "zero": 2}),
    ],
    ids=str,
)
def test_resume_on_another_layout(config, tmp_path, experts, first, second):
    """Half of the steps on one layout, half on another: the curve of one process."""
    config = replace(config, experts=experts, micro_batches=1)
    whole = pretrain(replace(config, out=tmp_path / "whole")).losses
    config = replace(config, save_every=2)
    losses = pretrain(replace(config, **first, steps=2, decay_steps=4)).losses
    losses += pretrain(replace(config, **second, resume="auto")).losses
    assert losses == pytest.approx(whole, rel=1e-10)
    with pytest.raises(StateError, match=f"experts: saved {experts}, now 2"):
        pretrain(replace(config, experts=2, resume="auto"))


def die_at(config, step, rank):
    """Train, and let one rank be killed in the middle of a step."""
    module = importlib.import_module("scaletorch.pretrain.train")
    original = module.optimizer_step

    def dying(*arguments):
        values = original(*arguments)
        if arguments[-1] == step and torch.distributed.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return values

    module.optimizer_step = dying
    train(config)


@pytest.mark.parametrize("seed", today(range(5), 5))
def test_killed_at_a_random_step_and_resumed_bitwise(config, tmp_path, seed):
    draw = random.Random(seed)
    layouts = [{"dp": 2, "zero": 1}, {"dp": 2, "zero": 2}, {"pp": 2}, {"cp": 2}, {"tp": 2}]
    config = replace(config, **draw.choice(layouts), steps=8, save_every=1, keep=2, dtype="float32")
    whole = pretrain(replace(config, out=tmp_path / "whole")).losses
    kept = sorted(path.name for path in (tmp_path / "whole" / "checkpoints").glob("step-*"))
    assert kept == ["step-00000007", "step-00000008"]
    with pytest.raises(RankFailedError):
        launch(die_at, 2, config, draw.randrange(2, 8), draw.randrange(2))
    resumed = pretrain(replace(config, resume="auto")).losses
    assert 0 < len(resumed) < 8
    assert resumed == whole[-len(resumed) :]
    last = "checkpoints/step-00000008"
    assert_same_files(tmp_path / "whole" / last, config.out / last)


def test_resume_refuses_what_belongs_to_another_run(config, text):
    config = replace(config, save_every=2)
    pretrain(config)
    again = replace(config, resume="auto")
    with pytest.raises(StateError, match=r"lr: saved 0.001, now 0.1"):
        pretrain(replace(again, lr=0.1))
    with pytest.raises(StateError, match=r"already holds checkpoints, log\.jsonl of"):
        pretrain(config)
    assert pretrain(again).losses == []
    (text / "new.txt").write_text("one more")
    with pytest.raises(StateError, match=r"data: saved \w{16}, now \w{16}"):
        pretrain(again)
    save(config.out / "checkpoints", torch.nn.Linear(2, 2), step=9)
    with pytest.raises(StateError, match="that this program did not save"):
        pretrain(again)


def test_the_log_has_each_step_once(config):
    config = replace(config, save_every=2)
    log = config.out / "log.jsonl"
    pretrain(config)
    whole = log.read_text().splitlines()
    shutil.rmtree(config.out / "checkpoints" / "step-00000004")
    log.write_text("\n".join(whole[:3]) + '\n{"step": 4, "lo')  # killed while it wrote
    pretrain(replace(config, resume="auto"))
    rows = log.read_text().splitlines()
    assert rows[:2] == whole[:2]
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4]


def test_bfloat16_stays_near_float32(config):
    config = replace(config, dtype="bfloat16", cp=2, compare=True)
    result = pretrain(config)
    assert result.worst_difference() < 2e-2
    assert result.losses != result.reference


def test_global_batches_are_aligned_and_masked(text):
    corpus = load_corpus((text,), None, seq_len=16)
    draw = partial(corpus.global_batch, batch_size=64, seq_len=16, seed=0)
    batch = draw(3)
    ids, labels = batch["input_ids"], batch["labels"]
    assert ids.dtype == labels.dtype == torch.int64
    same = labels[:, :-1] == ids[:, 1:]
    assert (same | (labels[:, :-1] == -100)).all()
    assert (ids[:, 1:][labels[:, :-1] == -100] == ord("d")).all()  # documents begin so
    assert (labels == -100).any()
    assert torch.equal(ids, draw(3)["input_ids"])
    assert not torch.equal(ids, draw(4)["input_ids"])
    assert corpus.tokens.max() < 128, "the binary file is not text"
    with pytest.raises(InvalidArgumentError, match="add data or shorten seq_len"):
        load_corpus((text,), None, seq_len=10**6)


def test_default_text_is_the_standard_library():
    corpus = load_corpus((), None, seq_len=128)
    assert len(corpus.tokens) > 2_000_000
    assert bytes(corpus.tokens[:20000].tolist()).isascii()


def test_tokenizer_file(text, tmp_path):
    corpus = load_corpus((text,), tokenizer_of_words(tmp_path / "words.json"), seq_len=16)
    assert corpus.vocab_size == 6
    assert corpus.tokens[:6].tolist() == [5, 0, 0, 1, 2, 3]
    with pytest.raises(InvalidArgumentError, match="is not a file"):
        load_corpus((text,), tmp_path / "none.json", seq_len=16)


def different_text(config, folder):
    rank = torch.distributed.get_rank()
    path = folder / f"{rank}.txt"
    path.write_text("different" * (100 + rank))
    train(replace(config, dp=2, data=(path,), out=None))


def test_ranks_with_different_text_are_told(config, tmp_path):
    with pytest.raises(Exception, match="ranks read different text"):
        run_ranks(different_text, 2, config, tmp_path)


def test_command_line_under_torchrun(text, tmp_path):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "scaletorch.pretrain", "--tp", "2", "--steps", "2", "--seq-len", "16",
        "--batch-size", "2", "--micro-batches", "1", "--data", str(text), "--out", str(tmp_path),
        "--model.num-layers", "1",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "TP(2)" in done.stdout
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2
