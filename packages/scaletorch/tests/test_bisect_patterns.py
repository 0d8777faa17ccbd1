"""The first sentence about a tensor names the way it was made wrong, whatever the layout."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scaletorch.bisect.comparison.patterns import explain
from scaletorch.bisect.comparison.places import Piece

AXES = ("rows", "positions", "columns")
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
GROUPS = {"tp": [(0, 1), (2, 3)], "dp": [(0, 2), (1, 3)]}


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pieces(whole, dim, ranks, change):
    """What `change(rank, right, index)` makes of each rank's share of a dim; None is all of it."""
    everything = [torch.arange(size) for size in whole.shape]
    found = []
    for rank in range(ranks):
        index = [*everything]
        if dim is not None:
            index[dim] = everything[dim].chunk(ranks)[rank]
        right = whole[torch.meshgrid(*index, indexing="ij")].clone()
        found.append(Piece(rank, 0, change(rank, right, index), tuple(index)))
    return found


def of_rank(rank, change):
    return lambda r, tensor, index: change(tensor) if r == rank else tensor


def filled(tensor, value, *where):
    tensor[where] = value
    return tensor


WHOLE = normal(4, 16, 12)
SPLIT = normal(3, 4, 16, 12, seed=1)
SPLIT = torch.cat((SPLIT, WHOLE[None] - SPLIT.sum(0)))  # four that add up

# The cut dim (None for none), what each of four ranks has, and what is said.
TP = "ranks 0 and 1; ranks 2 and 3 (tp) have"
SENTENCES = {
    "zeros on all ranks": (1, lambda r, x, i: 0 * x, "every rank has all zeros"),
    "zeros here and there": (1, of_rank(2, lambda x: filled(x, 0, [0, 3], [1, 2], [3, 9])),
     "rank 2 has all zeros at columns 3 and 9 of positions 9 and 10 of rows 0 and 3"),
    "not a number": (1, of_rank(2, lambda x: filled(x, math.nan, 0, 1)),
     "rank 2 has NaN or infinity at position 9 of row 0, unlike the reference"),
    "a half": (None, lambda r, x, i: x / 2, "every rank has 1/2 of the right values"),
    "negative": (None, of_rank(3, lambda x: -x),
     "rank 3 has the right values with the sign flipped"),
    "some ranks": (None, lambda r, x, i: 3 * x if r % 2 else x,
     "ranks 1 and 3 have 3 times the right values"),
    "no sum over one axis": (None, lambda r, x, i: SPLIT[0] if r % 2 else x - SPLIT[0],
     f"{TP} partial sums: a sum over tp is missing"),
    "no sum over two axes": (None, lambda r, x, i: SPLIT[r],
     "ranks 0-3 (all ranks) have partial sums: a sum over all ranks is missing"),
    "no sum of a sharded embedding": (None,
     lambda r, x, i: x * (torch.arange(16) % 2 == r % 2)[:, None],
     f"{TP} partial sums: a sum over tp is missing"),
    "no mean": (None, lambda r, x, i: x + (1 if r % 2 else -1) * SPLIT[0],
     f"{TP} terms of a mean: a mean over tp is missing"),
    "the shard of another rank": (1, of_rank(1, lambda x: WHOLE[:, :4]),
     "rank 1 has positions from elsewhere: at 4-7 is what 0-3 should have"),
    "shifted": (None, lambda r, x, i: x.roll(3, 1), "every rank has positions in another order: "
     "at 0-2 is what 13-15 should have, at 3-15 what 0-12 should have"),
    "reversed": (None, lambda r, x, i: x.flip(1),
     "every rank has positions in another order: at 0 is what 15 should have, "
     "at 1 what 14 should have, at 2 what 13 should have ..."),
    "one slice for all": (1, of_rank(1, lambda x: x[:, :1].expand_as(x)),
     "rank 1 has positions from elsewhere: "
     "at 5 is what 4 should have, at 6 what 4 should have, at 7 what 4 should have"),
    "few elements": (1,
     of_rank(3, lambda x: filled(x, torch.tensor([7.0, 8.0]).double(), [0, 3], [1, 2], [3, 9])),
     "rank 3 has values that differ at columns 3 and 9 of positions 13 and 14 of rows 0 and 3, "),
    "noise": (1, of_rank(1, lambda x: x + 0.1 * normal(*x.shape, seed=5)),
     "rank 1 has values that differ at positions 4-7, by 0."),
}  # fmt: skip


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", SENTENCES)
def test_one_fault_is_one_sentence(name, dtype):
    """Also if all elements have rounding errors, of half the bound."""
    dim, change, sentence = SENTENCES[name]

    def rounded(rank, right, index):
        wrong = change(rank, right, index)
        errors = BOUNDS[dtype] / 2 * normal(*wrong.shape, seed=rank + 9)
        return (wrong * (1 + errors)).to(dtype)

    held = pieces(WHOLE, dim, 4, rounded)
    (said,) = explain(held, WHOLE, BOUNDS[dtype], axes=AXES, groups=GROUPS)
    assert said == sentence or ("values that differ" in sentence and said.startswith(sentence))


def test_two_faults_are_two_sentences_and_nan_comes_first():
    def change(rank, x, index):
        return (2 * x, 2 * x, filled(x.clone(), math.nan, 0), 0 * x)[rank]

    assert explain(pieces(WHOLE, 1, 4, change), WHOLE, 1e-9, axes=AXES) == [
        "rank 2 has NaN or infinity at positions 8-11 of row 0, unlike the reference",
        "ranks 0 and 1 have 2 times the right values",
        "rank 3 has all zeros at positions 12-15",
    ]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda r, m, x: 0 * x if m else x, "every rank (micro-batch 1) has all zeros"),
        (lambda r, m, x: x if (r, m) != (1, 0) else 0 * x,
         "rank 1 (micro-batch 0) has all zeros at rows 0 and 1"),
        (lambda r, m, x: WHOLE[:2], "every rank (micro-batch 1) has rows from elsewhere: "
         "at 2 and 3 is what 0 and 1 should have"),
    ],
)  # fmt: skip
def test_micro_batches_are_named(change, sentence):
    held = []
    for rank, number in itertools.product(range(2), range(2)):
        own = pieces(WHOLE, 0, 2, lambda r, x, i: x)[number]
        tensor = change(rank, number, own.tensor)
        held.append(replace(own, rank=rank, micro_batch=number, tensor=tensor))
    assert explain(held, WHOLE, 1e-9, axes=AXES, groups={"tp": [(0, 1)]}) == [sentence]


def test_a_sum_over_micro_batches_is_missed():
    (own,) = pieces(WHOLE, None, 1, lambda r, x, i: x)
    held = [
        replace(own, rank=rank, micro_batch=number, tensor=SPLIT[2 * number :][:2].sum(0))
        for rank, number in itertools.product(range(2), range(2))
    ]
    assert explain(held, WHOLE, 1e-9, groups={"tp": [(0, 1)]}) == [
        "ranks 0 and 1 (micro-batches) have partial sums: a sum over micro-batches is missing"
    ]


def test_shards_within_the_bound_are_explained_if_no_other_is_beyond():
    errors = normal(*WHOLE.shape, seed=5)
    held = pieces(WHOLE, None, 1, lambda r, x, i: x + 0.8e-3 * errors * x.norm() / errors.norm())
    assert explain(held, WHOLE, 1e-3)[0].startswith("rank 0 has values that differ, by 0.0008")


def test_replicas_that_are_right_are_not_explained():
    right = pieces(WHOLE, None, 3, lambda r, x, i: x)
    assert explain(right, WHOLE, 1e-9) == []


def test_zeros_that_are_right_are_no_pattern():
    first, second = (normal(16, 12, seed=seed) > 0 for seed in (7, 8))
    whole = WHOLE[0] * first

    def said(tensor):
        return explain(pieces(whole, None, 1, lambda r, x, i: tensor), whole, 1e-9)[0]

    assert said(WHOLE[0] * second).startswith("rank 0 has values that differ")
    assert said(WHOLE[0]).startswith("rank 0 has values that differ")
    assert said(torch.where(first, math.inf, 0.0).double()).startswith("rank 0 has NaN or infinity")


shapes = st.lists(st.integers(0, 3), max_size=3)
values = st.floats(width=64) | st.sampled_from([0.0, 1.0, -1.0, math.nan, math.inf, 1e300, 1e-320])


@st.composite
def anything(draw):
    def tensor(shape):
        count = math.prod(shape)
        numbers = torch.tensor(draw(st.lists(values, min_size=count, max_size=count)))
        dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int64]))
        if not dtype.is_floating_point:
            numbers = numbers.nan_to_num(0, 9, 9).clamp(-9, 9)
        return numbers.to(dtype).view(shape)

    whole = tensor(draw(shapes))
    held = []
    for rank in range(draw(st.integers(0, 3))):
        indices = [
            draw(st.lists(st.integers(0, size - 1), max_size=3)) if size else []
            for size in whole.shape
        ]
        index = tuple(torch.tensor(each, dtype=torch.int64) for each in indices)
        shape = [len(each) for each in indices]
        held.append(Piece(rank, draw(st.integers(0, 1)), tensor(shape), index))
    return held, whole


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    anything(),
    values,
    values | st.none(),
    st.sampled_from([{}, {"tp": [(0, 1)], "cp": [(2,), ()]}, {"tp": []}]),
)
def test_nothing_raises(drawn, bound, scale, groups):
    held, whole = drawn
    said = explain(held, whole, bound, axes=("rows",), groups=groups, scale=scale)
    assert len(said) <= 3
    assert all(re.match(r"(rank|every rank)", each) for each in said)
