"""The proof as an assertion, and as a fixture of the plugin of pytest."""

import pytest
import torch
from small_models import UnlikeOnRanks, one_layer, small_model

from scaletorch.bisect.__main__ import parse
from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.parallel.pg_manager import Grid
from scaletorch.verify import default_batch

pytest_plugins = ["scaletorch.pytest_ranks.plugin"]

SGD = {"optimizer": torch.optim.SGD, "optimizer_args": {"lr": 0.1}}


def batch(step):
    return default_batch(step, rows=8, length=8)


def test_layouts_that_train_alike_pass_however_they_are_named(assert_trains_alike):
    report = assert_trains_alike(small_model, batch(0), ["dp2", "1x1x1x2", Grid(pp=2)])
    assert [str(result.case) for result in report.results] == [
        "2x1x1x1 float64", "1x1x1x2 float64", "1x2x1x1 float64",
    ]  # fmt: skip
    report = assert_trains_alike(small_model, batch, "tp2", options={"micro_batches": [1]}, **SGD)
    assert [str(result.case) for result in report.results] == ["1x1x1x2 float64 micro_batches=1"]


def test_a_layout_that_trains_otherwise_is_told_in_the_words_of_the_report(assert_trains_alike):
    with pytest.raises(AssertionError) as caught:
        assert_trains_alike(UnlikeOnRanks, batch, ["dp2"], plan={}, **SGD)
    text = str(caught.value)
    assert "2x1x1x1 float64: FAILED" in text
    assert "loss, step 0, rank" in text
    assert "python -m scaletorch.verify --model small_models:UnlikeOnRanks --batch" in text
    assert f"--batch {__name__}:batch --plan MODULE:NAME --optimizer torch.optim.sgd:SGD" in text
    assert "--optimizer-args lr=0.1 --layout 2x1x1x1 --dtype float64" in text
    assert "0 of 1 cases train like one process" in text
    (place,) = [line for line in text.splitlines() if "find the place: " in line]
    found = parse(place.partition("scaletorch.bisect ")[2].split())
    assert (found.command, found.layout, found.dtype) == ("run", "2x1x1x1", "float64")


def test_a_layout_that_is_refused_is_no_pass(assert_trains_alike):
    with pytest.raises(AssertionError, match=r"1x2x1x1 float64 +refused .*layer"):
        assert_trains_alike(one_layer, batch(0), ["pp2"])


def test_wrong_arguments(assert_trains_alike):
    for model, layouts, message in (
        (small_model(), "dp2", "got a Llama: each rank"),
        (lambda: small_model(), "dp2", "lambdas and functions defined inside"),
        (small_model, [], "needs a layout"),
        (small_model, "xp2", "nor the same by name, such as dp2-tp2"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            assert_trains_alike(model, batch, layouts)
