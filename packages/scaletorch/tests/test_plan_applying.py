"""What is planned is what runs: the best layout of a plan puts a model there."""

from dataclasses import replace

import pytest
import torch
from planned.drawing import Case
from planned.models import described, model_of
from planned.ranks import on_grid, prepared, step
from sweeps import today

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import preload, run_ranks
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import Grid
from scaletorch.plan import Cluster, Device, Layout, Link, Options, plan

DEVICES = Cluster(4, Device("d", 2**30, {"float64": 1e9}, 1e9), (Link(4, 1e-6, 1e9),))
LAYOUTS = [
    Layout(Grid(tp=2, dp=2), sequence_parallel=True, recompute="full"),
    Layout(Grid(pp=2, cp=2), schedule="interleaved_1f1b", chunks=2, recompute="selective"),
    Layout(Grid(tp=2, pp=2), schedule="zb_v", chunks=2),
]


@pytest.fixture(scope="module", autouse=True)
def _imported():
    preload("planned")  # by all ranks at once


def planned(layout):
    """Return a case with the best layout of those that are like one, and its estimate."""
    case = Case("llama", 4, False, "float64", 16, layout)
    options = Options(
        sequence_parallel=(layout.sequence_parallel,), recompute=(layout.recompute,),
        schedules=((layout.schedule, layout.chunks),), micro_rows=(1,),
        sizes={axis: (getattr(layout.grid, axis),) for axis in ("tp", "cp", "pp", "dp")},
    )  # fmt: skip
    found = plan(described(case), 8, DEVICES, options=options).best()
    return replace(case, layout=found.layout), found


def parameters(case, model, optimizer, manager):
    """Return what a step makes of them."""
    step(case, model, optimizer, manager)
    return [own.detach().clone() for own in model.parameters()]


def trained(cases):
    """Return for each what a step makes of its model, put there by the plan and by hand."""
    return [on_grid(case, lambda *on, best=best: both(*on, best)) for case, best in cases]


def both(case, manager, best):
    torch.manual_seed(0)
    model = best.parallelize(model_of(case), manager, rehearse=False)
    optimizer = torch.optim.AdamW(model.parameters())
    if best.layout.zero:
        shard_optimizer(optimizer, model, stage=best.layout.zero)
    return parameters(case, model, optimizer, manager), parameters(
        case, *prepared(case, manager), manager
    )


def test_a_plans_best_puts_a_model_on_its_layout():
    layouts = today(LAYOUTS, 3)
    cases = [planned(layout) for layout in layouts]
    found = run_ranks(trained, 4, cases)
    for layout, (_, best), *ranks in zip(layouts, cases, *found, strict=True):
        zero = int(layout.grid.cp * layout.grid.dp > 1)
        batches = 8 // layout.grid.dp
        assert best.layout == replace(layout, zero=zero, micro_batches=batches)
        for own, by_hand in ranks:
            assert len(own) == len(by_hand) > 0
            assert all(map(torch.equal, own, by_hand))


def elsewhere(best, other):
    with pytest.raises(InvalidArgumentError, match=r"the plan is for TP\(2\).*the manager has"):
        on_grid(
            other, lambda case, manager: best.parallelize(model_of(case), manager, rehearse=False)
        )


def test_a_manager_of_another_grid_is_refused_on_every_rank():
    case, best = planned(LAYOUTS[0])
    run_ranks(elsewhere, 4, best, replace(case, layout=Layout(Grid(pp=2, dp=2))))
