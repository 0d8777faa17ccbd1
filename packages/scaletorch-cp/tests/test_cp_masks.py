"""Blocks hold each pair that a mask lets see each other once, and little more is computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.parallel.context_parallel.layouts.layout import LAYOUTS, contiguous, stripe, zigzag
from scaletorch.parallel.context_parallel.masks import blocks as cutting
from scaletorch.parallel.context_parallel.masks import mask as mask_module
from scaletorch.parallel.context_parallel.masks.mask import CAUSAL, FULL, Mask, blocks, seen, work


def _dense(mask, length):
    """Return what the whole sequence's rows see, [length, length], by the words of the mask."""
    i, j = torch.arange(length)[:, None], torch.arange(length)
    allowed = (j <= i) if mask.causal else torch.ones(length, length, dtype=torch.bool)
    if mask.window is not None:
        allowed &= (i - j).abs() < mask.window
    if mask.documents is not None:
        starts = torch.tensor(mask.documents[1:])
        of = torch.searchsorted(starts, torch.arange(length), right=True)
        allowed &= of[:, None] == of
    return allowed


def _counts(found, rows, keys):
    """Return in how many blocks each local pair is seen, [rows, keys]."""
    counts = torch.zeros(rows, keys, dtype=torch.int64)
    for block in found:
        part = counts[block.rows, block.keys]
        gap = torch.arange(part.shape[1]) - torch.arange(part.shape[0])[:, None]
        lower, upper = (-gap.numel() if block.band[0] is None else block.band[0]), block.band[1]
        allowed = (gap >= lower) & (gap <= (gap.numel() if upper is None else upper))
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
    return mask, layout, draw(st.sampled_from([1, 2, 5, 256]))


@settings(max_examples=600, deadline=None)
@given(case=_cases())
def test_blocks_of_all_ranks_are_the_mask_of_the_whole(case):
    mask, layout, tile = case
    whole = torch.zeros(layout.padded_length, layout.padded_length, dtype=torch.int64)
    expected = torch.zeros_like(whole)
    expected[: layout.length, : layout.length] = _dense(mask, layout.length)
    local = layout.local_length
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "TILE", tile)
        for mine in range(layout.size):
            for other in range(layout.size):
                found = blocks(mask, layout.ranks[mine], layout.ranks[other], layout.length)
                rows, keys = layout.positions(mine), layout.positions(other)
                whole[rows[:, None], keys] += _counts(found, local, local)
                assert work(found) >= cutting.pairs(found)
    assert whole.equal(expected)
    shares = [expected[layout.positions(rank)].sum().item() for rank in range(layout.size)]
    assert seen(mask, layout) == tuple(shares)


@settings(max_examples=200, deadline=None)
@given(case=_cases())
def test_blocks_take_any_shares_such_as_all_ranks_keys_joined(case):
    mask, layout, _ = case
    keys = [run for share in layout.ranks for run in share]
    joined = torch.cat([layout.positions(rank) for rank in range(layout.size)])
    expected = torch.zeros(layout.padded_length, layout.padded_length, dtype=torch.int64)
    expected[: layout.length, : layout.length] = _dense(mask, layout.length)
    for rank, rows in enumerate(layout.ranks):
        counts = _counts(
            blocks(mask, rows, keys, layout.length), layout.local_length, layout.padded_length
        )
        assert counts.equal(expected[layout.positions(rank)][:, joined])


def _between(mask, layout, mine, other):
    return blocks(mask, layout.ranks[mine], layout.ranks[other], layout.length)


def test_causal_zigzag_is_squares_and_full_blocks():
    layout, mask = zigzag(32, 4), Mask(causal=True)
    low, high, both = slice(0, 4), slice(4, 8), slice(0, 8)
    assert _between(mask, layout, 0, 0) == [
        (low, low, CAUSAL),
        (high, low, FULL),
        (high, high, CAUSAL),
    ]
    assert _between(mask, layout, 2, 1) == [(low, low, FULL), (high, low, FULL)]
    assert _between(mask, layout, 1, 2) == [(high, low, FULL), (high, high, FULL)]
    assert _between(mask, layout, 3, 3) == [(both, both, CAUSAL)], "chunks that adjoin are one run"


def test_causal_stripes_are_one_square_each():
    layout, mask = stripe(32, 4), Mask(causal=True)
    assert _between(mask, layout, 2, 1) == [(slice(0, 8), slice(0, 8), CAUSAL)]
    assert _between(mask, layout, 1, 2) == [(slice(1, 8), slice(0, 7), CAUSAL)]


def test_a_band_with_an_offset_is_left_square_and_below():
    assert blocks(Mask(causal=True), [range(4, 12)], [range(0, 8)], 12) == [
        (slice(0, 4), slice(0, 4), FULL),
        (slice(0, 4), slice(4, 8), CAUSAL),
        (slice(4, 8), slice(0, 8), FULL),
    ]


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize("documents", [None, tuple(range(0, 4097, 64))])
def test_without_a_window_no_pair_is_computed_unseen(name, documents):
    layout, mask = LAYOUTS[name](4096, 4), Mask(causal=True, documents=documents)
    for mine in range(4):
        for other in range(4):
            found = _between(mask, layout, mine, other)
            assert {block.band for block in found} <= {FULL, CAUSAL}
            assert work(found) == cutting.pairs(found)


@pytest.mark.parametrize("window", [1, 100, 256, 700, 2048, 5000])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
def test_beyond_a_window_a_tile_is_computed_at_most(name, causal, window):
    layout, mask = LAYOUTS[name](16384, 4), Mask(causal, window)
    found = [
        b for mine in range(4) for other in range(4) for b in _between(mask, layout, mine, other)
    ]
    assert work(found) - sum(seen(mask, layout)) <= 16384 * cutting.TILE
    assert len(found) <= 8 * 16384 // cutting.TILE
    slow = [block for block in found if block.band not in (FULL, CAUSAL)]
    assert work(slow) <= 2 * 16384 * cutting.TILE, "a wide window is mostly FULL and CAUSAL"


def test_zigzag_balances_causal_attention_and_contiguous_does_not():
    mask, pairs = Mask(causal=True), 96 * 97 // 2
    for size in (1, 2, 3, 4, 6, 8):
        assert seen(mask, zigzag(96, size)) == (pairs // size,) * size
    assert seen(mask, contiguous(96, 2)) == (48 * 49 // 2, pairs - 48 * 49 // 2)
    assert seen(mask, stripe(96, 2)) == (pairs // 2 - 24, pairs // 2 + 24)
    assert len(set(seen(Mask(causal=False), contiguous(96, 4)))) == 1


def test_thousands_of_documents_are_looked_at_once(monkeypatch):
    looked, within = [], mask_module._Run.within
    monkeypatch.setattr(mask_module._Run, "within", lambda *run: looked.append(run) or within(*run))
    layout = zigzag(80_000, 4)
    mask = Mask(causal=True, documents=tuple(range(0, 80_001, 8)))
    assert _between(mask, layout, 0, 1) == looked == []
    assert len(_between(mask, layout, 0, 0)) == 10_000 // 4
    assert len(looked) == 2 * 10_000 // 4, "each document once in the rows and once in the keys"


@pytest.mark.parametrize("window", [0, -1])
def test_no_window_below_one(window):
    with pytest.raises(InvalidArgumentError, match=f"at least 1.*no window; it is {window}"):
        Mask(causal=True, window=window)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ((), r"\(0, a, ..., length\); they begin \(\)"),
        ((0,), r"they begin \(0,\)"),
        ((2, 5, 8), r"they begin \(2, 5, 8\)"),
        ((0, 5, 3, 8), "must ascend; entry 2, 3, follows 5"),
    ],
)
def test_documents_ascend_from_zero(documents, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Mask(causal=True, documents=documents)


def test_documents_end_at_the_length():
    with pytest.raises(InvalidArgumentError, match="the sequence's length, 8; they end at 7"):
        blocks(Mask(causal=True, documents=(0, 3, 7)), [range(8)], [range(8)], 8)


@pytest.mark.parametrize("keys", [range(0, 8, 2), range(7, -1, -1)])
def test_rows_and_keys_have_one_step(keys):
    with pytest.raises(
        InvalidArgumentError, match=r"runs of one step.*their steps are \[-?\d, \d\]"
    ):
        blocks(Mask(causal=True), [range(4)], [keys], 8)
