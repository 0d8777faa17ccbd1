"""What a plan says of layouts is within 3 % of what their ranks hold and send."""

from itertools import islice

import pytest
from planned import (
    Case,
    differences,
    drawn,
    drawn_sharded,
    gathering,
    higher,
    measured,
    peaks,
    sharded,
    unlike,
)

from scaletorch.dist.testing import preload, run_ranks
from scaletorch.parallel.pg_manager import Grid
from scaletorch.plan import Layout

HALVES = [  # of backwards, which leave shards
    Layout(Grid(pp=2, cp=2), zero=2, schedule="zb_v", chunks=2, micro_batches=2),
    Layout(Grid(pp=2, dp=2), zero=2, schedule="zb_h1", micro_batches=3),
    Layout(Grid(pp=2, dp=2), zero=2, schedule="dualpipe_v", chunks=2, micro_batches=5),
    Layout(Grid(pp=2, dp=2), zero=2, schedule="interleaved_1f1b", chunks=2, micro_batches=2),
]
SUMS = [  # of another dtype, which are held beside gradients; of tied weights or not
    (Layout(Grid(pp=2, dp=2), micro_batches=2), True),
    (Layout(Grid(pp=2, dp=2), zero=2, schedule="zb_h1", micro_batches=2), False),
    (Layout(Grid(tp=2, dp=2), zero=1), True),
    (Layout(Grid(pp=4), micro_batches=2), True),
    (Layout(Grid(pp=4), micro_batches=2), False),
]
HOLDING = {
    2: [*islice(drawn(0, 2), 3)],
    4: [
        *islice(drawn(0, 4), 5),
        *(Case("llama", 4, True, "float32", 16, layout) for layout in HALVES),
        *(Case("llama", 4, tied, "bfloat16", 16, layout, sum_item=4) for layout, tied in SUMS),
    ],
}
PIPELINES = [
    Layout(Grid(pp=4), recompute="full", schedule="zb_h1", micro_rows=4, micro_batches=8),
    Layout(Grid(pp=4), schedule="interleaved_1f1b", chunks=2, micro_rows=4, micro_batches=8),
    Layout(Grid(pp=4), schedule="zb_v", chunks=2, micro_rows=3, micro_batches=9),
    Layout(Grid(pp=2, dp=2), recompute="full", micro_rows=4, micro_batches=6),
    # No gradients until all micro-batches are alive; what is made again for a second half.
    Layout(Grid(pp=4), schedule="looped_bfs", chunks=2, micro_rows=3),
    Layout(Grid(tp=2, pp=2), recompute="full", schedule="zb_v", chunks=2, micro_rows=4,
           micro_batches=2, sequence_parallel=True),
    Layout(Grid(pp=2, cp=2), recompute="full", schedule="dualpipe_v", chunks=2, micro_rows=4,
           micro_batches=3),
    Layout(Grid(tp=2, pp=2, dp=1), recompute="full", schedule="zb_h1", micro_rows=4),
]  # fmt: skip
SHARED = [  # where the peak is that of activations, of buckets, or of shards
    Layout(Grid(dp=4), zero=1, micro_rows=2),
    Layout(Grid(dp=2, cp=2), zero=2, recompute="full", micro_rows=2, micro_batches=2),
    Layout(Grid(tp=2, dp=2), zero=2, micro_rows=3, micro_batches=3, sequence_parallel=True),
    Layout(Grid(pp=2, dp=2), zero=1, recompute="full", schedule="zb_v", chunks=2, micro_rows=2),
    Layout(Grid(pp=2, dp=2), zero=2, recompute="full", micro_rows=4, micro_batches=4,
           schedule="interleaved_1f1b", chunks=2),
    Layout(Grid(pp=2, cp=2), zero=2, schedule="zb_v", chunks=2, micro_rows=2, micro_batches=7),
]  # fmt: skip
PEAKS = {  # experts, with and without others to sum with; tied weights; a gradient within a block
    2: [
        Case("large mixture", 2, False, "float32", 64, Layout(Grid(dp=2), zero=1)),
        Case("large mixture", 2, True, "float32", 64,
             Layout(Grid(cp=2, ep=2), zero=2, recompute="full", micro_batches=2)),
        Case("large", 4, True, "float32", 64, Layout(Grid(dp=2), zero=1, recompute="full")),
    ],
    4: [
        *(Case("wide", 8, False, "float32", 64, layout) for layout in PIPELINES),
        *(Case("large", 8, False, "float32", 64, layout) for layout in SHARED),
        Case("wide", 4, False, "float32", 64, Layout(Grid(pp=4), schedule="afab", micro_batches=2)),
        Case("large", 4, True, "float32", 64,
             Layout(Grid(pp=2, dp=2), zero=1, schedule="zb_h1", micro_batches=3)),
        Case("large mixture", 4, True, "float32", 64,
             Layout(Grid(pp=2, cp=2, ep=2), zero=2, schedule="zb_v", chunks=2, micro_batches=3)),
    ],
}  # fmt: skip
GATHERING = [
    Case("wide", 3, tied, "float32", 64,
         Layout(Grid(dp=2), zero=3, recompute=recompute, micro_rows=rows, micro_batches=batches))
    for tied, recompute, rows, batches in ((True, "none", 1, 2), (False, "full", 4, 2))
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _imported():
    preload("planned")  # by all ranks at once


@pytest.mark.parametrize("ranks", HOLDING)
def test_ranks_hold_and_send_what_is_planned(ranks):
    found = run_ranks(measured, ranks, HOLDING[ranks], timeout=300)
    for case, *own in zip(HOLDING[ranks], *found, strict=True):
        assert not list(differences(case, own))


@pytest.mark.filterwarnings("ignore:Memory block of unknown size")
@pytest.mark.parametrize("ranks", PEAKS)
def test_ranks_keep_what_is_planned_and_hold_no_more(ranks):
    found = run_ranks(peaks, ranks, PEAKS[ranks], timeout=300)
    for case, *own in zip(PEAKS[ranks], *found, strict=True):
        assert not list(higher(case, own))


@pytest.mark.filterwarnings("ignore:Memory block of unknown size")
def test_fully_sharded_ranks_have_blocks_whole_as_planned():
    found = run_ranks(gathering, 2, GATHERING, timeout=200)
    for case, *own in zip(GATHERING, *found, strict=True):
        assert not list(higher(case, own))


def test_fully_sharded_ranks_hold_and_gather_what_is_planned():
    cases = list(islice(drawn_sharded(0, 4), 4))
    assert any(case.dtype == "bfloat16" for case in cases)
    for case, *own in zip(cases, *run_ranks(sharded, 4, cases, timeout=200), strict=True):
        assert not list(unlike(case, own))
