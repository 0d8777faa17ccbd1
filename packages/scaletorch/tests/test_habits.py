"""What people do with any module, on a layout: right, or refused in words."""

import io

import pytest
import torch
from torch import nn

from scaletorch.compose import eval_step, parallelize, shard_global_batch, train_step
from scaletorch.dist.errors import InvalidArgumentError, StateError
from scaletorch.dist.testing import RankPool, relative_error
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

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


class Plain(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(16, 64)
        self.double()

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def plain_loss(model):
    logits = model.eval()(IDS)
    return nn.functional.cross_entropy(logits.flatten(0, 1), IDS.flatten()).detach()


def habits(sizes):
    """Return errors of a forward, and of evaluations after states were loaded."""
    sizes = dict(sizes)
    stage = sizes.pop("stage", None)
    manager = setup_process_group_manager(**sizes)
    model = parallelize(Plain(), manager, plan=PLAN if manager.tp_size > 1 else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if stage:
        shard_optimizer(optimizer, model, stage=stage)
    cut = shard_global_batch({"input_ids": IDS, "labels": IDS}, 2, model=model)
    train_step(model, cut)
    optimizer.step()
    optimizer.zero_grad()
    errors = {"eval": relative_error(eval_step(model, cut), plain_loss(Plain()))}
    assert not any(module.training for module in model.eval().modules())
    errors |= called(model, pipelined=manager.pp_size > 1)
    assert all(module.training for module in model.train().modules())
    model.load_state_dict(model.state_dict())
    errors["own state"] = relative_error(eval_step(model, cut), plain_loss(Plain()))
    model.load_state_dict(Plain(1).state_dict())
    errors["a plain state"] = relative_error(eval_step(model, cut), plain_loss(Plain(1)))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True))
    errors["a saved state"] = relative_error(eval_step(model, cut), plain_loss(Plain(1)))
    with pytest.raises(StateError, match=r"cannot be pickled.* save its state_dict\(\) instead"):
        torch.save(model, file)
    errors["moved"] = relative_error(eval_step(model.to("cpu"), cut), plain_loss(Plain(1)))
    destroy_process_group_manager()
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
            "forward": relative_error(model(IDS), Plain().eval()(IDS)),
            "forward by name": relative_error(model(input_ids=IDS), Plain().eval()(IDS)),
        }


@pytest.fixture(scope="module")
def ranks():
    with RankPool(4, timeout=120) as pool:
        yield pool


@pytest.mark.parametrize("layout", LAYOUTS)
def test_habits(ranks, layout):
    for errors in ranks.run(habits, LAYOUTS[layout]):
        assert max(errors.values()) < 1e-12, errors
