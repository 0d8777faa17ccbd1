"""The proof tells a layout that trains like one process from one that does not."""

import math
import re
from dataclasses import replace

import pytest
import torch
from mutants import MUTANTS, hunt
from small_models import SMALL, UnlikeOnRanks, small_model
from sweeps import today
from torch import nn

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.pg_manager import Grid
from scaletorch.verify import default_batch, verify
from scaletorch.verify.__main__ import main, options_of, parse
from scaletorch.verify.cases import OPTIONS, Case, enumerate_cases
from scaletorch.verify.differences import Difference, compare_tensors, doubled, missing
from scaletorch.verify.problem import sharpened
from scaletorch.verify.report import CaseResult
from scaletorch.verify.runner import RankReport


def test_options_cross_only_where_they_matter():
    grids = [Grid(pp=2), Grid(dp=2), Grid(tp=2)]
    options = {"schedule": ["1f1b", "afab"], "bucket_size": [1, 2**14], "micro_batches": [1, 2]}
    names = [str(case) for case in enumerate_cases(grids, ["float64"], options)]
    assert names == [
        "1x2x1x1 float64 micro_batches=1",
        "1x2x1x1 float64",
        "1x2x1x1 float64 schedule=afab micro_batches=1",
        "1x2x1x1 float64 schedule=afab",
        "2x1x1x1 float64 micro_batches=1 bucket_size=1",
        "2x1x1x1 float64 micro_batches=1",
        "2x1x1x1 float64 bucket_size=1",
        "2x1x1x1 float64",
        "1x1x1x2 float64 micro_batches=1",
        "1x1x1x2 float64",
    ]


def test_the_command_crosses_the_values_that_it_is_given_or_all():
    asked = options_of(parse(["--world-size", "2", "--recompute", "none", "layers"]))
    assert asked == {name: v[:1] for name, v in OPTIONS.items()} | {"recompute": ["none", "layers"]}
    assert options_of(parse(["--world-size", "2", "--every-option"])) == OPTIONS


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "layouts or a world_size"),
        ({"options": {"zero": [1]}}, "option 'zero' is not one of schedule, micro_batches, bucket"),
        ({"options": {"schedule": ["gpipe"]}}, "schedule must be one of 1f1b, afab.* got 'gpipe'"),
        ({"options": {"micro_batches": [0]}}, "micro_batches must be a positive integer, got 0"),
    ],
)
def test_wrong_arguments_are_refused(given, message):
    with pytest.raises(InvalidArgumentError, match=message):
        verify(**{"world_size": 1} | given if given else given)


def test_all_layouts_of_two_ranks_in_both_dtypes():
    seen = []
    report = verify(small_model, world_size=2, progress=seen.append)
    assert report.passed, report
    assert len(seen) == len(report.results) == 8
    for result in report.results:
        assert len(result.ranks) == 2
        assert result.worst.error < (1e-13 if result.case.dtype == "float64" else 1e-4)
    whole = [d.compared for d in report.results[0].ranks]
    assert min(whole) > 100, "loss, norm, every gradient and weight of three steps"


def test_a_fault_is_named_and_can_be_repeated():
    report = verify(UnlikeOnRanks, layouts=[Grid(dp=2)], dtype="float64")
    assert not report.passed
    text = str(report)
    assert "python -m scaletorch.verify --layout 2x1x1x1 --dtype float64" in text
    assert re.search(r"loss, step 0, rank [01]: relative error \S+, bound \S+; largest at", text)
    first = report.results[0].ranks[0].failures[0]
    assert first.error > 1000 * first.bound


def test_no_place_is_promised_for_a_wrong_draw_of_dropout():
    def told(what):
        wrong = Difference(what, 4, 1.0, 0.0)
        ranks = [RankReport(1, wrong, [wrong])]
        return CaseResult(Case(Grid(dp=2)), 0.0, ranks).explanation("python -m scaletorch.verify")

    assert "find the place: " in told("weight dropout.weight")
    assert "find the place: " not in told("dropout layers.0")


class Placed(nn.Module):
    """Learned positions, which later stages must not add again; a norm that casts to float32."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, 8), nn.Embedding(16, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2)
        )
        self.last, self.head = Cast(8), nn.Linear(8, 64)

    def forward(self, input_ids, position_ids):
        x = self.tokens(input_ids) + self.places(position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last(x))


class Cast(nn.RMSNorm):
    def forward(self, x):
        return super().forward(x.float()).to(x.dtype)


def with_positions(step):
    batch = dict(default_batch(step))
    batch["position_ids"] = torch.arange(16).expand(16, 16).contiguous()
    return batch


PLAN = {"tokens": "vocab", "layers.*.0": "column", "layers.*.2": "row", "head": "column_gather"}


def test_the_command_verifies_a_users_model_by_its_name(capsys):
    words = [
        "--model", f"{__name__}:Placed", "--batch", f"{__name__}:with_positions",
        "--plan", f"{__name__}:PLAN", "--dtype", "float64",
        "--layout", "2x2x1x1", "1x1x2x1", "1x1x1x2",
    ]  # fmt: skip
    assert main(words) == 0
    assert "3 of 3 cases train like one process" in capsys.readouterr().out


def six_heads():
    return Llama(LlamaConfig(67, 24, 26, 2, num_heads=6, num_kv_heads=6, tie_embeddings=True))


def two_key_heads():
    return Llama(LlamaConfig(67, 16, 26, 1, num_heads=8, num_kv_heads=2))


def large_vocabulary():
    return Llama(LlamaConfig(50257, 8, 10, 1, num_heads=4, num_kv_heads=4))


def uneven_batch(step):
    return default_batch(step, rows=4, length=15)


def test_a_difference_is_measured_by_typical_elements_where_a_tensor_is_what_remained():
    theirs = {"weight": torch.ones(3).double(), "bias": torch.full((1,), 1e-19).double()}

    def compare(**ours):
        return compare_tensors("gradient", 0, ours, {"gradients": theirs}, 1e-12)

    weight, bias = compare(weight=theirs["weight"] + 1e-15, bias=theirs["bias"] * 3)
    assert weight.error == pytest.approx(1e-15, rel=0.2)
    assert bias.error == pytest.approx(2e-19 / math.sqrt(3 / 4), rel=0.01)
    wrong, unknown, narrow = compare(
        bias=theirs["bias"] + 1e-9, other=theirs["bias"], weight=theirs["weight"].float()
    )
    assert wrong.failed
    assert (unknown.error, unknown.note) == (math.inf, "unknown to one process")
    assert (narrow.error, narrow.note) == (
        math.inf,
        "(3,) torch.float32, one process (3,) torch.float64",
    )


def test_missing_doubled_and_unsynchronised_parameters_are_named():
    (lost,) = missing("gradient", 1, ["a"], ["a", "b"], 1e-12)
    assert (lost.what, lost.note, lost.failed) == ("gradient b", "missing on this layout", True)
    (twice,) = doubled([{"a", "b"}, {"b", "c"}, {"c"}], ["c"], 1e-12)
    assert twice.what == "parameter b"
    assert twice.note == "held by stages [0, 1], and not tied: it counts 2 times"
    (outcome,) = hunt([MUTANTS["buckets-not-reduced"]])
    notes = {failure.note for rank in outcome.found.ranks for failure in rank.failures}
    assert "rank 1 holds other bits: they were never synchronised" in notes


def four_key_heads():
    return sharpened(Llama(replace(SMALL, num_kv_heads=4)))


def ragged_batch(step):
    """Sequences of 13 positions, which no number of ranks divides."""
    return default_batch(step, length=13)


SHARED = {"sequence_parallel": ("off", "on")}
CASES = {  # sizes that ranks do not divide, then lengths of a sequence
    "heads": (six_heads, uneven_batch, Grid(tp=4), SHARED),
    "key heads": (two_key_heads, uneven_batch, Grid(tp=4), SHARED),
    "vocabulary": (large_vocabulary, uneven_batch, Grid(tp=4), SHARED),
    "length and stages": (four_key_heads, ragged_batch, Grid(cp=2, pp=2), {}),
    "length": (four_key_heads, ragged_batch, Grid(cp=4), {}),
    "length and heads": (four_key_heads, ragged_batch, Grid(tp=2, cp=2), {}),
}


@pytest.mark.parametrize("name", today([*CASES], 3))
def test_sizes_and_layouts_of_sequences_train_like_one_process(name):
    model_fn, batch_fn, grid, options = CASES[name]
    report = verify(model_fn, batch_fn, layouts=[grid], dtype="float64", options=options)
    assert report.passed, report
