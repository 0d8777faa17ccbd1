"""What a plan says of layouts is within 3 % of what their ranks hold and send."""

import pytest
from planned import (
    Case,
    differences,
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

HOLDING = [  # parameters, states and messages: each axis, option, dtype and schedule once
    Case("llama", 4, True, "float32", 16,
         Layout(Grid(tp=2, dp=2), True, "selective", 1, micro_rows=2, micro_batches=2)),
    Case("mixture", 5, False, "float32", 16,
         Layout(Grid(dp=4, ep=2), zero=2, micro_rows=2, micro_batches=3), sum_item=8),
    Case("mixture", 5, False, "float64", 16,
         Layout(Grid(tp=2, pp=2), schedule="interleaved_1f1b", chunks=2, micro_batches=3)),
    # Halves of backwards leave shards, of one chunk and of two, of a rank that has both ends.
    Case("llama", 4, True, "float32", 16,
         Layout(Grid(pp=2, cp=2), zero=2, schedule="zb_v", chunks=2, micro_batches=2)),
    Case("llama", 4, True, "float32", 16,
         Layout(Grid(pp=2, dp=2), zero=2, schedule="dualpipe_v", chunks=2, micro_batches=5)),
    # Sums of another dtype are held beside gradients; so are those of tied weights.
    Case("llama", 4, False, "bfloat16", 16,
         Layout(Grid(pp=2, dp=2), zero=2, schedule="zb_h1", micro_batches=2), sum_item=4),
    Case("llama", 4, True, "bfloat16", 16, Layout(Grid(pp=4), micro_batches=2), sum_item=4),
]  # fmt: skip
PEAKS = {  # pipelines; activations, buckets or shards at the peak; experts; tied weights
    2: [
        Case("large mixture", 2, True, "float32", 64,
             Layout(Grid(cp=2, ep=2), zero=2, recompute="full", micro_batches=2)),
        Case("large", 4, True, "float32", 64, Layout(Grid(dp=2), zero=1, recompute="full")),
    ],
    4: [
        # No gradients until all micro-batches are alive.
        Case("wide", 8, False, "float32", 64,
             Layout(Grid(pp=4), schedule="looped_bfs", chunks=2, micro_rows=3)),
        Case("wide", 8, False, "float32", 64,
             Layout(Grid(tp=2, pp=2), True, "full", schedule="zb_v", chunks=2, micro_rows=4,
                    micro_batches=2)),
        Case("large", 8, False, "float32", 64, Layout(Grid(dp=4), zero=1, micro_rows=2)),
        Case("large", 8, False, "float32", 64,
             Layout(Grid(tp=2, dp=2), True, zero=2, micro_rows=3, micro_batches=3)),
        Case("large", 8, False, "float32", 64,
             Layout(Grid(pp=2, dp=2), zero=2, recompute="full", micro_rows=4, micro_batches=4,
                    schedule="interleaved_1f1b", chunks=2)),
        Case("large", 4, True, "float32", 64,
             Layout(Grid(pp=2, dp=2), zero=1, schedule="zb_h1", micro_batches=3)),
        Case("large mixture", 4, True, "float32", 64,
             Layout(Grid(pp=2, cp=2, ep=2), zero=2, schedule="zb_v", chunks=2, micro_batches=3)),
    ],
}  # fmt: skip
GATHERING = [
    Case("wide", 3, False, "float32", 64,
         Layout(Grid(dp=2), zero=3, recompute="full", micro_rows=4, micro_batches=2)),
]  # fmt: skip
SHARDED = [
    Case("llama", 4, True, "float32", 16,
         Layout(Grid(tp=2, dp=2), zero=3, micro_rows=2, micro_batches=2)),
    Case("llama", 3, False, "bfloat16", 16, Layout(Grid(cp=2, dp=2), zero=3, micro_rows=2)),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _imported():
    preload("planned")  # by all ranks at once


def test_ranks_hold_and_send_what_is_planned():
    found = run_ranks(measured, 4, HOLDING, timeout=300)
    for case, *own in zip(HOLDING, *found, strict=True):
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
    for case, *own in zip(SHARDED, *run_ranks(sharded, 4, SHARDED, timeout=200), strict=True):
        assert not list(unlike(case, own))
