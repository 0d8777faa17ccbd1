"""What a plan says of layouts is within 3 % of what their ranks hold."""

import pytest
from planned import Case, differences, gathering, higher, peaks
from sweeps import today

from scaletorch.dist.testing import preload, run_ranks
from scaletorch.parallel.pg_manager import Grid
from scaletorch.plan import Layout

# Parameters and states of few bytes: other dtypes, experts, uneven and tied stages.
HOLDING = [
    Case("small mixture", 5, False, "float32", 16,
         Layout(Grid(dp=4, ep=2), zero=2, micro_rows=2, micro_batches=3), sum_item=8),
    Case("small", 5, True, "bfloat16", 16,
         Layout(Grid(pp=2, dp=2), zero=2, schedule="dualpipe_v", chunks=2, micro_batches=5),
         sum_item=4),
]  # fmt: skip
PEAKS = [  # pipelines; activations, buckets or shards at the peak; experts; tied weights
    Case("large mixture", 2, True, "float32", 64,
         Layout(Grid(cp=2, dp=2, ep=2), zero=2, recompute="full", micro_batches=2)),
    Case("wide", 8, False, "float32", 64,
         Layout(Grid(tp=2, pp=2), True, "full", schedule="zb_v", chunks=2, micro_rows=4,
                micro_batches=2)),
    Case("large", 4, True, "float32", 64, Layout(Grid(dp=4), zero=1, recompute="full")),
    Case("large", 8, False, "float32", 64,
         Layout(Grid(tp=2, dp=2), True, zero=2, micro_rows=3, micro_batches=3)),
    Case("large", 8, False, "float32", 64,
         Layout(Grid(pp=2, dp=2), zero=2, recompute="full", micro_rows=4, micro_batches=4,
                schedule="interleaved_1f1b", chunks=2)),
    Case("large", 8, False, "float32", 64,
         Layout(Grid(pp=2, dp=2), zero=2, recompute="full", micro_rows=2, micro_batches=4,
                schedule="zb_v", chunks=2)),
    Case("large mixture", 8, False, "float32", 64,
         Layout(Grid(pp=2, dp=2), zero=2, recompute="full", micro_rows=4, micro_batches=2,
                schedule="zb_h1")),
    Case("large", 8, True, "float32", 64,
         Layout(Grid(pp=2, dp=2), zero=2, recompute="selective", micro_rows=3,
                schedule="dualpipe_v", chunks=2)),
]  # fmt: skip
GATHERING = [
    Case("wide", 3, False, "float32", 64,
         Layout(Grid(dp=2), zero=3, recompute="full", micro_rows=4, micro_batches=2)),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _imported():
    preload("planned")  # by all ranks at once


@pytest.mark.filterwarnings("ignore:Memory block of unknown size")
def test_ranks_hold_what_is_planned():
    cases = [*today(PEAKS, 4), *today(HOLDING, 2)]
    for case, *own in zip(cases, *run_ranks(peaks, 4, cases, timeout=250), strict=True):
        assert not list(differences(case, own))
        if case not in HOLDING:
            assert not list(higher(case, own))


@pytest.mark.filterwarnings("ignore:Memory block of unknown size")
def test_fully_sharded_ranks_hold_what_is_planned():
    for case, *own in zip(GATHERING, *run_ranks(gathering, 2, GATHERING, timeout=200), strict=True):
        assert not [*differences(case, own), *higher(case, own)]
