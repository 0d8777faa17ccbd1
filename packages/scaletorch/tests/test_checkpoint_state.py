"""What of a program's state a checkpoint takes, and what it refuses by name."""

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from scaletorch.checkpoint import CheckpointError, load, save
from scaletorch.dist.errors import InvalidArgumentError


class Counting(nn.Linear):
    def get_extra_state(self):
        return torch.tensor(3)

    def set_extra_state(self, state):
        pass


def hooked(hook):
    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(lambda _, state, prefix, __: hook(state))
    return model


def clone(state):
    state.update({name: value.detach().clone() for name, value in state.items()})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Counting(2, 2), "'_extra_state', a Tensor, is no parameter and no buffer"),
        (lambda: hooked(clone), "'weight', a Tensor, is no parameter and no buffer"),
        (
            lambda: hooked(lambda s: s.__delitem__("bias")),
            "leaves out the parameter 'bias', which is t",
        ),
    ],
)
def test_state_that_would_not_come_back_is_refused(tmp_path, make, message):
    model = make()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidArgumentError, match=message):
        save(tmp_path, model, optimizer, step=1)
    assert not list(tmp_path.iterdir())


def test_a_parameter_that_the_state_leaves_out_may_be_frozen(tmp_path):
    model = hooked(lambda state: state.__delitem__("bias"))
    model.bias.requires_grad_(False)
    save(tmp_path, model, optim.SGD([model.weight], lr=0.1), step=1)
    assert load(tmp_path, model).step == 1


def stepped(kind, **options):
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), **options)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return model, optimizer


@pytest.mark.parametrize(
    ("saved", "given"), [(optim.Adam, optim.AdamW), (optim.SGD, optim.AdamW), (optim.Adam, "Mine")]
)
def test_another_optimizer_is_refused(tmp_path, saved, given):
    given = type("Mine", (saved,), {}) if given == "Mine" else given
    save(tmp_path, *stepped(saved, lr=0.1), step=1)
    model, optimizer = stepped(given, lr=0.2)
    message = f" {saved.__name__}, and the one given is {given.__name__}"
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert load(tmp_path, model).step == 1


def test_another_scheduler_is_refused(tmp_path):
    model, optimizer = stepped(optim.SGD, lr=0.1)
    save(tmp_path, model, optimizer, step=1, scheduler=lr_scheduler.StepLR(optimizer, 3))
    other = lr_scheduler.CosineAnnealingLR(optimizer, 9)
    with pytest.raises(CheckpointError, match="a StepLR, and the one given is CosineAnnealingLR"):
        load(tmp_path, model, scheduler=other)
    assert "step_size" not in other.state_dict()


def test_how_weights_decay_is_the_programs_to_say(tmp_path):
    save(tmp_path, *stepped(optim.Adam, lr=0.1, weight_decay=0.5), step=1)
    model, optimizer = stepped(optim.Adam, decoupled_weight_decay=True)
    load(tmp_path, model, optimizer)
    group = optimizer.param_groups[0]
    assert (group["weight_decay"], group["decoupled_weight_decay"]) == (0.5, True)


def test_a_rate_that_was_a_tensor_becomes_the_programs_float(tmp_path):
    save(tmp_path, *stepped(optim.SGD, lr=torch.tensor(0.5)), step=1)
    model, optimizer = stepped(optim.SGD, lr=0.1)
    load(tmp_path, model, optimizer)
    assert type(optimizer.param_groups[0]["lr"]) is float
    assert optimizer.param_groups[0]["lr"] == 0.5


def sequence(optimizer):
    parts = [
        lr_scheduler.MultiStepLR(optimizer, [1, 2, 2], gamma=0.5),
        lr_scheduler.ExponentialLR(optimizer, 0.9),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])


def test_a_sequence_of_schedulers_goes_on(tmp_path):
    model, optimizer = stepped(optim.SGD, lr=1.0)
    scheduler = sequence(optimizer)
    optimizer.step()
    scheduler.step()
    save(tmp_path, model, optimizer, step=1, scheduler=scheduler)
    other = optim.SGD(model.parameters(), lr=1.0)
    again = sequence(other)
    load(tmp_path, model, other, scheduler=again)
    for _ in range(5):
        for each, schedule in ((optimizer, scheduler), (other, again)):
            each.step()
            schedule.step()
        assert again.get_last_lr() == scheduler.get_last_lr()
        assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_lists_of_tensors_are_not_held(tmp_path):
    model, optimizer = stepped(optim.LBFGS, max_iter=3)
    with pytest.raises(InvalidArgumentError, match="is a 1-d tensor, or holds one"):
        save(tmp_path, model, optimizer, step=1)


def test_a_scheduler_that_refuses_its_state_is_found_before_anything_changes(tmp_path, monkeypatch):
    model, optimizer = stepped(optim.SGD, lr=0.1)
    schedule = lr_scheduler.StepLR(optimizer, 3)
    save(tmp_path, model, optimizer, step=1, scheduler=schedule)
    with torch.no_grad():
        model.weight.fill_(7.0)

    def refusing(self, state):
        raise KeyError("gamma")

    monkeypatch.setattr(lr_scheduler.StepLR, "load_state_dict", refusing)
    generator = torch.get_rng_state()
    with pytest.raises(CheckpointError, match="cannot be given their state here: KeyError: 'gamma"):
        load(tmp_path, model, optimizer, scheduler=schedule)
    assert model.weight.eq(7.0).all()
    assert torch.equal(torch.get_rng_state(), generator)
