"""Random training programs do what a plain loop in one process does, by every wrapper and stage."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as c10d
from torch import nn

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.data_parallel import (
    DataParallelBucket,
    DataParallelNaive,
    clip_grad_norm_,
    shard_optimizer,
    whole_gradients,
)

PARTS = 4
NAIVE = -1


class Parts(nn.Module):
    """Layers of which each call uses some; tied, scalar, unused and frozen parameters."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(5, 5, bias=at % 2 == 0) for at in range(PARTS))
        self.parts[3].weight = self.parts[1].weight
        self.scale, self.unused = nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.ones(3))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, x, used):
        x = self.frozen(x) * self.scale
        for at in used:
            x = torch.tanh(self.parts[at](x)) + x
        return x


@dataclass
class Program:
    """One program's models: ours on this rank, and the plain one that does what all ranks do."""

    draw: random.Random
    stage: int  # of the sharded optimizer; 0 is none, as is NAIVE, with the other wrapper
    model: DataParallelBucket | DataParallelNaive = field(init=False)
    unsummed: set[str] = field(default_factory=set)  # gradients of no_sync alone
    own: bool = False  # whether what is put into a gradient now is a rank's own
    steps: int = 0

    def __post_init__(self):
        torch.manual_seed(self.draw.randrange(2**31))
        self.plain = Parts().double()
        copied, group = copy.deepcopy(self.plain), c10d.group.WORLD
        size = self.draw.choice([8, 40, 2**20, None])
        if self.stage == NAIVE or size is None:
            self.model = DataParallelNaive(copied, group)
        else:
            self.model = DataParallelBucket(copied, bucket_size=size, group=group)
        make = self.draw.choice([sgd, adam])
        self.ours, self.theirs = make(self.model.parameters()), make(self.plain.parameters())
        if self.stage > 0:
            overlap = self.draw.random() < 0.5
            shard_optimizer(self.ours, self.model, stage=self.stage, overlap=overlap)

    @property
    def pairs(self):
        """Names, our parameters and the plain ones."""
        ours, every = dict(self.model.named_parameters()), self.plain.named_parameters()
        return [(n, ours[n], each) for n, each in every if not n.startswith("frozen")]

    def backward(self, synced):
        ranks = c10d.get_world_size()
        parts = enumerate(self.plain.parts)
        trained = [at for at, each in parts if any(p.requires_grad for p in each.parameters())]
        if not trained:  # no rank could run a backward
            return
        grads = {name for name, each in self.plain.named_parameters() if each.grad is not None}
        for rank in range(ranks):
            used = [at for at in range(PARTS) if self.draw.random() < 0.7]
            used = sorted({*used, self.draw.choice(trained)})
            x = torch.randn(2, 5, generator=torch.Generator().manual_seed(self.draw.randrange(99)))
            scale = self.draw.choice([1.0, 1.0, 0.0])  # a rank without any valid token
            for model in [self.plain, *([self.model] if rank == c10d.get_rank() else [])]:
                loss = (model(x.double(), used).square() * scale).sum()
                if model is self.plain or synced:
                    loss.backward()
                elif rank % 2:
                    model.require_backward_grad_sync = False
                    loss.backward()
                    model.require_backward_grad_sync = True
                else:
                    with model.no_sync():
                        loss.backward()
        self.own = not synced and self.stage < 2
        if not self.own:
            self.unsummed = set()
        else:
            now = {name for name, each in self.plain.named_parameters() if each.grad is not None}
            self.unsummed |= (now - grads) | {""}

    def sync(self):
        self.backward(synced=True)

    def accumulate(self):
        self.backward(synced=False)

    def zero_grad(self):
        to_none = self.draw.random() < 0.5
        self.draw.choice([self.model, self.ours]).zero_grad(set_to_none=to_none)
        self.theirs.zero_grad(set_to_none=to_none)
        self.unsummed = set() if to_none else self.unsummed - {""}

    def reset(self):
        self.model.reset()
        self.theirs.zero_grad()
        self.unsummed, self.own = set(), False

    def freeze(self):
        _, mine, plain = self.draw.choice(self.pairs)
        mine.requires_grad_(not plain.requires_grad)
        plain.requires_grad_(not plain.requires_grad)

    def drop(self):
        _, mine, plain = self.draw.choice(self.pairs)
        mine.grad = plain.grad = None

    def replace(self):
        if self.own:
            return
        _, mine, plain = self.draw.choice(self.pairs)
        value = self.draw.random()
        mine.grad, plain.grad = torch.full_like(mine, value), torch.full_like(plain, value)

    def clip(self):
        order = self.draw.choice([1.0, 2.0, 3.0, float("inf")])
        norm = clip_grad_norm_(self.model, 0.5, c10d.group.WORLD, norm_type=order)
        expected = nn.utils.clip_grad_norm_(self.plain.parameters(), 0.5, norm_type=order)
        torch.testing.assert_close(norm, expected.to(norm.dtype), rtol=1e-10, atol=1e-12)

    def look(self):
        one = self.draw.choice(self.pairs)[0]
        found, alone = whole_gradients(self.model), whole_gradients(self.model, [one])
        assert alone.keys() == found.keys() & {one}
        for name, _, plain in self.pairs:
            assert (plain.grad is None) == (name not in found), name
            if plain.grad is not None:
                torch.testing.assert_close(found[name], plain.grad, rtol=1e-9, atol=1e-12)
                torch.testing.assert_close(alone.get(name, found[name]), found[name])

    def differentiate(self):
        """Call torch.autograd.grad on one rank alone, which leaves gradients as they are."""
        used, rank = self.draw.sample(range(PARTS), 2), self.draw.randrange(2)
        trained = [each for at in used for each in self.model.module.parts[at].parameters()]
        trained = [each for each in dict.fromkeys(trained) if each.requires_grad]
        if trained and self.stage <= 0 and c10d.get_rank() == rank:
            out = self.model(torch.ones(1, 5).double(), used).sum()
            torch.autograd.grad(out, trained, create_graph=True)

    def step(self):
        self.ours.step()
        self.theirs.step()
        self.steps += 1
        for name, value in self.model.state_dict().items():
            expected = self.plain.state_dict()[name]
            torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-11, msg=name)

    def step_of_closure(self):
        """Step with a closure that runs backward and changes gradients."""

        def closure():
            self.zero_grad()
            self.sync()
            self.draw.choice([self.drop, self.replace, self.freeze])()
            return 0.0

        if self.draw.random() < 0.5:
            self.ours.step(closure)
        else:
            self.ours.step(closure=closure)
        self.theirs.step()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


ALWAYS = ["sync", "sync", "sync", "accumulate", "zero_grad", "reset", "freeze", "differentiate"]
SUMMED = ["drop", "replace", "clip", "look", "step", "step", "step_of_closure"]


def run_programs(count, stage):
    for seed in range(count):
        program = Program(random.Random(seed), stage)
        done = []
        try:
            for _ in range(program.draw.randrange(6, 25)):
                names = ALWAYS if program.unsummed else ALWAYS + SUMMED
                done.append(program.draw.choice(names))
                getattr(program, done[-1])()
            if not program.unsummed:
                program.step()
        except Exception as error:
            error.add_note(f"program {seed} of stage {stage}: {done}")
            raise


@pytest.mark.parametrize(
    ("ranks", "stage"), [(1, 0), (2, NAIVE), (4, NAIVE), (4, 0), (2, 0), (2, 1), (2, 2)]
)
def test_random_programs_train_as_a_plain_loop(ranks, stage):
    run_ranks(run_programs, ranks, 25, stage, timeout=200)
