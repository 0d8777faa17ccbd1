"""A curve that is not one process's, or that nobody can compare, never passes for one that is."""

import math
import sys
from pathlib import Path

import pytest
from mutants.patch import instead, patched

from scaletorch.dist import RankFailedError, RankPool
from scaletorch.dist.errors import StateError
from scaletorch.models import LlamaConfig
from scaletorch.pretrain import PretrainConfig, train
from scaletorch.pretrain.__main__ import as_one_process, main, summary
from scaletorch.pretrain.run import Result

NAN = float("nan")
SOUND = [5.5, 5.4, 5.3, 5.2]
MODEL = LlamaConfig(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=2)


@pytest.mark.parametrize("bad", [NAN, math.inf])
@pytest.mark.parametrize("places", [(0,), (1, 2, 3), (0, 1, 2, 3)])
def test_losses_that_are_not_finite_are_not_as_one_process(places, bad):
    diverged = [bad if i in places else loss for i, loss in enumerate(SOUND)]
    for losses, reference in ((SOUND, diverged), (diverged, SOUND), (diverged, diverged)):
        result = Result(losses, Path(), reference)
        assert result.worst_difference() == math.inf
        assert not as_one_process(PretrainConfig(), result)
        assert "NOT AS ONE PROCESS" in summary(PretrainConfig(), result, 1.0)


def test_rounding_is_as_one_process():
    result = Result([loss * (1 + 1e-6) for loss in SOUND], Path(), SOUND)
    assert result.worst_difference() == pytest.approx(1e-6, rel=1e-3)
    assert as_one_process(PretrainConfig(), result)
    assert "\nas one process" in summary(PretrainConfig(), result, 1.0)


def test_a_run_without_a_reference_is_not_compared_with_itself():
    with pytest.raises(StateError, match="train with compare=True"):
        Result(SOUND, Path()).worst_difference()
    assert not as_one_process(PretrainConfig(), Result(SOUND, Path(), [0.0] * 4))


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 50)
    given = [
        "pretrain", "--steps", "3", "--seq-len", "16", "--batch-size", "2", "--micro-batches", "1",
        "--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "run"), "--compare",
        "--model.num-layers", "1", "--model.hidden-size", "16",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", given)
    return given


def test_the_command_fails_where_training_diverges(arguments, capsys):
    """Weights leave float32 in the first step; the next one is the last."""
    arguments += ["--lr", "1e30", "--warmup-steps", "1"]
    assert main() == 2
    said = capsys.readouterr()
    assert "NonFiniteError: step 2: the loss is " in said.err
    assert "as one process" not in said.out


def test_the_command_has_nothing_to_compare_after_a_finished_run(arguments, capsys):
    arguments += ["--save-every", "1"]
    assert main() == 0
    arguments += ["--resume", "auto"]
    assert main() == 0
    assert "nothing to do" in capsys.readouterr().out


def test_experts_are_compared_too(arguments, capsys):
    arguments += ["--experts", "4", "--top-k", "2", "--ep", "2", "--dp", "2"]
    assert main() == 0
    said = capsys.readouterr().out
    assert "TP(1)-CP(1)-PP(1)-DP(2)-EP(2): loss" in said
    assert "\nas one process: largest relative difference of 3 losses" in said


def one_token_more(config):
    """Train with a loss that is divided by one token more than there are."""

    def counted(ready, *arguments):
        called, tokens = ready(*arguments)
        return called, tokens + 1

    with patched("compose.step:prepare_step", instead(counted)):
        return train(config)


def test_a_loss_that_is_off_by_one_token_of_a_thousand_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 100)
    config = PretrainConfig(
        model=MODEL, steps=2, seq_len=256, batch_size=8, micro_batches=1, dp=2,
        data=(tmp_path / "text.txt",), out=tmp_path, backend="gloo",
    )  # fmt: skip
    with (
        RankPool(2, timeout=200) as pool,
        pytest.raises(RankFailedError, match=r"the loss is off by 0\.0\d+ of its size"),
    ):
        pool.run(one_token_more, config)
