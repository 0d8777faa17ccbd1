"""What mixes positions beside attention is found in a model's first forward, and refused."""

import pytest
import torch
import torch.distributed as c10d
import torch.nn.functional as F
from torch import nn

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.context_parallel import (
    apply_context_parallel,
    positions,
    shard_batch,
    update_rope_for_context_parallel,
)

WIDTH, LENGTH, VOCAB = 12, 16, 20  # no other size is that of a shard


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCAB)
        self.forwards = []  # a number would be put back after the model was asked

    def mixed(self, x):
        return x

    def forward(self, input_ids, position_ids=None):
        self.forwards.append(1)
        x = self.mixed(self.embed(input_ids))
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return {"logits": self.head(x + y.transpose(1, 2).flatten(2))}


class OwnPlace(Model):
    """Knows its place among the ranks, as a model that was written for them may."""

    def mixed(self, x):
        begin = c10d.get_rank() * x.shape[1]
        counted = torch.arange(begin, begin + x.shape[1])
        told = positions(LENGTH, c10d.group.WORLD)
        table = torch.linspace(0, 1, LENGTH)[:, None]
        cos, _ = update_rope_for_context_parallel(table, table, c10d.group.WORLD)
        return x + (counted + told)[:, None] * cos


class Convolved(Model):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3)

    def mixed(self, x):
        return self.conv(F.pad(x.mT, (2, 0))).mT


class Begun(Convolved):
    """A branch that begins as zero."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(WIDTH))

    def mixed(self, x):
        return x + self.scale * super().mixed(x)


class Recurrent(Model):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def mixed(self, x):
        return self.rnn(x)[0]


class Pooled(Model):
    def mixed(self, x):
        return x - x.mean(1, keepdim=True)


class Summed(Model):
    def mixed(self, x):
        return x.cumsum(1)


class Paired(Model):
    """Mixes positions 2i and 2i + 1 alone."""

    def mixed(self, x):
        return x.unflatten(1, (-1, 2)).mean(2).repeat_interleave(2, 1) + x


class Dilated(Model):
    def mixed(self, x):
        return x + x.roll(4, 1)


class Random(Model):
    def mixed(self, x):
        return x + torch.rand_like(x)


def batch(same=False):
    ids = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    ids = torch.zeros_like(ids) if same else ids
    return shard_batch({"input_ids": ids, "labels": ids}, c10d.group.WORLD)


def made(kind):
    torch.manual_seed(0)
    return apply_context_parallel(kind(), c10d.group.WORLD)


def call(model, **options):
    part = batch(**options)
    return model(part["input_ids"], position_ids=part["position_ids"])


NAMES = {
    Convolved: r"module conv \(Conv1d\)",
    Begun: r"module conv \(Conv1d\)",
    Recurrent: r"module rnn \(GRU\)",
    Pooled: r"what module qkv \(Linear\) is given",
    Summed: "what module qkv",
    Paired: "what module qkv",
    Dilated: "what module qkv",
}


def refused():
    for kind, name in NAMES.items():
        model = made(kind)
        with pytest.raises(InvalidArgumentError, match=f"{name}.* computes a position from others"):
            call(model)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_what_mixes_positions_is_refused_on_every_rank():
    run_ranks(refused, 2)


def asked():
    for kind in (Model, OwnPlace):
        model = made(kind).train()
        before = {name: each.clone() for name, each in model.state_dict().items()}
        first = call(model)["logits"]
        assert len(model.forwards) == 3, "it is asked in its first forward"
        torch.testing.assert_close(call(model)["logits"], first, rtol=0, atol=0)
        assert len(model.forwards) == 4
        assert model.training
        torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    model = made(Convolved)
    call(model, same=True)  # nothing is to be seen of one token, so it is asked again
    with pytest.raises(InvalidArgumentError, match="computes a position from others"):
        call(model)
    call(made(Random))  # both times the same numbers
    own = c10d.new_group([c10d.get_rank()], use_local_synchronization=True)
    alone = apply_context_parallel(Convolved(), own)
    assert call(alone)["logits"].shape[1] == LENGTH // 2  # one rank sees all of it


def test_a_model_is_asked_once():
    run_ranks(asked, 2)
