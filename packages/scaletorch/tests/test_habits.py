"""What people do with any module, on a layout: right, or refused in words."""

import io

import pytest
import torch
from small_models import Stack
from torch import nn
from training import grid

from scaletorch.compose import eval_step, parallelize, shard_global_batch, train_step
from scaletorch.dist.errors import InvalidArgumentError, StateError
from scaletorch.dist.testing import relative_error
from scaletorch.parallel.data_parallel import shard_optimizer

IDS = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(0))
PLAN = {"layers.*.up": "column", "layers.*.down": "row"}
LAYOUTS = {
    "dp 4": {"dp_size": 4},
    "dp 4, ZeRO 1": {"dp_size": 4, "stage": 1},
    "dp 4, ZeRO 2": {"dp_size": 4, "stage": 2},
    "dp 2 x tp 2": {"dp_size": 2, "tp_size": 2},
    "tp 4": {"tp_size": 4},
    "dp 2 x pp 2": {"dp_size": 2, "pp_size": 2},
    "pp 2 x tp 2": {"pp_size": 2, "tp_size": 2},
    "pp 4": {"pp_size": 4},
}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.dropout(self.down(torch.relu(self.up(x))))


def plain(seed=0):
    torch.manual_seed(seed)
    return Stack((Layer() for _ in range(4)), 16, 64).double()


def plain_loss(model):
    logits = model.eval()(IDS)
    return nn.functional.cross_entropy(logits.flatten(0, 1), IDS.flatten()).detach()


def habits(sizes):
    """Return errors of a forward, and of evaluations after states were loaded."""
    sizes = dict(sizes)
    stage = sizes.pop("stage", None)
    with grid(sizes) as manager:
        model = parallelize(plain(), manager, plan=PLAN if manager.tp_size > 1 else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        if stage:
            shard_optimizer(optimizer, model, stage=stage)
        cut = shard_global_batch({"input_ids": IDS, "labels": IDS}, 2, model=model)
        train_step(model, cut)
        optimizer.step()
        optimizer.zero_grad()
        errors = {"eval": relative_error(eval_step(model, cut), plain_loss(plain()))}
        assert not any(module.training for module in model.eval().modules())
        errors |= called(model, pipelined=manager.pp_size > 1)
        assert all(module.training for module in model.train().modules())
        model.load_state_dict(model.state_dict())
        errors["own state"] = relative_error(eval_step(model, cut), plain_loss(plain()))
        model.load_state_dict(plain(1).state_dict())
        errors["a plain state"] = relative_error(eval_step(model, cut), plain_loss(plain(1)))
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        model.load_state_dict(torch.load(file, weights_only=True))
        errors["a saved state"] = relative_error(eval_step(model, cut), plain_loss(plain(1)))
        with pytest.raises(StateError, match=r"cannot be pickled.* save its state_dict\(\)"):
            torch.save(model, file)
        errors["moved"] = relative_error(eval_step(model.to("cpu"), cut), plain_loss(plain(1)))
    return errors


def called(model, *, pipelined):
    """Call a model as a plain one."""
    if pipelined:
        for given in (lambda: model(IDS), lambda: model(input_ids=IDS)):
            with pytest.raises(InvalidArgumentError, match=r"called as the whole model.*eval_step"):
                given()
        return {}
    with torch.no_grad():
        return {
            "forward": relative_error(model(IDS), plain().eval()(IDS)),
            "forward by name": relative_error(model(input_ids=IDS), plain().eval()(IDS)),
        }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_habits(four, layout):
    for errors in four.run(habits, LAYOUTS[layout]):
        assert max(errors.values()) < 1e-12, errors
