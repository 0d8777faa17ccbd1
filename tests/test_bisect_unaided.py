"""Programs that say nothing of their loss, rows or stages: it is found out, or refused."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from scaletorch.bisect import compare, record
from scaletorch.bisect.keys import LOSS
from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import preload, run_ranks

ROOT = Path(__file__).resolve().parent.parent
sys.path.extend({str(ROOT / "examples" / "bisect")}.difference(sys.path))
small = importlib.import_module("small")
VOCABULARY, batch, loss_sum = small.VOCABULARY, small.batch, small.loss_sum

preload("torch.distributed.pipelining", "torch.nn.parallel", "scaletorch.bisect")

SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
STAGED_FAULTS = {"mean": {"mean": True}, "accumulate": {"halves": 2, "scaled": True}}
ROWS = {  # name -> rows of each call on each rank
    "near": [[[0, 1]], [[2, 3]]],
    "far": [[[0, 2]], [[1, 3]]],
    "accumulated": [[[0], [1]], [[2], [3]]],
    "unequal": [[[0], [1, 2]], [[3]]],
    "all": [[[0, 1, 2, 3]]] * 2,
    "all-accumulated": [[[0, 1], [2, 3]]] * 2,
}
POSITIONS = {
    "near": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "far": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "zigzag": [[0, 1, 6, 7], [2, 3, 4, 5]],
}
FAULTS = {"unsummed": {"summed": False}, "mean": {"mean": True}, "dropped": {"dropped": True}}


class Pointwise(nn.Module):
    """Looks at no other position, so that a rank may have any of them."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY)

    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids)))


def build(kind=Pointwise):
    torch.manual_seed(0)
    return kind().double()


def step(folder, calls, positions=None, *, summed=True, mean=False, dropped=False, shares=False):
    """Train a step, gradients averaged over ranks, and say nothing of it."""
    model, (ids, labels) = build(), batch()
    positions = list(range(ids.shape[1])) if positions is None else positions
    ranks, count = dist.get_world_size() if dist.is_initialized() else 1, (labels != -100).sum()
    own = sum((labels[rows][:, positions] != -100).sum() for rows in calls)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(folder):
        for number, rows in enumerate(calls):
            logits = model(ids[rows][:, positions])
            loss = loss_sum(logits, labels[rows][:, positions])
            if not (dropped and number == 0 and (ranks == 1 or dist.get_rank() == 1)):
                (loss / own if mean else loss * (1 if shares else ranks) / count).backward()
        for parameter in model.parameters() if ranks > 1 and summed else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= 1 if shares else ranks
        optimizer.step()


def replicated(folder, calls):
    """Train the whole batch on every rank: nothing is summed, and each loss is the whole one."""
    model, (ids, labels) = build(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(folder):
        for rows in calls:
            (loss_sum(model(ids[rows]), labels[rows]) / (labels != -100).sum()).backward()
        optimizer.step()


def programs(folder):
    rank = dist.get_rank()
    for name, rows in ROWS.items():
        program = replicated if "all" in name else step
        program(folder / name, rows[rank])
    for fault, options in FAULTS.items():
        for name in ("near", "accumulated", "unequal"):
            step(folder / f"{name}-{fault}", ROWS[name][rank], **options)
    for name, positions in POSITIONS.items():
        step(folder / f"positions-{name}", [[0, 1, 2, 3]], positions[rank])
        step(folder / f"positions-{name}-unsummed", [[0, 1, 2, 3]], positions[rank], summed=False)
    step(folder / "shares", ROWS["unequal"][rank], shares=True)
    step(folder / "some", [[[0, 1]], [[3]]][rank])


def tied_decoder():
    model = small.build()
    model.head.weight = model.embed.weight
    return model


def pipelines(folder):
    """Train stages of all schedules: right, wrong, and with a tie whose gradients nobody sums."""
    program = importlib.import_module("with_pipelining")
    for schedule in SCHEDULES:
        program.step(f"{folder}/{schedule}", schedule)
        program.step(f"{folder}/{schedule}-halves", schedule, halves=2)
        for name, options in STAGED_FAULTS.items():
            program.step(f"{folder}/{schedule}-{name}", schedule, **options)
    program.build = tied_decoder
    for schedule in SCHEDULES:
        program.step(f"{folder}/{schedule}-tied", schedule)
    rank, ids = dist.get_rank(), torch.arange(8.0).view(4, 2)
    stage = PipelineStage(nn.Sequential(nn.Linear(2, 2)), rank, 2, torch.device("cpu"))
    scheduled = ScheduleGPipe(stage, 2, loss_fn=lambda out, _: out.sum())
    with record(folder / "renamed", scheduled):
        scheduled.step(*[ids] * (rank == 0), target=ids if rank else None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return where all programs left their recordings."""
    folder = tmp_path_factory.mktemp("runs")
    step(folder / "one", [[0, 1, 2, 3]])
    step(folder / "two", [[0, 1], [2, 3]])
    step(folder / "half", [[0, 1]])
    run_ranks(programs, 2, folder)
    return folder


def require_sound(report):
    assert report.sound, report
    assert not report.count("unseen") + report.count("bad"), report
    assert any(key.kind == LOSS for key in report.judged)


@pytest.mark.parametrize("one", ["one", "two"])
def test_rows_and_losses_are_found_out(one, runs):
    for name in (*ROWS, "shares"):
        require_sound(compare(runs / one, runs / name))


@pytest.mark.parametrize("one", ["one", "two"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found_where_nobody_says_anything(fault, one, runs):
    for name in ("near", "accumulated", "unequal"):
        (found,) = compare(runs / one, runs / f"{name}-{fault}").found
        summing = found.birth.direction == "synchronisation"
        assert found.birth.modules == ([] if fault == "unsummed" else ["loss"])
        assert summing == (fault == "unsummed"), f"{name}: {found}"


def test_positions_are_found_out(runs):
    for name in POSITIONS:
        require_sound(compare(runs / "one", runs / f"positions-{name}"))
        assert not compare(runs / "one", runs / f"positions-{name}-unsummed").sound


def test_other_global_batches_are_refused(runs):
    with pytest.raises(InvalidArgumentError, match=r"2 rows in .*half, 4 on 2 ranks.*WORLD_SIZE"):
        compare(runs / "half", runs / "near")


def test_rows_that_no_rank_has_are_told(runs):
    report = compare(runs / "one", runs / "some")
    assert "of the 4 rows of the batch no rank has [(2, 3)]" in str(report)
    assert report.found


def crossed(folder):
    """Train two pipelines, each on half of the rows, with and without summed norms."""
    program = importlib.import_module("with_pipelining")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pipe, half = mesh["pp"], mesh["dp"].get_local_rank()
    ids, labels = (each.chunk(2)[half] for each in batch())
    count = (batch()[1] != -100).sum()
    for name in ("crossed", "crossed-unsummed"):
        part = program.Stage(small.build(), pipe.get_local_rank(), 2)
        stage = PipelineStage(
            part, pipe.get_local_rank(), 2, torch.device("cpu"), group=pipe.get_group()
        )
        scheduled = ScheduleGPipe(stage, 2, lambda *a: loss_sum(*a) / count, scale_grads=False)
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
        with record(folder / name, stage):
            scheduled.step(*[ids] * stage.is_first, target=labels if stage.is_last else None)
            for parameter_name, parameter in part.named_parameters():
                if name == "crossed" or "norm" not in parameter_name:
                    dist.all_reduce(parameter.grad, group=mesh["dp"].get_group())
            optimizer.step()


def test_pipelines_beside_each_other(tmp_path):
    importlib.import_module("one_process").step(tmp_path / "one")
    run_ranks(crossed, 4, tmp_path)
    require_sound(compare(tmp_path / "one", tmp_path / "crossed"))
    (found,) = compare(tmp_path / "one", tmp_path / "crossed-unsummed").found
    assert "a sum over all ranks is missing" in str(found)


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("staged")
    program = importlib.import_module("one_process")
    program.step(folder / "one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "build", tied_decoder)
        program.step(folder / "tied")
    with record(folder / "named", model := nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))):
        model(torch.arange(8.0).view(4, 2)).sum().backward()
    run_ranks(pipelines, 2, folder)
    return folder


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_are_compared_whole_under_the_names_of_the_model(schedule, staged):
    for name in (schedule, f"{schedule}-halves"):
        require_sound(compare(staged / "one", staged / name))
    for name, modules in (("mean", ["loss"]), ("accumulate", []), ("tied", [])):
        one = staged / ("tied" if name == "tied" else "one")
        report = compare(one, staged / f"{schedule}-{name}")
        assert [found.birth.modules for found in report.found] == [modules], report


def test_names_that_are_not_those_of_the_model_are_refused(staged):
    message = r"no stage in .*renamed has \['1.bias', '1.weight'\].*they have \['0.bias'"
    with pytest.raises(InvalidArgumentError, match=message):
        compare(staged / "named", staged / "renamed")
