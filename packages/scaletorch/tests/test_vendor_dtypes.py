"""Every axis on stand-ins for vendors' devices, whose backends refuse dtypes by the table."""

import pytest
import torch
from small_models import small_mixture, small_model
from sweeps import today

import scaletorch.dist as dist
from scaletorch.checkpoint import load, save
from scaletorch.compose import (
    clip_grad_norm_,
    eval_step,
    global_grad_norm,
    parallelize,
    shard_global_batch,
    train_step,
)
from scaletorch.dist import devices
from scaletorch.dist.ranks.locate import locate
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.verify import default_batch, parse_layout
from scaletorch.verify.cases import enumerate_cases
from scaletorch.verify.device import moved
from scaletorch.verify.problem import Subject
from scaletorch.verify.runner import run_case
from scaletorch.verify.verify import save_reference

VENDORS = [("npu", "hccl"), ("mlu", "cncl"), ("musa", "mccl")]
# One of each axis and of what shards it otherwise, then two together.
PAIRS = [
    ("dp2", {}), ("dp2", {"data_parallel": ["zero1"]}), ("pp2", {}), ("cp2", {}),
    ("tp2", {"sequence_parallel": ["on"]}), ("dp2-ep2", {}),
]  # fmt: skip
FOURS = [
    ("dp2-tp2", {"sequence_parallel": ["on"]}), ("pp2-cp2", {}), ("dp2-pp2", {}), ("cp2-tp2", {}),
    ("dp2-cp2", {"data_parallel": ["zero2"]}), ("dp2-tp2-ep2", {}), ("pp2-tp2", {}),
    ("dp4-ep4", {}),
]  # fmt: skip

pytestmark = pytest.mark.timeout(900)  # the first test may build the stand-in


def model_of(layout):
    return small_mixture if "ep" in layout else small_model


def prove(device, cases):
    """Failures of the proof of each case."""
    for case, reference, model in cases:
        subject = Subject(locate(model), device=device)
        torch.manual_seed(0)  # as the reference was
        yield f"{case}", run_case(case, subject, reference).failures


def train_and_save(device, layout, folder):
    """A step, its norms, an evaluation and a checkpoint there and back."""
    grid = parse_layout(layout)
    manager = setup_process_group_manager(grid.tp, grid.cp, grid.pp, grid.dp, grid.ep, grid.etp)
    try:
        torch.manual_seed(0)
        model = parallelize(model_of(layout)().to(devices.current_device()), manager)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        batch = moved(default_batch(0), devices.current_device())
        micro_batches = shard_global_batch(batch, 2, model=model)
        train_step(model, micro_batches)
        largest = global_grad_norm(model, manager, norm_type=float("inf"))
        norm = clip_grad_norm_(model, 1.0, manager)
        assert 0 < largest < norm
        optimizer.step()
        loss = eval_step(model, micro_batches)
        save(folder / layout, model, optimizer, step=1)
        assert load(folder / layout, model, optimizer).step == 1
        assert eval_step(model, micro_batches) == loss
    finally:
        destroy_process_group_manager()


def work(device, backend, cases, layouts, folder):
    assert dist.get_backend() == backend
    for layout in layouts:
        train_and_save(device, layout, folder)
    return dict(prove(device, cases))


def cases_of(axes, folder):
    """The cases of some axes, with their references of one process."""
    files = {
        model: save_reference(
            folder / model.__name__, Subject(locate(model)), default_batch, "float64"
        )
        for model in {model_of(layout) for layout, _ in axes}
    }
    for layout, options in axes:
        model = model_of(layout)
        for case in enumerate_cases([parse_layout(layout)], ["float64"], options):
            yield case, files[model], model


def run_axes(ranks, axes, vendor, folder):
    cases = list(cases_of(axes, folder))
    layouts = list(dict.fromkeys(layout for layout, _ in axes))
    given = (*vendor, cases, layouts, folder)
    answers = run_ranks(work, ranks, *given, backend=vendor[1], timeout=600)
    for found in answers:
        assert list(found.values()) == [[]] * len(axes), found


@pytest.mark.parametrize("vendor", today(VENDORS, 3), ids=lambda vendor: vendor[1])
def test_every_axis_and_two_together_train_like_one_process(plugins, monkeypatch, tmp_path, vendor):
    monkeypatch.syspath_prepend(plugins)
    run_axes(2, today(PAIRS, 2), vendor, tmp_path)
    run_axes(4, today(FOURS, 8), vendor, tmp_path)
