"""The valid tokens that a pipeline's default loss is divided by: of its own group's batch alone."""

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import get_rank, new_subgroups_by_enumeration

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pg_manager import setup_process_group_manager
from scaletorch.parallel.pipeline_parallel import PipelineParallel, Split, train_step_pipeline
from scaletorch.parallel.pipeline_parallel.runtime.program import plan_of
from scaletorch.parallel.pipeline_parallel.schedules import one_f_one_b


def make():
    torch.manual_seed(0)
    layers = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 7)
    return nn.Sequential(*layers).double()


def batches(pipeline):
    """Return the micro-batches of one of two pipelines; their valid tokens differ in number."""
    generator = torch.Generator().manual_seed(pipeline)
    made = []
    for masked in (1, 2 + pipeline):
        ids = torch.randint(7, (2, 6), generator=generator)
        labels = ids.roll(1, 1)
        labels[:, :masked] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def sum_and_count(plain, pipeline):
    logits = [(plain(batch["input_ids"]), batch["labels"]) for batch in batches(pipeline)]
    losses = [F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum") for x, y in logits]
    return sum(losses), sum(int((y != -100).sum()) for _, y in logits)


def two_pipelines(kind):
    """Train two pipelines of two ranks below a manager of DP 2 x PP 2."""
    manager = setup_process_group_manager(dp_size=2, pp_size=2)
    pipeline = get_rank() // 2
    own, _ = new_subgroups_by_enumeration([[0, 1], [2, 3]])
    at_start, in_step = {
        "own": (own, None),
        "own in the step alone": (None, own),
        "the manager's": (None, None),
        "the manager's, given": (manager.pp_group, manager.pp_group),
    }[kind]
    stage = PipelineParallel(make(), Split(points=("2",)), group=at_start)
    loss = train_step_pipeline(stage, batches(pipeline), group=in_step)
    plain = make()
    total, count = sum_and_count(plain, pipeline)
    if "manager" in kind:
        count += sum_and_count(plain, 1 - pipeline)[1]
    (total / count).backward()
    whole = dict(plain.named_parameters())
    for name, parameter in stage.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name].grad)
    torch.testing.assert_close(loss, total.detach() / count if stage.is_last_stage else loss * 0)


@pytest.mark.parametrize(
    "kind", ["own", "own in the step alone", "the manager's", "the manager's, given"]
)
def test_a_group_of_ones_own_counts_its_own_tokens(kind):
    run_ranks(two_pipelines, 4, kind)


def test_a_step_numbers_its_schedule_once(monkeypatch):
    simulate = import_module("scaletorch.parallel.pipeline_parallel.schedules.simulate")
    calls = []
    number = simulate.number

    def counted(schedule):
        calls.append(schedule.name)
        return number(schedule)

    monkeypatch.setattr(simulate, "number", counted)
    plan_of.cache_clear()
    plan_of(one_f_one_b, 2, 3, 0)
    assert calls == ["1f1b"]
