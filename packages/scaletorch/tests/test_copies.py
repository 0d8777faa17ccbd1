"""Deep copies of a parallelized model: averages of weights as `AveragedModel` keeps them."""

import copy
import pickle

import pytest
import torch
from small_decoder import CP, DP, PLAN, PP, TP, V, batch, loss_of, made
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import grid

from scaletorch.compose import (
    eval_step,
    full_state_dict,
    parallelize,
    shard_global_batch,
    train_step,
)
from scaletorch.dist.errors import StateError
from scaletorch.dist.testing import distributed_test, relative_error
from scaletorch.parallel.data_parallel import shard_optimizer


def averaged():
    """Return one process's averages of weights after three steps, and their loss on a batch."""
    model = made()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for step in range(3):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update_parameters(model)
    with torch.no_grad():
        return ema.module.state_dict(), loss_of(ema, batch(9))


def check_average(sizes, options, zero=0):
    with grid(sizes) as manager:
        if manager.tp_size > 1:
            options = {**options, "plan": PLAN}
        model = parallelize(made(), manager, **options, rehearse=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        if zero:
            shard_optimizer(optimizer, model, stage=zero)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for step in range(3):
            train_step(model, shard_global_batch(batch(step), 1, manager))
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(model)
        wanted, loss = averaged()
        now = full_state_dict(ema.module)
        assert max(float(relative_error(now[n], w)) for n, w in wanted.items()) < 1e-12, sizes
        given = shard_global_batch(batch(9), 1, manager)
        assert eval_step(ema.module, given).item() == pytest.approx(loss.item(), rel=1e-12)
        with pytest.raises(StateError, match="this is a deep copy of a wrapped model"):
            train_step(ema.module, given)
        with pytest.raises(StateError, match="cannot be pickled"):
            pickle.dumps(model)


@distributed_test(2, timeout=200)
def test_averaged_models_are_those_of_one_process():
    kinds = (DP, {}), (TP, {}), (CP, {}), (DP, {"recompute": True}), (DP, {}, 1), (DP, {}, 2)
    for kind in kinds:
        check_average(*kind)


@distributed_test(2, timeout=200)
def test_stages_say_how_to_average_them_and_it_works():
    """The advice of the error, as it is written."""
    for options in ({}, dict([V])):
        with grid(PP) as manager:
            model = parallelize(made(), manager, **options, rehearse=False)
            for each in (model, model.module):
                with pytest.raises(StateError, match=r"keep average = .*model.load_state_dict\(av"):
                    copy.deepcopy(each)
            optimizer = torch.optim.SGD(model.parameters(), 0.5)
            average = {}
            for step in range(3):
                train_step(model, shard_global_batch(batch(step), 2, manager))
                optimizer.step()
                optimizer.zero_grad()
                average = average or {n: t.clone() for n, t in model.state_dict().items()}
                for name, tensor in model.state_dict().items():
                    average[name].lerp_(tensor, 0.5)
            model.load_state_dict(average)
            wanted, loss = averaged()
            now = full_state_dict(model)
            assert max(float(relative_error(now[n], w)) for n, w in wanted.items()) < 1e-12
            given = shard_global_batch(batch(9), 2, manager)
            assert eval_step(model, given).item() == pytest.approx(loss.item(), rel=1e-12)
