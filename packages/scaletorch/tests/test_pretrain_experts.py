"""The main job with experts: one process's curve on any ep, resumed on another."""

from dataclasses import replace

import pytest
from pretrained import settings

from scaletorch.dist.errors import StateError
from scaletorch.models import LlamaConfig, MixtureConfig
from scaletorch.pretrain import pretrain
from scaletorch.pretrain.__main__ import main
from scaletorch.pretrain.progress import flops_per_token


@pytest.fixture
def config(tmp_path):
    return settings(tmp_path, experts=4, micro_batches=1, dtype="float64")


def test_the_command_says_as_one_process(config, capsys):
    arguments = [
        "--experts", "4", "--top-k", "2", "--ep", "2", "--dp", "2", "--compare", "--steps", "3",
        "--seq-len", "16", "--batch-size", "4", "--data", str(config.data[0]),
        "--model.num-layers", "1", "--model.hidden-size", "32", "--model.intermediate-size", "16",
    ]  # fmt: skip
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "TP(1)-CP(1)-PP(1)-DP(2)-EP(2): loss" in said
    assert "\nas one process: largest relative difference of 3 losses" in said


def test_flops_count_the_matrices_that_a_token_goes_through():
    mlp = 3 * 128 * 384
    dense = flops_per_token(LlamaConfig(), 128)
    assert dense == 6 * (4 * (128 * 128 * 3 + mlp) + 128 * 256) + 6 * 4 * 128 * 128
    sizes = MixtureConfig(num_experts=8, top_k=2)
    assert flops_per_token(sizes, 128) == dense + 6 * 4 * (mlp + 8 * 128)


def test_a_run_goes_on_with_another_ep(config, tmp_path):
    whole = pretrain(replace(config, out=tmp_path / "whole")).losses
    config = replace(config, save_every=2)
    first = pretrain(replace(config, steps=2, decay_steps=4, dp=2, ep=2, zero=1)).losses
    config = replace(config, resume="auto")
    with pytest.raises(StateError, match="experts: saved 4, now 2"):
        pretrain(replace(config, experts=2))
    last = pretrain(replace(config, dp=2, tp=2, ep=4, zero=2)).losses
    assert first + last == pytest.approx(whole, rel=1e-10)
