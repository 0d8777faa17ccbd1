"""What the command refuses before a rank starts, what it says, and what it never writes over."""

import json
import math
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pretrained import settings

from scaletorch.dist import RankFailedError
from scaletorch.dist.errors import InvalidArgumentError, NonFiniteError, StateError
from scaletorch.models import LlamaConfig
from scaletorch.pretrain import pretrain, train
from scaletorch.pretrain.__main__ import main, one_line
from scaletorch.pretrain.train import learning_rate

steps = sys.modules["scaletorch.pretrain.train"]
NOT_FINITE = r"step 3: the loss is \d.*finite: norm\.weight on dp0 pp0 cp0 tp0;"


@pytest.fixture
def config(tmp_path):
    return settings(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": 0, "ep": 2, "dp": 2}, "ep 2 divides experts, and the model has none"),
        ({"experts": 2, "ep": 4, "dp": 4}, "ep 4 must be at most experts = 2"),
        ({"experts": 4, "top_k": 5}, "top_k 5 must be at most num_experts 4"),
        ({"experts": 4, "ep": 3, "dp": 2}, "divide the ranks of a stage.* nearest legal ep sizes"),
        ({"dtype": "fp16"}, "dtype must be one of float32, float64, bfloat16; got 'fp16'"),
        ({"resume": "yes"}, "resume must be one of no, auto; got 'yes'"),
        ({"schedule": "1f1bb"}, "schedule must be one of 1f1b, afab"),
        ({"zero": 5}, "zero must be one of 0, 1, 2; got 5"),
        ({"warmup_steps": -3}, "must be at least 0: warmup_steps=-3"),
        ({"steps": 1.5}, "must be whole numbers: steps=1.5"),
        ({"tp": 0}, "must be at least 1: tp=0"),
        ({"lr": math.nan}, "lr must be a number, above 0, got nan"),
        ({"clip": 0}, "clip must be a number, above 0, got 0"),
        ({"weight_decay": math.inf}, "weight_decay must be a number, at least 0, got inf"),
        ({"backend": "gllo"}, "gllo"),
        ({"out": None, "resume": "auto"}, "checkpoints need a folder: pass --out"),
        ({"keep": 3}, "keep=3 has no checkpoints to keep: pass --save-every"),
        ({"data": (Path("/nowhere"),)}, "data path /nowhere is neither a file nor a folder"),
        ({"tokenizer": Path("/nowhere")}, "tokenizer /nowhere is not a file"),
        ({"tokenizer": Path(__file__)}, r"tokenizer .*\.py cannot be read as a tokenizer.json"),
        ({"out": Path("/proc/x")}, "out /proc/x cannot be made"),
        ({"out": Path("/dev/null")}, "out /dev/null is a file; pass a folder"),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, dict) else "",
)
def test_wrong_settings_are_known_before_ranks_start(config, monkeypatch, change, message):
    def never(*_):
        raise AssertionError("a rank was started")

    monkeypatch.setattr("scaletorch.pretrain.run.train_locally", never)
    with pytest.raises(InvalidArgumentError, match=message):
        pretrain(replace(config, **change))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": "128"}, "hidden_size must be a whole number, at least 1: '128'"),
        ({"num_layers": 0}, "num_layers must be a whole number, at least 1: 0"),
        ({"vocab_size": 2.5}, "vocab_size must be a whole number"),
        ({"num_heads": 3}, "hidden_size 128 must be a multiple of num_heads 3"),
        ({"hidden_size": 8}, "even number of features"),
        ({"rope_theta": math.nan}, "rope_theta must be a number above 0, got nan"),
    ],
)
def test_sizes_that_make_no_model(sizes, message):
    with pytest.raises(InvalidArgumentError, match=message):
        LlamaConfig(**sizes)


def test_a_wrong_setting_is_one_line_and_status_2(config, capsys):
    assert main(["--data", "/nowhere", "--tp", "2"]) == 2
    text = capsys.readouterr().err
    assert text == "InvalidArgumentError: data path /nowhere is neither a file nor a folder\n"


def test_ranks_that_fail_alike_with_an_error_of_ours_are_one_line():
    cause = StateError("all say this")
    alike = RankFailedError("long", failures={0: "", 1: ""}, exceptions={0: cause, 1: cause})
    assert one_line(alike) == "StateError: all say this"
    unlike = RankFailedError("long", failures={0: "", 1: ""}, exceptions={0: cause})
    assert one_line(unlike) == "RankFailedError: long"


def spoil(monkeypatch, name, change):
    """Let the third call of a function of the loop end with a change of its model."""
    original, calls = getattr(steps, name), []

    def spoiled(*arguments):
        calls.append(found := original(*arguments))
        if len(calls) == 3:
            model = next(each for each in arguments if isinstance(each, torch.nn.Module))
            change(dict(model.named_parameters())["norm.weight"])
        return found

    monkeypatch.setattr(steps, name, spoiled)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("train_step", lambda weight: weight.grad[3:4].fill_(math.nan), NOT_FINITE),
        ("train_step", lambda weight: weight.grad[3:4].fill_(math.inf), NOT_FINITE),
        ("optimizer_step", lambda weight: weight.data[:1].fill_(math.nan),
         r"after step 3 the weight norm\.weight is not finite"),
    ],
)  # fmt: skip
def test_what_is_not_finite_stops_before_it_is_saved(config, monkeypatch, name, change, message):
    spoil(monkeypatch, name, change)
    config = replace(config, save_every=1, keep=1)
    with pytest.raises(NonFiniteError, match=message):
        train(config)
    kept = [path.name for path in (config.out / "checkpoints").glob("step-*")]
    assert kept == ["step-00000002"]
    assert len(logged(config)) == (2 if name == "train_step" else 3)


def logged(config):
    return [json.loads(line) for line in (config.out / "log.jsonl").read_text().splitlines()]


def test_no_run_writes_over_another(config):
    train(config)
    log = config.out / "log.jsonl"
    before = log.read_bytes()
    with pytest.raises(StateError, match=r"already holds log.jsonl of an earlier run: go on"):
        train(config)
    assert log.read_bytes() == before
    assert len(train(replace(config, resume="auto"))) == 4  # nothing to resume: it starts anew
    assert [row["step"] for row in logged(config)] == [1, 2, 3, 4]


def test_a_resumed_run_is_compared_in_the_steps_that_it_has_done(config):
    config = replace(config, save_every=2)
    pretrain(replace(config, steps=2))
    result = pretrain(replace(config, resume="auto", compare=True, decay_steps=2))
    assert len(result.losses) == 2
    assert [row["step"] for row in logged(config)] == [1, 2, 3, 4]
    assert result.worst_difference() < 1e-6
    again = pretrain(replace(config, resume="auto", compare=True, decay_steps=2))
    assert (again.losses, again.reference) == ([], None)


def test_a_finished_run_goes_on_at_its_lowest_rate(config):
    config = replace(config, save_every=2, steps=4)
    pretrain(config)
    with pytest.raises(StateError, match=r"in 4 steps, and this one in 6: .*--decay-steps 4, or"):
        pretrain(replace(config, steps=6, resume="auto"))
    more = pretrain(replace(config, steps=6, decay_steps=4, resume="auto"))
    assert len(more.losses) == 2
    rates = [row["lr"] for row in logged(config)]
    lowest = config.lr / 10
    assert rates[4:] == pytest.approx([lowest, lowest])
    assert rates[:4] == [learning_rate(config, step) for step in range(4)]
    again = pretrain(replace(config, steps=8, decay_steps=8, resume="auto"))  # planned anew
    assert len(again.losses) == 2
    assert logged(config)[-2]["lr"] == learning_rate(replace(config, steps=8), 6) > lowest


def test_ctrl_c_says_how_to_go_on(config, monkeypatch, capsys):
    original = steps.optimizer_step

    def interrupted(*arguments):
        if arguments[-1] == 3:
            signal.raise_signal(signal.SIGINT)
        return original(*arguments)

    monkeypatch.setattr(steps, "optimizer_step", interrupted)
    settings = replace(config, steps=50, save_every=2)
    monkeypatch.setattr("scaletorch.pretrain.__main__.parse", lambda _: settings)
    assert main([]) == 130
    text = capsys.readouterr().err.strip().splitlines()
    saved = config.out / "checkpoints" / "step-00000002"
    assert text[-1] == f"interrupted: go on from {saved} by --resume auto"
    assert [row["step"] for row in logged(config)] == [1, 2, 3]


def test_help_says_what_the_program_does(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "Train a small Llama, or Mixtral with --experts, on text, on any layout" in said
    assert "``" not in said
    assert "hatch run train" in said
