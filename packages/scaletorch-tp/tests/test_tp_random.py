"""Dropout: alike on whole activations, each rank's own on shards, the same when recomputed."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed import group
from torch.utils.checkpoint import checkpoint

from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.tensor_parallel import (
    Divide,
    apply_tensor_parallel,
    common_random,
    explain,
    sharded_random,
)
from scaletorch.parallel.tensor_parallel.regions import random

HIDDEN, HEADS = 16, 4
MASKS = {"whole": ("embedding", "attended", "whole"), "sharded": ("attention", "mlp")}


class Recorded(nn.Dropout):
    """Dropout that remembers the mask of every forward."""

    def __init__(self, name, log):
        super().__init__(0.5)
        self.name, self.log = name, log

    def forward(self, x):
        # The draws do not depend on x, and so not on what its ranks' shapes are.
        mask = super().forward(torch.ones(64, dtype=x.dtype))
        self.log.append((self.name, mask))
        return x * mask.repeat(-(-x.numel() // 64))[: x.numel()].view_as(x)


class Attention(nn.Module):
    def __init__(self, log):
        super().__init__()
        self.num_heads = HEADS
        self.query, self.value = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.common = Recorded("whole", log)
        self.drop, self.after = Recorded("attention", log), Recorded("attended", log)

    def forward(self, x):
        x = self.common(x)
        scores = self.drop(self.query(x).unflatten(-1, (self.num_heads, -1)).softmax(-1))
        mixed = scores * self.value(x).unflatten(-1, (self.num_heads, -1))
        return self.after(self.out(mixed.flatten(-2)))  # minGPT's: dropout of whole activations


class Block(nn.Module):
    def __init__(self, log):
        super().__init__()
        self.attn = Attention(log)
        self.up, self.down = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)
        self.drop = Recorded("mlp", log)

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.down(self.drop(self.up(x)))


class Model(nn.Module):
    def __init__(self, recompute=None):
        super().__init__()
        self.log, self.num_heads = [], HEADS  # counted further out than where heads are, too
        self.drop = Recorded("embedding", self.log)
        self.blocks = nn.ModuleList([Block(self.log) for _ in range(2)])
        self.recompute = recompute

    def forward(self, x):
        x = self.drop(x)
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return x


PLAN = {
    "": Divide("num_heads"), "**.attn": Divide("num_heads"), "**.attn.query": "column",
    "**.attn.value": "column", "**.attn.out": "row", "**.attn.common": "replicate",
    "**.up": "column", "**.blocks.*.drop": "sharded", "**.down": "row",
}  # fmt: skip


def make(recompute=None):
    torch.manual_seed(1)
    return Model(recompute)


def masks_of(recompute, training=True, seed=7):
    model = apply_tensor_parallel(make(recompute), PLAN, group.WORLD).train(training)
    assert model.num_heads == HEADS // 2
    torch.manual_seed(seed)
    x = torch.randn(2, 3, HIDDEN, requires_grad=True)
    model(x)
    out, after = model(x), torch.rand(3)
    first = list(model.log)
    out.sum().backward()
    return first, model.log[len(first) :], after, x.grad


def test_masks_agree_on_whole_activations_and_differ_on_shards():
    (first, _, after, grad), (second, _, other_after, other_grad) = run_ranks(masks_of, 2, None)
    names = [name for name, _ in first]
    assert names == [name for name, _ in second]
    assert len(names) == 2 * (1 + 2 * 4)
    for (name, mine), (_, theirs) in zip(first, second, strict=True):
        assert torch.equal(mine, theirs) == (name in MASKS["whole"]), name
    masks = [mask for _, mask in first + [m for m in second if m[0] in MASKS["sharded"]]]
    for index, mask in enumerate(masks):  # no two draws are alike, in either stream
        assert not any(torch.equal(mask, other) for other in masks[:index])
    assert torch.equal(after, other_after)
    assert torch.equal(grad, other_grad)


@pytest.mark.parametrize("form", ["reentrant", "non-reentrant"])
def test_recomputation_draws_the_same(form):
    results = [run_ranks(masks_of, 2, each) for each in (form, None)]
    for (first, again, after, grad), expected in zip(*results, strict=True):
        assert len(again) >= 8 - (form == "non-reentrant")
        forward = [(n, m) for n, m in first[-8:]]  # the blocks of the forward that is recomputed
        order = forward[4:] + forward[:4]  # the last block first
        for (name, mask), (other, recomputed) in zip(again, order[: len(again)], strict=True):
            assert name == other
            assert torch.equal(mask, recomputed), name
        assert all(torch.equal(a[1], b[1]) for a, b in zip(first, expected[0], strict=True))
        assert torch.equal(after, expected[2])
        assert torch.equal(grad, expected[3])


@distributed_test(world_size=2)
def test_evaluation_draws_nothing():
    model = apply_tensor_parallel(make(), PLAN, group.WORLD).eval()
    before = torch.get_rng_state()
    model(torch.ones(2, 3, HIDDEN))
    assert torch.equal(torch.get_rng_state(), before)


def test_one_rank_is_the_plain_model():
    plain = make()
    model = apply_tensor_parallel(copy.deepcopy(plain), PLAN)
    assert type(model.blocks[0].attn) is Attention
    assert type(model.blocks[0].drop) is Recorded
    results = []
    for candidate in (plain, model):
        torch.manual_seed(4)
        with sharded_random():
            results.append((candidate(torch.ones(2, 3, HIDDEN)), torch.rand(4)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def contexts():
    """Draws from nested contexts, by where they belong."""
    torch.manual_seed(0)
    ours, common = [], []
    with sharded_random(group.WORLD):
        ours.append(torch.rand(4))
        with common_random():
            common.append(torch.rand(4))
            with sharded_random(group.WORLD):
                ours.append(torch.rand(4))
            common.append(torch.rand(4))
        ours.append(torch.rand(4))
        with sharded_random(group.WORLD):
            ours.append(torch.rand(4))
            with common_random(), common_random():
                common.append(torch.rand(4))
        ours.append(torch.rand(4))
    common.append(torch.rand(4))
    before = torch.get_rng_state()
    with pytest.raises(OSError, match="disk"), common_random(), sharded_random(group.WORLD):
        raise OSError("disk")
    with sharded_random(group.WORLD):
        ours.append(torch.rand(4))
    common.append(torch.rand(4))
    assert not torch.equal(before, torch.get_rng_state())
    return ours, common


def test_contexts_nest_and_restore():
    results = run_ranks(contexts, 3)
    drawn = [draw for ours, _ in results for draw in ours] + results[0][1]
    assert len({tuple(draw.tolist()) for draw in drawn}) == len(drawn) == 3 * 6 + 5
    for _, common in results:
        assert all(torch.equal(a, b) for a, b in zip(common, results[0][1], strict=True))


@pytest.mark.parametrize("name", ["blocks.0.attn", "blocks.0.drop", "blocks.0.attn.common"])
def test_a_replaced_forward_is_refused(name):
    model = make()
    module = model.get_submodule(name)
    module.forward = module.forward
    with pytest.raises(ValueError, match=rf"'{name}'.*forward was replaced"):
        explain(model, 2, PLAN)


class Accelerator:
    """What torch's module of an accelerator has of its generator."""

    def __init__(self):
        self.state = torch.zeros(2)

    def get_rng_state(self):
        return self.state.clone()

    def set_rng_state(self, state):
        self.state = state

    def manual_seed(self, seed):
        self.state = torch.full((2,), float(seed))


def test_an_accelerators_generator_is_kept_as_the_cpus_is(monkeypatch):
    used = Accelerator()
    monkeypatch.setattr(random, "_accelerator", lambda: used)
    before = random._states()
    random._seed(7)
    assert used.state.tolist() == [7, 7]
    assert torch.initial_seed() == 7
    random._set_states(before)
    assert used.state.tolist() == [0, 0]
    assert torch.equal(torch.get_rng_state(), before[0])
