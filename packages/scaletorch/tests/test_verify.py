"""The proof tells a layout that trains like one process from one that does not."""

import json
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
from scaletorch.verify import default_batch, every_layout, layout_name, parse_layout, verify
from scaletorch.verify.__main__ import main, options_of, parse
from scaletorch.verify.cases import OPTIONS, enumerate_cases
from scaletorch.verify.differences import compare_named, doubled, missing
from scaletorch.verify.problem import sharpened


@pytest.mark.parametrize(("world_size", "count"), [(1, 1), (2, 4), (4, 10), (8, 20), (16, 35)])
def test_every_layout_is_enumerated(world_size, count):
    grids = every_layout(world_size)
    assert len(set(grids)) == count
    assert all(parse_layout(layout_name(grid)) == grid for grid in grids)


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
    ("options", "message"),
    [
        ({"zero": [1]}, "option 'zero' is not one of schedule, micro_batches, bucket_size"),
        ({"schedule": ["gpipe"]}, "schedule must be one of 1f1b, afab, .*, got 'gpipe'"),
        ({"micro_batches": [0]}, "micro_batches must be a positive integer, got 0"),
    ],
)
def test_unknown_options_are_refused(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        verify(world_size=1, options=options)
    with pytest.raises(InvalidArgumentError, match="DPxPPxCPxTP"):
        parse_layout("2x2x2")
    with pytest.raises(InvalidArgumentError, match="layouts or a world_size"):
        verify()


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
    assert "2x1x1x1 float64: FAILED" in text
    assert "python -m scaletorch.verify --layout 2x1x1x1 --dtype float64" in text
    assert re.search(r"loss, step 0, rank [01]: relative error \S+, bound \S+; largest at", text)
    assert re.search(r"largest at \[\]: \d+\.\d+, one process \d+\.\d+", text)
    first = report.results[0].ranks[0].failures[0]
    assert (first.what, first.step) == ("loss", 0)
    assert first.error > 1000 * first.bound
    content = json.loads(report.to_json())
    assert not content["passed"]
    assert content["cases"][0]["failures"][0]["what"] == "loss"


USER = """
import torch
from torch import nn
from torch.nn import functional as F


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 64)

    def forward(self, idx, position_ids=None):  # tokens by no name but their place
        x = self.tokens(idx)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.q, self.k = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.v, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def model():
    return Gpt()


PLAN = {"tokens": "vocab", "blocks.*.out": "row", "head": "column_gather"}
PLAN |= {f"blocks.*.{name}": "column" for name in "qkv"}
"""


class Doubled(nn.Module):
    """Of no known family: its layers are plain, so tensor parallelism needs a plan."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
                                    for _ in range(2))  # fmt: skip
        self.head = nn.Linear(8, 64)

    def forward(self, input_ids, position_ids=None):
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Placed(Doubled):
    """Learned positions, which later stages must not add again; a norm that casts to float32."""

    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(16, 8)
        self.last = Cast(8)

    def forward(self, input_ids, position_ids):
        x = self.tokens(input_ids) + self.places(position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last(x))


class Cast(nn.RMSNorm):
    def forward(self, x):
        return super().forward(x.float()).to(x.dtype)


def placed():
    model = Placed()
    # The split goes by the order of modules: that in which they are called.
    order = ["tokens", "places", "layers", "last", "head"]
    model._modules = {name: model._modules[name] for name in order}
    return model


def with_positions(step):
    batch = dict(default_batch(step))
    batch["position_ids"] = torch.arange(16).expand(16, 16).contiguous()
    return batch


def test_learned_positions_and_casts_to_float32():
    report = verify(placed, with_positions, layouts=[Grid(pp=2, dp=2)], dtype="float64")
    assert report.passed, report
    assert report.results[0].worst.error < 1e-14


def six_heads():
    return Llama(LlamaConfig(67, 24, 26, 2, num_heads=6, num_kv_heads=6, tie_embeddings=True))


def two_key_heads():
    return Llama(LlamaConfig(67, 16, 26, 1, num_heads=8, num_kv_heads=2))


def large_vocabulary():
    return Llama(LlamaConfig(50257, 8, 10, 1, num_heads=4, num_kv_heads=4))


def uneven_batch(step):
    return default_batch(step, rows=4, length=15)


@pytest.mark.parametrize("model_fn", today([six_heads, two_key_heads, large_vocabulary], 3))
def test_sizes_that_four_ranks_do_not_divide(model_fn):
    """Heads, vocabulary, key heads and, with sequence parallelism, the sequence."""
    options = {"sequence_parallel": ("off", "on")}
    report = verify(model_fn, uneven_batch, layouts=[Grid(tp=4)], dtype="float64", options=options)
    assert report.passed, report


@pytest.mark.parametrize(
    "plan", [{"layers.*.0": "column", "layers.*.2": "row", "tokens": "vocab"}, None]
)
def test_a_model_of_no_known_family_takes_a_plan_or_the_suggested_one(plan):
    report = verify(Doubled, layouts=[Grid(tp=2)], dtype="float64", plan=plan)
    assert report.passed, report


def test_command_verifies_a_users_module_by_its_name(tmp_path, monkeypatch, capsys):
    """Its keys have biases and no rotation: gradients that are zero but for rounding."""
    (tmp_path / "mine.py").write_text(USER)
    monkeypatch.syspath_prepend(tmp_path)
    words = [
        "--model", "mine:model", "--plan", "mine:PLAN", "--dtype", "float64",
        "--layout", "2x1x1x1", "1x2x1x1", "1x1x2x1", "1x1x1x2", "--out", str(tmp_path / "report"),
    ]  # fmt: skip
    assert main(words) == 0
    assert "4 of 4 cases train like one process" in capsys.readouterr().out
    assert json.loads((tmp_path / "report" / "report.json").read_text())["passed"]


def test_the_command_tells_a_model_that_is_not_there(capsys):
    assert main(["--model", "small_models:nothing", "--world-size", "1"]) == 2
    assert "'small_models:nothing' is not package.module:name" in capsys.readouterr().err


def test_a_difference_is_measured_by_typical_elements_where_a_tensor_is_what_remained():
    theirs = {
        "weight": torch.ones(3, dtype=torch.float64),
        "bias": torch.full((1,), 1e-19).double(),
    }
    ours = {"weight": theirs["weight"] + 1e-15, "bias": theirs["bias"] * 3}
    weight, bias = compare_named("gradient", 0, ours, theirs, 1e-12)
    assert not weight.failed
    assert not bias.failed
    assert weight.error == pytest.approx(1e-15, rel=0.2)
    assert bias.error == pytest.approx(2e-19 / math.sqrt(3 / 4), rel=0.01)
    assert next(compare_named("gradient", 0, {"bias": ours["bias"] + 1e-9}, theirs, 1e-12)).failed


def test_missing_doubled_and_unsynchronised_parameters_are_named():
    (lost,) = missing("gradient", 1, ["a"], ["a", "b"], 1e-12)
    assert (lost.what, lost.note, lost.failed) == ("gradient b", "missing on this layout", True)
    (twice,) = doubled([{"a", "b"}, {"b", "c"}, {"c"}], ["c"], 1e-12)
    assert twice.what == "parameter b"
    assert twice.note == "held by stages [0, 1], and not tied: it counts 2 times"
    (outcome,) = hunt([MUTANTS["buckets-not-reduced"]])
    notes = {failure.note for rank in outcome.found.ranks for failure in rank.failures}
    assert "rank 1 holds other bits of it: never synchronised" in notes


def four_key_heads():
    return sharpened(Llama(replace(SMALL, num_kv_heads=4)))


@pytest.mark.parametrize(
    ("grid", "layout", "method"),
    today(
        [
            (Grid(tp=2, cp=2), "contiguous", "ring"),
            (Grid(tp=2, cp=2), "zigzag", "ulysses"),
            (Grid(cp=4), "zigzag", "all_gather"),
            (Grid(cp=4), "stripe", "ring"),
        ],
        4,
    ),
)
def test_every_layout_of_the_sequence_trains_like_one_process(grid, layout, method):
    options = {"cp_layout": [layout], "cp_method": [method]}
    report = verify(four_key_heads, layouts=[grid], dtype="float64", options=options)
    assert report.passed, str(report)


def ragged_batch(step):
    """Sequences of 13 positions, which no number of ranks divides."""
    return default_batch(step, length=13)


@pytest.mark.parametrize("grid", today([Grid(cp=2, pp=2), Grid(cp=4), Grid(tp=2, cp=2)], 3))
def test_sequences_that_do_not_divide_train_like_one_process(grid):
    report = verify(four_key_heads, ragged_batch, layouts=[grid], dtype="float64")
    assert report.passed, str(report)
