"""`verify --optimizer` trains with any optimizer, and says what cannot be."""

from __future__ import annotations

import pytest
import torch
from small_models import small_model

from scaletorch.dist.building import locate
from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import relative_error
from scaletorch.parallel.pg_manager import Grid
from scaletorch.verify import default_batch, verify
from scaletorch.verify.__main__ import main, parse, read_argument, run, training_of
from scaletorch.verify.cases import Case
from scaletorch.verify.problem import Chosen, Subject, phases_of
from scaletorch.verify.report import CaseResult, Report
from scaletorch.verify.verify import save_reference


def half_step(parameters, lr=0.1):
    return torch.optim.SGD(parameters, lr=lr / 2)


@pytest.mark.parametrize(
    ("optimizer", "given", "layouts"),
    [
        (torch.optim.Muon, {"lr": 0.02}, [Grid(tp=2), Grid(dp=2), Grid(pp=2)]),
        (torch.optim.Adafactor, {}, [Grid(tp=2), Grid(dp=2)]),
        (half_step, {"lr": 0.2}, [Grid(pp=2)]),
    ],
)
def test_an_optimizer_that_is_named(optimizer, given, layouts):
    report = verify(
        small_model, layouts=layouts, dtype="float64", options={"data_parallel": ["zero2"]},
        optimizer=optimizer, optimizer_args=given,
    )  # fmt: skip
    assert report.passed, report


def test_optimizers_of_the_command_line():
    for words, optimizer in (
        (["--optimizer", "Muon"], torch.optim.Muon),
        (["--optimizer", "torch.optim:SGD"], torch.optim.SGD),
        ([], None),
    ):
        assert training_of(parse(words))["optimizer"] is optimizer
    with pytest.raises(InvalidArgumentError, match="optim:Moun' cannot be imported as package"):
        training_of(parse(["--optimizer", "Moun"]))
    with pytest.raises(InvalidArgumentError, match="schedule must be one of"):
        run(parse(["--world-size", "1", "--schedule", "typo"]))
    read = [read_argument(text) for text in ("lr=0.02", "adjust_lr_fn=match_rms_adamw", "a=(1, 2)")]
    assert read == [("lr", 0.02), ("adjust_lr_fn", "match_rms_adamw"), ("a", (1, 2))]


@pytest.mark.parametrize(
    ("optimizer", "given", "message"),
    [
        (torch.optim.SGD, {"learning": 1}, r"SGD with arguments \{'learning': 1\} cannot train"),
        (torch.optim.Adam, {"lr": -1.0}, "Adam with .* cannot train .* Invalid learning rate"),
        (torch.optim.LBFGS, {}, "LBFGS with .* cannot train this model by step.. alone: .*closure"),
    ],
)
def test_an_optimizer_that_cannot_be_tried_is_refused(optimizer, given, message):
    with pytest.raises(InvalidArgumentError, match=message):
        verify(small_model, world_size=1, optimizer=optimizer, optimizer_args=given)


def test_what_bfloat16_loses_is_told_by_the_same_optimizer(tmp_path):
    phases = phases_of(Chosen(locate(half_step), {"lr": 0.2}))
    subject = Subject(locate(small_model), phases=phases)
    saved = torch.load(save_reference(tmp_path / "reference", subject, default_batch, "bfloat16"))
    for step, exact in zip(saved["steps"], saved["exact"], strict=True):
        for name, weight in step["weights"].items():
            assert relative_error(weight.double(), exact["weights"][name]) < 0.02, name


def test_a_command_that_repeats_a_case_is_one_for_a_shell(monkeypatch, capsys):
    def found(arguments):
        return Report([CaseResult(Case(Grid()), 0.0, [], "an error")], 1)

    monkeypatch.setattr("scaletorch.verify.__main__.run", found)
    assert main(["--world-size", "1", "--optimizer-args", "lr=0.1", "betas=(0.9, 0.99)"]) == 1
    assert "--optimizer-args lr=0.1 'betas=(0.9, 0.99)' --layout 1x1x1x1" in capsys.readouterr().out
