"""A plain model under apply_context_parallel: gradients, recomputation, what is refused."""

from __future__ import annotations

import copy
import inspect
import re
import threading
from functools import partial
from itertools import pairwise, product

import pytest
import torch
import torch.distributed as c10d
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from scaletorch.dist.errors import InvalidArgumentError, StateError
from scaletorch.dist.testing import distributed_test, relative_error, run_ranks, worst
from scaletorch.parallel.context_parallel import (
    ShardedSequences,
    apply_context_parallel,
    shard_batch,
)
from scaletorch.parallel.context_parallel.methods import METHODS
from scaletorch.parallel.context_parallel.models.transformers_mask import Pattern

VOCAB, WIDTH, HEADS, KV_HEADS = 17, 16, 4, 2
RECOMPUTE = {
    "none": lambda block, *args: block(*args),
    "plain": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "closure": lambda block, *args: checkpoint(lambda *a: block(*a), *args, use_reentrant=False),
    "nested": lambda block, *args: checkpoint(
        lambda *a: checkpoint(block, *a, use_reentrant=False), *args, use_reentrant=True
    ),
}


def _rope(x, position_ids):
    half = x.shape[-1] // 2
    frequencies = 100.0 ** -(torch.arange(half, dtype=x.dtype) / half)
    angles = position_ids[:, None, :, None] * frequencies
    left, right = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Attention(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.causal = causal
        head = WIDTH // HEADS
        self.q = nn.Linear(WIDTH, HEADS * head)
        self.k = nn.Linear(WIDTH, KV_HEADS * head)
        self.v = nn.Linear(WIDTH, KV_HEADS * head)
        self.o = nn.Linear(HEADS * head, WIDTH)

    def forward(self, x, position_ids):
        q, k, v = (
            part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        q, k = _rope(q, position_ids), _rope(k, position_ids)
        out = scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, scale=0.4, enable_gqa=True
        )
        return self.o(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention(causal)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x, position_ids):
        x = x + self.attention(self.norm(x), position_ids)
        return x + self.mlp(x)


class Model(nn.Module):
    """A decoder that knows nothing of parallelism."""

    def __init__(self, recompute="none", causal=True):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block(causal) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.recompute = recompute

    def forward(self, input_ids, position_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = RECOMPUTE[self.recompute](layer, x, position_ids)
        return self.head(x)


def _model(recompute="none", causal=True):
    torch.manual_seed(1)
    return Model(recompute, causal).double()


def _loss(model, batch, count):
    logits = model(batch["input_ids"], position_ids=batch["position_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / count


def _step(recompute, in_thread, length, layout, method):
    """Return the largest relative difference of loss and gradients to one process."""
    random = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (2, length + 1), generator=random)
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    reference = _model()
    expected = _loss(reference, shard_whole(batch), 2 * length)
    expected.backward()

    model = apply_context_parallel(
        _model(recompute), c10d.group.WORLD, layout=layout, method=method
    )
    loss = _loss(model, shard_batch(batch, c10d.group.WORLD, layout=layout), 2 * length)
    if in_thread:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    else:
        loss.backward()
    loss = loss.detach()
    c10d.all_reduce(loss)
    return _worst(model, reference, (loss, expected.detach()))


def _worst(model, reference, *pairs):
    """Return the largest error of given pairs, and of gradients summed over ranks."""
    pairs = [*pairs]
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        c10d.all_reduce(mine.grad)
        pairs.append((mine.grad, theirs.grad))
    return worst(relative_error(mine, theirs) for mine, theirs in pairs)


def shard_whole(batch):
    ids = batch["input_ids"]
    return {**batch, "position_ids": torch.arange(ids.shape[1]).expand_as(ids)}


STEPS = [
    *(("plain", False, 16, "zigzag", method) for method in ("auto", *METHODS)),
    ("plain", False, 16, "stripe", "ring"),
    ("plain", False, 16, "contiguous", "ulysses"),
]
ON_TWO = [
    *((recompute, False, 12, "contiguous", "ring") for recompute in RECOMPUTE),
    ("reentrant", True, 12, "contiguous", "ring"),
]


def _steps(cases):
    return [_step(*case) for case in cases]


@pytest.mark.parametrize(("size", "cases"), [(1, STEPS[:1]), (2, STEPS + ON_TWO), (4, STEPS)])
def test_gradients_equal_one_process(size, cases):
    for errors in run_ranks(_steps, size, cases, timeout=200):
        for case, error in zip(cases, errors, strict=True):
            assert error < 1e-12, case


PACKED = (0, 4, 4, 9, 13)
INSIDE = [
    (causal, documents, recompute, layout)
    for causal in (True, False)
    for documents in (None, PACKED)
    for recompute, layout in (("none", "zigzag"), ("plain", "contiguous"), ("reentrant", "stripe"))
]


def _sums(model, ids, positions, targets):
    """Return the logits, the sum of losses and their number."""
    logits = model(ids, position_ids=positions)
    return logits, F.cross_entropy(logits.mT, targets, reduction="sum"), (targets != -100).sum()


def _inside(causal, documents, recompute, layout):
    """Return the largest difference to one process that runs each document by itself."""
    tokens = torch.randint(VOCAB, (2, 13), generator=torch.Generator().manual_seed(3))
    whole = {"input_ids": tokens, "labels": tokens.masked_fill(tokens % 5 == 0, -100)}
    reference, outs = _model(causal=causal), []
    for start, stop in pairwise(documents or (0, 13)):
        if start < stop:
            ids, labels = (each[:, start:stop] for each in whole.values())
            targets = F.pad(labels[:, 1:], (0, 1), value=-100)
            outs.append(_sums(reference, ids, torch.arange(stop - start)[None], targets))
    logits, sums, counts = zip(*outs, strict=True)
    expected = sum(sums) / sum(counts)
    expected.backward()
    # Shards of a name alone would be of another layout than these sequences.
    model = apply_context_parallel(_model(recompute, causal), c10d.group.WORLD, layout="zigzag")
    cu_seqlens = None if documents is None else torch.tensor(documents)
    sequences = ShardedSequences(13, layout=layout, cu_seqlens=cu_seqlens, group=c10d.group.WORLD)
    mine = sequences.shard(whole)
    with sequences.inside(model), sequences.inside(model):
        own, *figures = _sums(model, mine["input_ids"], mine["position_ids"], mine["labels"])
        loss = sequences.loss(*figures)
        loss.backward()
    outs = sequences.unshard(own.detach()), torch.cat(logits, 1).detach()
    return _worst(model, reference, (loss.detach(), expected.detach()), outs)


def _insides():
    return [_inside(*case) for case in INSIDE]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_inside_of_sequences_of_any_length(size):
    for errors in run_ranks(_insides, size, timeout=200):
        for case, error in zip(INSIDE, errors, strict=True):
            assert error < 1e-12, case


class InDict(Model):
    """Returns its logits in a mapping, whose backward is known by a hook."""

    def forward(self, input_ids, position_ids):
        return {"out": super().forward(input_ids, position_ids)}


def _recomputed(recompute, then):
    """Return gradients of a forward inside sequences, whose backward runs where `then` says."""
    torch.manual_seed(1)
    model = apply_context_parallel(InDict(recompute).double(), c10d.group.WORLD, layout="zigzag")
    sequences, other = (
        ShardedSequences(12, cu_seqlens=documents, group=c10d.group.WORLD)
        for documents in ((0, 5, 12), (0, 4, 12))
    )
    mine = sequences.shard({"input_ids": torch.arange(12)[None]})
    with sequences.inside(model):
        loss = model(**mine)["out"].square().sum()
        if then == "inside":
            loss.backward()
    if then == "outside":
        loss.backward()
    if then == "other":
        with other.inside(model):
            loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def _recompute_in_backward():
    whole = _recomputed("none", "inside")
    for recompute, then in product(("none", "plain", "reentrant"), ("inside", "outside", "other")):
        torch.testing.assert_close(_recomputed(recompute, then), whole)


@pytest.mark.parametrize("size", [1, 2])
def test_recomputation_is_over_the_sequences_of_its_forward(size):
    run_ranks(_recompute_in_backward, size)


@distributed_test(2)
def test_inside_ends_with_its_context():
    """Check that what a model runs inside of ends with the context, and is one at a time."""
    world = c10d.group.WORLD
    model = apply_context_parallel(_model(causal=False), world, layout="zigzag")
    sequences = ShardedSequences(15, group=world)
    batch = sequences.shard({"input_ids": torch.arange(15)[None]})
    args = batch["input_ids"], batch["position_ids"]
    padding = partial(pytest.raises, InvalidArgumentError, match="full attention would see the pad")
    with padding():
        model(*args)
    other, apart = ShardedSequences(17, group=world), nn.Sequential(model)
    with sequences.inside(apart):
        kept = model(*args)
        with pytest.raises(StateError, match="Model runs inside other sequences already"):
            other.inside(model).__enter__()
        assert torch.equal(model(*args), kept)
        with padding():
            copy.deepcopy(model)(*args)
    with pytest.raises(IndexError), sequences.inside(model):
        model(args[0] + VOCAB, args[1])
    with padding():
        model(*args)
    with pytest.raises(StateError, match=r"Model is not context parallel; call apply_context"):
        sequences.inside(_model()).__enter__()
    alone = [c10d.new_group([rank]) for rank in range(c10d.get_world_size())][c10d.get_rank()]
    with pytest.raises(InvalidArgumentError, match=r"over ranks \(0, 1\), and the sequences are"):
        ShardedSequences(16, group=alone).inside(model).__enter__()


def _same_face():
    plain, model = _model(), _model()
    assert apply_context_parallel(model, c10d.group.WORLD) is model
    assert type(model) is Model
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    where = f"on rank {c10d.get_rank()}: "
    for again, words in (
        (model, "the model is context parallel already"),
        (model.layers[0], "the model is context parallel already"),
        (nn.ModuleList([model]), "its submodule 0 is context parallel already"),
    ):
        with pytest.raises(StateError, match=where + words):
            apply_context_parallel(again, c10d.group.WORLD)


def _others_untouched():
    group = c10d.new_group()
    model, other = apply_context_parallel(_model(), group), _model()
    ids = torch.arange(6)[None]
    batch = shard_batch({"input_ids": ids, "labels": ids}, group, layout="contiguous")
    q = torch.ones(1, 2, 3, 4)
    before = other(batch["input_ids"], batch["position_ids"])
    inside = model(batch["input_ids"], batch["position_ids"])
    with pytest.raises(IndexError):
        model(batch["input_ids"] + VOCAB, batch["position_ids"])
    after = other(batch["input_ids"], batch["position_ids"])
    local = F.scaled_dot_product_attention(q, q, q, torch.ones(3, 3, dtype=torch.bool))
    assert torch.equal(before, after)
    assert local.shape == q.shape
    # Rank 0 of a causal sequence sees only itself; rank 1 sees more than a plain model would.
    assert c10d.get_rank() == 0 or not torch.equal(inside, before)


def _deep_copy():
    group = c10d.new_group()
    model = apply_context_parallel(_model(), group)
    batch = shard_batch({"input_ids": torch.arange(8)[None]}, group)
    args = (batch["input_ids"], batch["position_ids"])
    twin = copy.deepcopy(model)
    assert torch.equal(model(*args), twin(*args))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert twin(*args).any()
    assert not model(*args).any()


@distributed_test(2)
def test_names_other_models_and_copies_are_as_before():
    _same_face()
    _others_untouched()
    _deep_copy()


class Calls(nn.Module):
    """A model whose forward is whatever a test says."""

    def __init__(self, call):
        super().__init__()
        self.call = call
        self.mha = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, q):
        return self.call(self, q)

    def attend(self, q, **options):
        return self.mha(q[0], q[0], q[0], **options)


class Attends(torch.autograd.Function):
    """Would attend in its backward again, outside of the model."""

    @staticmethod
    def forward(q):
        return _sdpa(q)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


def _sdpa(q, k=None, **options):
    k = q if k is None else k
    return F.scaled_dot_product_attention(q, k, k, **options)


KEYS = "nn.MultiheadAttention is given a key_padding_mask"
MASK = "nn.MultiheadAttention is given an attn_mask of this rank's shard"

REFUSED = {
    "mask": (lambda _, q: _sdpa(q, attn_mask=torch.ones(3, 3)), "attn_mask must be None"),
    "dropout": (lambda _, q: _sdpa(q, dropout_p=0.1), "dropout_p must be 0, and is 0.1"),
    "cache": (lambda _, q: _sdpa(q[:, :, :1], q), "neither decoding with a cache nor cross"),
    "three dims": (lambda _, q: _sdpa(q[0]), "must be [B, heads, L, D]"),
    "padding": (lambda self, q: self.attend(q, key_padding_mask=q[0, ..., 0] > 0), KEYS),
    "a mask of torch's": (lambda self, q: self.attend(q, attn_mask=torch.ones(3, 3)), MASK),
    "no batch": (lambda self, q: self.mha(*[q[0, 0]] * 3), "sequence without a batch dim"),
    "function": (
        lambda _, q: checkpoint(_sdpa, q, use_reentrant=False),
        "let it call the module around the attention",
    ),
    "reentrant function": (
        lambda _, q: checkpoint(_sdpa, q.requires_grad_(), use_reentrant=True),
        "let it call the module around the attention",
    ),
    "autograd function": (
        lambda _, q: Attends.apply(q),
        "let it call the module around the attention",
    ),
    "by hand": (
        lambda _, q: (q @ q.mT).softmax(-1) @ q,
        "Calls.forward called no F.scaled_dot_product_attention",
    ),
}


@distributed_test(2)
def test_what_cannot_be_exact_is_refused_by_name():
    for call, message in REFUSED.values():
        model = apply_context_parallel(Calls(call), c10d.new_group())
        named = rf"on rank {c10d.get_rank()}.*{re.escape(message)}"
        with pytest.raises((InvalidArgumentError, StateError), match=named):
            model(torch.ones(1, 2, 3, 4))


def test_a_mask_that_a_model_changes_is_refused():
    for by, change in {
        "an index": lambda mask: mask[:, :, :, :3],
        "dtype": lambda mask: mask.dtype,
        "add": lambda mask: torch.ones(2) + mask,
    }.items():
        with pytest.raises(InvalidArgumentError, match=f"changes its attention mask by {by},"):
            change(Pattern(causal=True, window=4))


def _own_forward():
    """A module whose instance already has a forward of its own."""
    plain = Calls(lambda _, q: _sdpa(q, is_causal=True))
    inner = plain.forward
    plain.forward = lambda q: inner(q) + 1
    model = apply_context_parallel(plain, c10d.new_group())
    q = torch.full((1, 1, 2, 4), float(c10d.get_rank()))
    return model(q).unique().tolist()


def test_a_forward_set_on_the_instance_is_kept():
    first, second = run_ranks(_own_forward, 2)
    assert first == [1.0]
    assert 1.0 < second[0] < 2.0


def test_models_may_share_what_holds_nothing_already_there():
    shared = nn.GELU()  # as transformers keeps one for all models of the first GPT
    for _ in range(2):
        model = nn.Sequential(nn.Linear(2, 2), shared)
        assert apply_context_parallel(model) is model
    with pytest.raises(StateError, match="context parallel already"):
        apply_context_parallel(model)


def test_one_process_is_left_as_it_is():
    model = Calls(lambda _, q: _sdpa(q, attn_mask=torch.ones(3, 3, dtype=torch.bool)))
    assert apply_context_parallel(model) is model
    assert model(torch.ones(1, 2, 3, 4)).shape == (1, 2, 3, 4)
    with pytest.raises(StateError, match="context parallel already"):
        apply_context_parallel(model)


@pytest.mark.parametrize(
    ("names", "match"),
    [({"layout": "ring"}, "layout must be .*'ring'"), ({"method": "best"}, "'hybrid'; .* 'best'")],
)
def test_names_that_do_not_exist_are_refused_before_anything_changes(names, match):
    model = _model()
    with pytest.raises(InvalidArgumentError, match=match):
        apply_context_parallel(model, **names)
    apply_context_parallel(model)
