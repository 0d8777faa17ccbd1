"""Layouts hold every position once; blocks hold each pair of positions that a mask shows once."""

from __future__ import annotations

import pytest
import torch
from dense_attention import visible, within
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.parallel.context_parallel.layouts import (
    LAYOUTS,
    contiguous,
    stripe,
    zigzag,
)
from scaletorch.parallel.context_parallel.masks import CAUSAL, FULL, Mask, blocks

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


def _dense(mask, length):
    return visible(length, mask.causal, mask.window, mask.documents)


def _counts(found, rows, keys):
    """Return in how many blocks each local pair is seen, [rows, keys]."""
    counts = torch.zeros(rows, keys, dtype=torch.int64)
    for block in found:
        part = counts[block.rows, block.keys]
        allowed = within(block.band, *part.shape)
        assert part.numel(), "an empty block"
        assert allowed.any(), "a block that nothing sees"
        assert allowed.all() == (block.band == FULL), "bounds that do not cut are None"
        assert block.band != CAUSAL or part.shape[0] == part.shape[1], "CAUSAL is for squares"
        part += allowed
    return counts


@st.composite
def _cases(draw):
    length = draw(st.integers(1, 40))
    ends = sorted(draw(st.lists(st.integers(0, length), max_size=6)))
    mask = Mask(
        causal=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, length + 2)),
        documents=draw(st.sampled_from([None, (0, *ends, length)])),
    )
    layout = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](length, draw(st.integers(1, 6)))
    return mask, layout


@settings(max_examples=120, deadline=None)
@given(case=_cases())
def test_blocks_of_all_ranks_are_the_mask_of_the_whole(case):
    mask, layout = case
    whole = torch.zeros(layout.padded_length, layout.padded_length, dtype=torch.int64)
    expected = torch.zeros_like(whole)
    expected[: layout.length, : layout.length] = _dense(mask, layout.length)
    local = layout.local_length
    for mine in range(layout.size):
        for other in range(layout.size):
            found = blocks(mask, layout.ranks[mine], layout.ranks[other], layout.length)
            rows, keys = layout.positions(mine), layout.positions(other)
            whole[rows[:, None], keys] += _counts(found, local, local)
    assert whole.equal(expected)


def _between(mask, layout, mine, other):
    return blocks(mask, layout.ranks[mine], layout.ranks[other], layout.length)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize("documents", [None, tuple(range(0, 4097, 64))])
def test_fused_kernels_take_what_no_window_cuts(name, documents):
    layout, mask = LAYOUTS[name](4096, 4), Mask(causal=True, documents=documents)
    for mine in range(4):
        for other in range(4):
            assert {each.band for each in _between(mask, layout, mine, other)} <= {FULL, CAUSAL}


@pytest.mark.parametrize(
    ("window", "documents", "message"),
    [
        (0, None, "at least 1.*no window; it is 0"),
        (-1, None, "at least 1.*no window; it is -1"),
        (None, (), r"\(0, a, ..., length\); they begin \(\)"),
        (None, (0,), r"they begin \(0,\)"),
        (None, (2, 5, 8), r"they begin \(2, 5, 8\)"),
        (None, (0, 5, 3, 8), "must ascend; entry 2, 3, follows 5"),
    ],
)
def test_masks_that_mean_nothing_are_refused(window, documents, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Mask(causal=True, window=window, documents=documents)


@pytest.mark.parametrize(
    ("keys", "steps"), [(range(0, 8, 2), r"\[1, 2\]"), (range(7, -1, -1), r"\[-1, 1\]")]
)
def test_shards_that_do_not_fit_are_refused(keys, steps):
    with pytest.raises(InvalidArgumentError, match=f"runs of one step.*their steps are {steps}"):
        blocks(Mask(causal=True), [range(4)], [keys], 8)
