"""Grid and order of positions are given once, to `parallelize`; later calls ask the model."""

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
from scaletorch.dist.errors import InvalidArgumentError, StateError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.context_parallel import shard_batch
from scaletorch.parallel.data_parallel import DataParallelBucket
from scaletorch.parallel.pg_manager import ProcessGroupManager, setup_process_group_manager
from scaletorch.parallel.pipeline_parallel import PipelineParallel

ORDERS = ("zigzag", "contiguous", "stripe")


def long_batch(**how):
    return shard_global_batch(tokens(rows=2, length=16), 1, **how)


def losses(size):
    """Return the loss of each order, where all models and batches are there at a time."""
    manager = setup_process_group_manager(cp_size=size)
    how = [{"cp_layout": order, "rehearse": False} for order in ORDERS]
    models = [parallelize(llama().double(), manager, **each) for each in how]
    batches = [long_batch(model=model) for model in models]
    again = long_batch(model=models[0])
    found = [train_step(m, b).item() for m, b in zip(models, batches, strict=True)]
    by_hand = shard_batch(tokens(rows=2, length=16), manager.cp_group, layout="zigzag")
    if size > 1:
        with pytest.raises(InvalidArgumentError, match=r"be contiguous.* sharded zigzag"):
            train_step(models[1], [by_hand])
    return [*found, train_step(models[0], again).item()]


def test_the_batch_is_ordered_as_the_model_attends():
    ((expected, *_),) = run_ranks(losses, 1, 1)
    for found in run_ranks(losses, 2, 2):
        assert found == pytest.approx([expected] * 4, rel=1e-12)


def both_forms():
    """Train with a grid that is not the current one, each call with and without it."""
    manager = ProcessGroupManager(tp_size=2, dp_size=2)
    model = parallelize(llama(), manager, rehearse=False)
    micro_batches = shard_global_batch(tokens(), 2, manager)
    short = train_step(model, micro_batches)
    model.zero_grad()
    assert short == train_step(model, micro_batches, manager)
    for call in (
        global_grad_norm, full_gradients, full_state_dict, nonfinite_gradients, check_replicas
    ):  # fmt: skip
        torch.testing.assert_close(call(model), call(model, manager), rtol=0, atol=0)
    assert clip_grad_norm_(model, 1e9) == clip_grad_norm_(model, 1e9, manager)
    return short.item()


def test_calls_know_the_grid_of_their_model():
    assert len(set(run_ranks(both_forms, 4))) == 1


def by_hand():
    """Return losses of a model put together by hand, on the current grid and on one passed."""
    with pytest.raises(StateError, match=r"pass manager=.*, or call setup_process_group_manager"):
        global_grad_norm(llama())
    other = ProcessGroupManager(dp_size=2)
    stage = PipelineParallel(llama(), group=other.pp_group)
    model = DataParallelBucket(stage, group=other.dp_group)
    micro_batches = shard_global_batch(tokens(), 1, other)
    found = [train_step(model, micro_batches, other).item()]
    model.zero_grad()
    setup_process_group_manager(dp_size=2)
    return [*found, train_step(model, micro_batches).item()]


def test_a_model_put_together_by_hand_is_on_the_current_grid():
    for first, second in run_ranks(by_hand, 2):
        assert first == second
