"""The main job with experts: one process's curve on any ep, resumed on another, exported."""

from dataclasses import replace

import pytest
import torch

from scaletorch.dist.errors import InvalidArgumentError, StateError
from scaletorch.dist.testing import relative_error
from scaletorch.models import LlamaConfig, MixtureConfig
from scaletorch.pretrain import PretrainConfig, pretrain
from scaletorch.pretrain.__main__ import main
from scaletorch.pretrain.commands import export
from scaletorch.pretrain.report import flops_per_token
from scaletorch.pretrain.saved import load_trained
from scaletorch.pretrain.train import short_name

MODEL = LlamaConfig(hidden_size=32, intermediate_size=16, num_layers=2, num_heads=4, num_kv_heads=2)


@pytest.fixture
def config(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    return PretrainConfig(
        model=MODEL, experts=4, steps=4, batch_size=4, micro_batches=1, seq_len=16,
        warmup_steps=2, dtype="float64", data=(text,), out=tmp_path / "run",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": 0, "ep": 2, "dp": 2}, "ep 2 divides experts, and the model has none"),
        ({"experts": 2, "ep": 4, "dp": 4}, "ep 4 must be at most experts = 2"),
        ({"top_k": 5}, "top_k 5 must be at most num_experts 4"),
        ({"ep": 3, "dp": 2}, "must divide the ranks of a stage.* nearest legal ep sizes: 2"),
        ({"ep": 0}, "must be at least 1: ep=0"),
        ({"top_k": 0}, "must be at least 1: top_k=0"),
        ({"experts": -1}, "must be at least 0: experts=-1"),
        ({"tp": 9}, "tp sizes up to"),
    ],
)
def test_wrong_settings_are_known_before_ranks_start(config, monkeypatch, change, message):
    def never(*_):
        raise AssertionError("a rank was started")

    monkeypatch.setattr("scaletorch.pretrain.run.train_locally", never)
    with pytest.raises(InvalidArgumentError, match=message):
        pretrain(replace(config, **change))


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


def test_a_run_goes_on_with_another_ep(config, tmp_path):
    whole = pretrain(replace(config, out=tmp_path / "whole")).losses
    config = replace(config, save_every=2)
    first = pretrain(replace(config, steps=2, decay_steps=4, dp=2, ep=2, zero=1)).losses
    config = replace(config, resume="auto")
    with pytest.raises(StateError, match="experts: saved 4, now 2"):
        pretrain(replace(config, experts=2))
    last = pretrain(replace(config, dp=2, tp=2, ep=4, zero=2)).losses
    assert first + last == pytest.approx(whole, rel=1e-10)


def test_transformers_reads_a_mixtral(config, tmp_path):
    transformers = pytest.importorskip("transformers")
    pretrain(replace(config, save_every=4, dtype="float32"))
    trained = load_trained(config.out)
    assert trained.model.config == MixtureConfig(
        **{f: getattr(MODEL, f) for f in LlamaConfig.__slots__}, num_experts=4
    )
    export(trained, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(theirs).__name__ == "MixtralForCausalLM"
    theirs.set_experts_implementation("eager")
    ids = torch.randint(256, (2, 16))
    assert relative_error(theirs(ids).logits, trained.model(ids)) < 1e-5


def test_names_and_numbers_know_experts(config):
    assert short_name(replace(config, dp=2, ep=2).grid) == "dp2 ep2"
    sizes = MixtureConfig(num_experts=8, top_k=2)
    dense = flops_per_token(LlamaConfig(), 128)
    mlp = 3 * 128 * 384
    assert flops_per_token(sizes, 128) == dense + 6 * 4 * (mlp + 8 * 128)
