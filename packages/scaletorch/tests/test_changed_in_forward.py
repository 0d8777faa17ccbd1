"""What a forward changes in its model: as in one process, or refused on every rank."""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from sweeps import today
from torch import nn

from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.compose.state import full_state_dict
from scaletorch.dist.errors import ScaletorchError
from scaletorch.dist.testing import relative_error, run_ranks
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

VOCAB, HIDDEN, STEPS = 12, 8, 2
PLAN = {"embed": "vocab", "layers.0": "column", "layers.1": "row"}


def attend(x):
    heads = x.unsqueeze(1)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).squeeze(1)


class Base(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN, **options)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids):
        return self.top(self.embed(input_ids))

    def top(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x + attend(x))


class Short(Base):
    """Rows that the first lookup makes shorter."""

    def __init__(self):
        super().__init__(max_norm=0.5)


class Frequent(Base):
    def __init__(self):
        super().__init__(scale_grad_by_freq=True)


class FrequentCall(Base):
    """The same, of a call that no module shows."""

    def forward(self, input_ids):
        return self.top(F.embedding(input_ids, self.embed.weight, scale_grad_by_freq=True))


class Shrinking(Base):
    """A scale that each forward makes smaller, past autograd and versions."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, input_ids):
        self.scale.data.mul_(0.9)
        return super().forward(input_ids) * self.scale


class Averaged(Base):
    """A parameter that follows what forward sees."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(HIDDEN), requires_grad=False)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 1)), 0.5)
        return self.top(x - self.mean)


class Counted(Base):
    """A temperature that falls with each call."""

    def __init__(self):
        super().__init__()
        self.temperature = 2.0

    def forward(self, input_ids):
        self.temperature *= 0.8
        return super().forward(input_ids) / self.temperature


class Noted(Base):
    """A flag that the first call sets, and sizes of the last one, the same in all calls."""

    def forward(self, input_ids):
        self.begun, self.length = True, input_ids.shape[1]
        return super().forward(input_ids)


KINDS = {kind.__name__: kind for kind in Base.__subclasses__()}


def made(kind):
    torch.manual_seed(0)
    return KINDS[kind]().double()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCAB, (8, 8), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(VOCAB, (8, 8), generator=generator)}


def one_process(kind):
    model = made(kind)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
    for step in range(STEPS):
        given = batch(step)
        loss = F.cross_entropy(model(given["input_ids"]).flatten(0, 1), given["labels"].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train(kind, sizes, micro_batches=1, zero=0, **options):
    """Return the largest error of a weight, what was refused, or what was warned of."""
    manager = setup_process_group_manager(**sizes)
    if manager.tp_size > 1:
        options["plan"] = PLAN
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = parallelize(made(kind), manager, **options)
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
            if zero:
                shard_optimizer(optimizer, model, stage=zero)
            for step in range(STEPS):
                train_step(model, shard_global_batch(batch(step), micro_batches, manager))
                optimizer.step()
                optimizer.zero_grad()
            now = full_state_dict(model)
        if said:
            return str(said[0].message)
        wanted = one_process(kind)
        return max(float(relative_error(now[name], value)) for name, value in wanted.items())
    except ScaletorchError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        destroy_process_group_manager()


def trained(cases):
    return [train(*case[:3], **dict(case[3:])) for case in cases]


ONE, DP, CP, TP, PP = {}, {"dp_size": 2}, {"cp_size": 2}, {"tp_size": 2}, {"pp_size": 2}
V = ("schedule", "zb_v")
RIGHT = [
    ("Frequent", PP, 1),
    *[("Noted", sizes, 2) for sizes in (DP, CP, TP, PP)],
    ("Noted", PP, 2, V),
    *[("Counted", sizes, 1) for sizes in (DP, CP, TP, PP)],
]
FREQUENT = "computes something else on"
REFUSED = [
    (("Short", DP, 1), "changes parameter embed.weight. Micro-batches"),
    (("Short", PP, 2), "changes parameter embed.weight. "),
    *[(("Frequent", sizes, 1), FREQUENT) for sizes in (DP, CP)],
    (("FrequentCall", DP, 1, ("zero", 2)), FREQUENT),
    (("FrequentCall", PP, 2), FREQUENT),
    (("Frequent", PP, 2, V), FREQUENT),
    *[(("Averaged", sizes, 1), "changes parameter mean") for sizes in (DP, CP, TP)],
    *[(("Shrinking", sizes, 1), "changes parameter scale") for sizes in (DP, CP, TP, PP)],
    (("Shrinking", DP, 1, ("zero", 2)), "changes parameter scale"),
]


def test_what_forwards_change_as_one_process_would_trains():
    cases = today(RIGHT, 2)
    for found in run_ranks(trained, 2, cases, timeout=200):
        for case, error in zip(cases, found, strict=True):
            assert not isinstance(error, str), (case, error)
            assert error < 1e-12, (case, error)


def test_what_forwards_would_change_otherwise_is_refused_on_every_rank():
    refused = REFUSED
    cases = [case for case, _ in refused]
    for rank, found in enumerate(run_ranks(trained, 2, cases, timeout=200)):
        for (case, match), said in zip(refused, found, strict=True):
            assert isinstance(said, str), (rank, case, said)
            assert re.search(match, said, re.DOTALL), (rank, case, said)
            assert "Error: " in said, (rank, case, said)


def test_what_forwards_change_otherwise_is_refused_if_it_changes_what_they_compute():
    cases = [("Counted", sizes, 2) for sizes in (DP, CP, TP, PP)]
    for found in run_ranks(trained, 2, cases, timeout=200):
        for case, said in zip(cases, found, strict=True):
            assert "computes something else on" in str(said), (case, said)


def test_one_process_with_several_micro_batches_is_looked_at_too():
    (right,) = trained([("Frequent", ONE, 1)])
    assert right < 1e-12
    frequent, shrinking = trained([("Frequent", ONE, 2), ("Shrinking", ONE, 2)])
    assert FREQUENT in frequent
    assert "changes parameter scale. " in shrinking


class Patient(Base):
    """Begins something after a number of its forwards."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, input_ids):
        self.calls += 1
        return super().forward(input_ids) * (2.0 if self.calls > 2 else 1.0)


def patient(sizes):
    """Return the warnings of a first step."""
    manager = setup_process_group_manager(**sizes)
    try:
        plain = Patient().double()
        model = parallelize(plain, manager, plan=PLAN)
        cut = shard_global_batch(batch(0), 2, model=model)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            train_step(model, cut)
        return [str(each.message) for each in heard]
    finally:
        destroy_process_group_manager()


def test_what_counts_forwards_is_told():
    for sizes in (ONE, DP, TP, PP):
        of_ranks = run_ranks(patient, 2, sizes) if sizes != ONE else [patient(sizes)]
        assert any("counts in attribute" in text for text in of_ranks[0]), sizes


def test_later_steps_with_several_micro_batches_are_looked_at_first():
    manager = setup_process_group_manager()
    try:
        model = parallelize(made("Frequent"), manager)
        train_step(model, shard_global_batch(batch(0), 1, manager))
        model.zero_grad()
        with pytest.raises(ScaletorchError, match=FREQUENT):
            train_step(model, shard_global_batch(batch(1), 2, manager))
    finally:
        destroy_process_group_manager()
