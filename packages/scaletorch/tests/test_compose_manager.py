"""The grid is said once, to `parallelize`: later calls ask the model, unless they are given one."""

import pytest
import torch
from training import llama, tokens

from scaletorch.compose import (
    check_replicas,
    clip_grad_norm_,
    full_gradients,
    full_state_dict,
    global_grad_norm,
    nonfinite_gradients,
    parallelize,
    shard_global_batch,
    train_step,
)
from scaletorch.dist import InvalidArgumentError, StateError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.data_parallel import DataParallelBucket
from scaletorch.parallel.pg_manager import ProcessGroupManager, setup_process_group_manager
from scaletorch.parallel.pipeline_parallel import PipelineParallel


def both_forms():
    """Train with a grid that is nobody's current one, each call asked with and without it."""
    manager = ProcessGroupManager(tp_size=2, dp_size=2)
    model = parallelize(llama(), manager, rehearse=False)
    micro_batches = shard_global_batch(tokens(), 2, manager)
    losses = [train_step(model, micro_batches).item()]
    model.zero_grad()
    losses.append(train_step(model, micro_batches, manager).item())
    pairs = [
        (global_grad_norm(model), global_grad_norm(model, manager)),
        (full_gradients(model), full_gradients(model, manager)),
        (full_state_dict(model), full_state_dict(model, manager)),
        (nonfinite_gradients(model), nonfinite_gradients(model, manager)),
        (check_replicas(model), check_replicas(model, manager)),
        (clip_grad_norm_(model, 1e9), clip_grad_norm_(model, 1e9, manager)),
    ]
    for short, long in pairs:
        torch.testing.assert_close(short, long, rtol=0, atol=0)
    assert losses[0] == losses[1]
    return losses[0]


def test_calls_know_the_grid_of_their_model():
    assert len(set(run_ranks(both_forms, 4))) == 1


def by_hand():
    """Return losses of a model put together by hand, on the current grid and on one passed."""
    with pytest.raises(
        StateError, match=r"pass manager=\.\.\., or call setup_process_group_manager"
    ):
        global_grad_norm(llama())
    other = ProcessGroupManager(dp_size=2)
    model = DataParallelBucket(
        PipelineParallel(llama(), group=other.pp_group), group=other.dp_group
    )
    micro_batches = shard_global_batch(tokens(), 1, other)
    losses = [train_step(model, micro_batches, other).item()]
    model.zero_grad()
    setup_process_group_manager(dp_size=2)
    losses.append(train_step(model, micro_batches).item())
    return losses


def test_a_model_put_together_by_hand_lies_on_the_current_grid():
    for first, second in run_ranks(by_hand, 2):
        assert first == second


@pytest.mark.parametrize(
    ("model", "manager", "said"),
    [
        (torch.nn.Linear(1, 1), "optimizer", "manager must be a ProcessGroupManager.*a str"),
        (None, None, "model must be what parallelize returned, got NoneType"),
    ],
)
def test_what_is_no_grid_or_no_model_is_refused(model, manager, said):
    with pytest.raises(InvalidArgumentError, match=said):
        check_replicas(model, manager)
