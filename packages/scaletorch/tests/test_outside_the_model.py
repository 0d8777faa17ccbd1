"""What a program holds beside the model: optimizers, rates, weights of a loss, a second loss."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from sweeps import today
from torch import nn
from training import FOUR, cross_entropy, grid, llama, tokens

from scaletorch.compose import full_gradients, parallelize, shard_global_batch, train_step
from scaletorch.dist.errors import InvalidArgumentError, ScaletorchError


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


def steered(manager, plain):
    """A learning rate that follows the norm of a rank's gradients."""
    model = parallelize(plain, manager)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steer(*_):
        norms = torch.stack([p.grad.norm() for p in model.parameters()])
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + norms.norm().item())

    optimizer.register_step_pre_hook(steer)
    return model, [optimizer], [None] * 3


def of_rows(output, batch):
    """The mean of the words that count, times rows: right where all rows have as many."""
    logits, labels = getattr(output, "logits", output), batch["labels"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * len(labels), len(labels)


def by_rows(manager, plain):
    model = parallelize(plain, manager)
    return model, [torch.optim.SGD(model.parameters(), lr=0.1)], [of_rows]


def kept(manager, plain):
    """The loss reads outputs of layers that hooks have kept."""
    for layer in plain.layers:
        layer.register_forward_hook(lambda module, _, output: setattr(module, "kept", output))

    def loss_fn(output, batch):
        total, count = cross_entropy(output, batch)
        found = [each.kept for each in plain.layers if hasattr(each, "kept")]
        return total + sum(each.square().sum() for each in found), count

    model = parallelize(plain, manager, rehearse=False)
    return model, [], [loss_fn]


def states(manager, plain):
    """The loss compares hidden states with an entry, whose positions ranks divide otherwise."""
    plain.lm_head.register_forward_hook(lambda _, args, y: {"logits": y, "states": args[0]})

    def loss_fn(output, batch):
        return (output["states"] - batch["loss_target"]).square().sum(), len(output["states"])

    return parallelize(plain, manager, sequence_parallel=manager.tp_size > 1), [], [loss_fn]


def attempt(program, sizes):
    """Return what was said, and the losses."""
    found = []
    try:
        with grid(sizes) as manager:
            model, optimizers, losses = program(manager, llama(num_layers=4).double())
            for step, loss_fn in enumerate(losses):
                whole = tokens(step, 32)
                whole["labels"][2:4, 3:] = -100  # no first rows of a micro-batch
                whole["loss_target"] = torch.ones(32, 8, 16)
                batches = shard_global_batch(whole, 2, model=model)
                found.append(train_step(model, batches, loss_fn=loss_fn).item())
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            return "", found
    except ScaletorchError as error:
        return str(error), found


REFUSED = {
    early: r"SGD has .*of the plain model.*make the optimizer of model.parameters\(\) after",
    outside: r"updated a parameter of shape \[\] that loss_fn uses and the model does not have",
    second: "computes something else on .* than in one process",
    by_rows: "computes something else on .* than in one process: the loss is off",
    steered: "learning rates of optimizers have changed differently on some ranks: by .*norm",
    kept: "loss_fn takes tensors of the model that its forward did not return",
    states: r"loss_fn fails on this rank's positions of each sequence \(RuntimeError: .*\)\."
    r" (cp divides .*: name the dim|sequence parallelism divides .*: compute the loss from whole)",
}
CUT = {  # where it is refused; else everywhere
    early: {"tp_size"},
    steered: {"tp_size", "pp_size"},
    kept: {"pp_size"},
    states: {"tp_size", "cp_size"},
}


@pytest.mark.parametrize("sizes", today([*FOUR.values()], 5), ids=str)
@pytest.mark.parametrize("program", REFUSED)
def test_what_is_not_of_the_model_is_right_or_refused(four, program, sizes):
    right = program in CUT and not CUT[program] & sizes.keys()
    one = attempt(program, {})[1] if right else []
    for said, losses in four.run(attempt, program, sizes):
        if right:
            assert (said, losses) == ("", pytest.approx(one, rel=1e-11))
        else:
            assert re.search(REFUSED[program], said), said
            assert len(losses) == {early: 1, outside: 1, second: 1, steered: 2}.get(program, 0)


def test_one_process_trains_what_is_not_of_the_model():
    with grid() as manager:
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


class Asks(nn.Module):
    """Takes a word, nothing, and tensors within a dict; or has a number of rows of its own."""

    rows = None

    def __init__(self):
        super().__init__()
        self.plain = llama().double()

    def forward(self, input_ids, task, mask, scales):
        assert (task, mask) == ("a", None)
        logits = self.plain(input_ids)
        return getattr(logits, "logits", logits) * scales["first"].view(self.rows or -1)[0]


def asked(rows):
    with grid() as manager:
        torch.manual_seed(0)
        model = Asks()
        model.rows = rows
        more = {"task": "a", "mask": None, "scales": {"first": torch.full((1,), 2.0)}}
        parallel = parallelize(copy.deepcopy(model), manager)
        dims = {"row_dims": {"scales": None}}
        cut = shard_global_batch({**tokens(rows=8), **more}, 2, model=parallel, **dims)
        loss = train_step(parallel, cut)
        given = {"input_ids": tokens(rows=8)["input_ids"], **more}
        total, count = cross_entropy(model(**given), tokens(rows=8))
        return loss.item(), (total / count).item()


def test_entries_of_any_kind_are_passed_whole():
    found, one = asked(None)
    assert found == pytest.approx(one, rel=1e-12)


def test_a_number_of_rows_that_does_not_fit_is_explained():
    words = r"Asks.forward failed .*shape '\[8\]'.*micro-batches leave each forward some of the"
    with pytest.raises(InvalidArgumentError, match=words):
        asked(8)
