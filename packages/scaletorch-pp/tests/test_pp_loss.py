"""The valid tokens that a pipeline's default loss is divided by: of its own group's batch alone."""

import torch
import torch.nn.functional as F
from one_process import require_same
from torch import nn
from torch.distributed import get_rank, new_subgroups_by_enumeration

from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.pg_manager import setup_process_group_manager
from scaletorch.parallel.pipeline_parallel import PipelineParallel, Split, train_step_pipeline


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


@distributed_test(world_size=4)
def test_a_group_of_ones_own_counts_its_own_tokens():
    """Train two pipelines of two ranks below a manager of DP 2 x PP 2."""
    manager = setup_process_group_manager(dp_size=2, pp_size=2)
    pipeline = get_rank() // 2
    own, _ = new_subgroups_by_enumeration([[0, 1], [2, 3]])
    for whole, at_start, in_step in [
        (False, own, None),
        (False, None, own),  # of the step alone
        (True, None, None),  # the manager's
        (True, manager.pp_group, manager.pp_group),
    ]:
        stage = PipelineParallel(make(), Split(points=("2",)), group=at_start)
        loss = train_step_pipeline(stage, batches(pipeline), group=in_step)
        plain = make()
        total, count = sum_and_count(plain, pipeline)
        if whole:
            count += sum_and_count(plain, 1 - pipeline)[1]
        (total / count).backward()
        require_same(stage, plain)
        expected = total.detach() / count if stage.is_last_stage else loss * 0
        torch.testing.assert_close(loss, expected)
