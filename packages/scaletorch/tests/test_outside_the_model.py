"""What a program holds beside the model: an early optimizer, weights of a loss, a second loss."""

import re

import pytest
import torch
import torch.nn.functional as F
from sweeps import today
from torch import nn
from training import cross_entropy, llama, tokens

from scaletorch.compose import full_gradients, parallelize, shard_global_batch, train_step
from scaletorch.dist import RankPool
from scaletorch.dist.errors import ScaletorchError
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

PAIRS = ("dp tp", "dp pp", "dp cp", "tp pp", "tp cp", "pp cp")
LAYOUTS = [
    *({f"{axis}_size": 4} for axis in ("dp", "tp", "cp", "pp")),
    *({f"{axis}_size": 2 for axis in pair.split()} for pair in PAIRS),
]


def of_temperature(log):
    def loss_fn(output, batch):
        return cross_entropy(getattr(output, "logits", output) * log.exp(), batch)

    return loss_fn


def of_all_rows(output, batch):
    """A loss of which a term is of all rows."""
    total, count = cross_entropy(output, batch)
    return total + count * output.std(), count


def early(manager, plain):
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    return parallelize(plain, manager), [optimizer], [None] * 2


def outside(manager, plain):
    log = nn.Parameter(torch.tensor(0.3))
    model = parallelize(plain, manager)
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in (model.parameters(), [log])]
    return model, optimizers, [of_temperature(log)] * 2


def second(manager, plain):
    model = parallelize(plain, manager)
    return model, [torch.optim.SGD(model.parameters(), lr=0.1)], [cross_entropy, of_all_rows]


def attempt(program, sizes, rows=8):
    """Return what was said, and the losses."""
    manager, found = setup_process_group_manager(**sizes), []
    try:
        model, optimizers, losses = program(manager, llama(num_layers=4).double())
        for step, loss_fn in enumerate(losses):
            batches = shard_global_batch(tokens(step, rows), 2, model=model)
            found.append(train_step(model, batches, loss_fn=loss_fn).item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return "", found
    except ScaletorchError as error:
        return str(error), found
    finally:
        destroy_process_group_manager()


@pytest.fixture(scope="module")
def four():
    with RankPool(4, timeout=200) as pool:
        yield pool


REFUSED = {
    early: r"SGD has .*of the plain model.*make the optimizer of model.parameters\(\) after",
    outside: r"updated a parameter of shape \[\] that loss_fn uses and that is not the model's",
    second: "computes something else on .* than in one process",
}


@pytest.mark.parametrize("sizes", today(LAYOUTS, 5), ids=str)
@pytest.mark.parametrize("program", REFUSED)
def test_what_is_not_of_the_model_is_right_or_refused(four, program, sizes):
    right = program is early and "tp_size" not in sizes
    one = attempt(program, {})[1] if right else []
    for said, losses in four.run(attempt, program, sizes):
        if right:
            assert (said, losses) == ("", pytest.approx(one, rel=1e-11))
        else:
            assert re.search(REFUSED[program], said), said
            assert len(losses) == 1


def test_one_process_trains_what_is_not_of_the_model():
    manager = setup_process_group_manager()
    try:
        model, _, (loss_fn, _) = outside(manager, llama().double())
        log = loss_fn.__closure__[0].cell_contents
        plain, batch = llama().double(), tokens()
        batch["labels"][0, 3:] = -100  # so that micro-batches count otherwise
        train_step(model, shard_global_batch(batch, 2, model=model), loss_fn=loss_fn)
        own, log.grad = log.grad, None
        logits = plain(batch["input_ids"]) * log.exp()
        F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
        torch.testing.assert_close(own, log.grad, rtol=1e-6, atol=0.0)
        for name, grad in full_gradients(model).items():
            torch.testing.assert_close(grad, plain.get_parameter(name).grad)
    finally:
        destroy_process_group_manager()
