"""Layouts hold every position once, in equal shares, and say how to join them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.parallel.context_parallel.layouts import (
    LAYOUTS,
    contiguous,
    merge_ranks,
    stripe,
    zigzag,
)

layouts = st.builds(
    lambda name, length, size: LAYOUTS[name](length, size),
    st.sampled_from(sorted(LAYOUTS)),
    st.integers(1, 60),
    st.integers(1, 6),
)


def test_shares_of_eight_positions():
    assert contiguous(8, 2).ranks == ((range(0, 4),), (range(4, 8),))
    assert zigzag(8, 2).ranks == ((range(0, 2), range(6, 8)), (range(2, 4), range(4, 6)))
    assert stripe(8, 2).ranks == ((range(0, 8, 2),), (range(1, 8, 2),))
    assert zigzag(8, 2).positions(0).tolist() == [0, 1, 6, 7]
    assert zigzag(8, 2).order().tolist() == [0, 1, 4, 5, 6, 7, 2, 3]


@pytest.mark.parametrize(
    ("name", "padded", "padding"),
    [("contiguous", 9, [0, 0, 2]), ("zigzag", 12, [2, 2, 1]), ("stripe", 9, [0, 1, 1])],
)
def test_a_length_that_does_not_divide_is_padded_at_the_end(name, padded, padding):
    layout = LAYOUTS[name](7, 3)
    assert layout.padded_length == padded
    assert [int((layout.positions(rank) >= 7).sum()) for rank in range(3)] == padding


@settings(deadline=None)
@given(layouts)
def test_ranks_hold_every_position_once_in_equal_shares(layout):
    shares = [layout.positions(rank) for rank in range(layout.size)]
    assert {share.dtype for share in shares} == {torch.int64}
    assert {len(share) for share in shares} == {layout.local_length}
    assert torch.cat(shares).sort().values.equal(torch.arange(layout.padded_length))
    chunks = 2 * layout.size if layout.name == "zigzag" and layout.size > 1 else layout.size
    assert layout.length <= layout.padded_length < layout.length + chunks
    assert layout.padded_length % chunks == 0
    assert len({run.step for share in layout.ranks for run in share}) == 1


@settings(deadline=None)
@given(layouts)
def test_order_joins_shares_to_the_whole_without_padding(layout):
    whole = torch.randn(layout.length)
    padded = torch.cat((whole, whole.new_full((layout.padded_length - layout.length,), torch.nan)))
    shares = [padded[layout.positions(rank)] for rank in range(layout.size)]
    assert layout.order().dtype == torch.int64
    assert torch.cat(shares)[layout.order()].equal(whole)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize(("length", "size"), [(0, 2), (4, 0), (-3, 2)])
def test_no_layout_without_positions_or_ranks(name, length, size):
    with pytest.raises(InvalidArgumentError, match=f"at least 1; it got length {length} and"):
        LAYOUTS[name](length, size)


@pytest.mark.parametrize("rank", [-1, 2])
def test_no_such_rank(rank):
    with pytest.raises(
        InvalidArgumentError, match=f"a zigzag layout of 2 ranks has no rank {rank}"
    ):
        zigzag(8, 2).positions(rank)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_joined_shares_are_those_of_fewer_ranks(kind):
    layout = merge_ranks(LAYOUTS[kind](48, 8), 8)
    assert layout.positions(0).tolist() == list(range(48))
    pairs = merge_ranks(LAYOUTS[kind](48, 8), 2)
    for rank in range(4):
        own = [LAYOUTS[kind](48, 8).positions(r) for r in (2 * rank, 2 * rank + 1)]
        assert sorted(pairs.positions(rank).tolist()) == sorted(torch.cat(own).tolist())
