"""Attention over divided sequences is that of the whole, by every method, layout and mask."""

from functools import cache
from importlib import import_module
from random import Random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dense_attention import attended, joined, random_tensors, share, visible

from scaletorch.dist.errors import InvalidArgumentError, MismatchError, StateError
from scaletorch.dist.testing import distributed_test, relative_error, run_ranks, worst
from scaletorch.parallel.context_parallel import LAYOUTS, attention
from scaletorch.parallel.context_parallel.cp_comms import Ring

METHODS = ("ring", "all_gather", "ulysses", "hybrid")


def differentiated(cases):
    """Return each case's largest error of the output and the gradients, relative."""
    errors = []
    for method, kind, shape, mask, scale, softcap, sink in cases:
        heads, kv_heads, length, *_ = shape
        q, k, v, grad = random_tensors(heads, kv_heads, length, *shape[2:4], value_dim=shape[4],
                                       batch=shape[5])  # fmt: skip
        sinks = torch.linspace(-2, 3, heads, dtype=q.dtype) if sink else None
        layout = LAYOUTS[kind](length, dist.get_world_size())
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        both = [None if sinks is None else sinks.clone().requires_grad_() for _ in range(2)]
        expected, _ = attended(*leaves, visible(length, *mask), scale, softcap, both[0])
        expected.backward(grad)
        own = [share(x, layout).requires_grad_() for x in (q, k, v)]
        causal, window, documents = mask
        out = attention(
            *own, causal=causal, window=window, cu_seqlens=documents, scale=scale, softcap=softcap,
            sinks=both[1], layout=layout, method=method, group=dist.group.WORLD,
        )  # fmt: skip
        out.backward(share(grad, layout))
        found = [out.detach(), *(x.grad for x in own)]
        padding = layout.positions(dist.get_rank()) >= length
        assert not any(x[:, :, padding].any() for x in found), "padding sees nothing, gives nothing"
        wanted = [expected.detach(), *(x.grad for x in leaves)]
        pairs = [(joined(a, layout), b) for a, b in zip(found, wanted, strict=True)]
        if sinks is not None:
            dist.all_reduce(both[1].grad)  # each rank's is its part
            pairs.append((both[1].grad, both[0].grad))
        errors.append(worst(relative_error(a, b, scale=b.abs().clamp_min(1.0)) for a, b in pairs))
    return errors


def draw(random, world_size):
    """Return one case: method, layout, sizes, the mask, and what becomes of scores."""
    method = random.choice(METHODS)
    kv_heads = random.choice([1, 2, 3, 4])
    heads = kv_heads * random.choice([1, 2])
    if method == "ulysses" and random.random() < 0.7:  # others go round a ring
        kv_heads = random.choice([1, world_size, 2 * world_size])
        heads = 2 * max(kv_heads, world_size)
    length = random.randint(1, 40)
    cuts = {random.randint(1, length) for _ in range(random.randint(0, 4))}
    documents = random.choice([None, (0, *sorted(cuts - {length}), length)])
    window = random.choice([None, random.randint(1, length + 2)])
    dims = random.choice([(4, 4), (8, 8), (8, 4), (4, 8)])  # of keys and of values
    shape = (heads, kv_heads, length, length, *dims, random.randint(1, 2))
    mask = (random.random() < 0.5, window, documents)
    scale = random.choice([None, None, 0.3, 0.0, -0.5])  # at two of them fused kernels are wrong
    softcap = random.choice([None, 0.7, 20])
    return method, random.choice(list(LAYOUTS)), shape, mask, scale, softcap, random.random() < 0.5


COUNTS = {1: 100, 2: 100, 3: 100, 4: 60, 6: 20, 8: 20}  # world size -> cases


@pytest.mark.parametrize("world_size", COUNTS)
def test_every_method_layout_and_mask(world_size):
    random = Random(world_size)
    cases = [draw(random, world_size) for _ in range(COUNTS[world_size])]
    for errors in run_ranks(differentiated, world_size, cases, timeout=200):
        for case, error in zip(cases, errors, strict=True):
            assert error < 1e-12, case


def repeated():
    """Run forward and backward twice by each method; return whether every bit is the same."""
    layout = LAYOUTS["zigzag"](64, dist.get_world_size())
    *leaves, grad = (
        share(x, layout) for x in random_tensors(4, 4, 64, 64, 16, batch=2, dtype=torch.bfloat16)
    )
    found = {}
    for method in METHODS:
        both = []
        for _ in range(2):
            q, k, v = (x.clone().requires_grad_() for x in leaves)
            options = {"layout": layout, "method": method, "group": dist.group.WORLD}
            out = attention(q, k, v, causal=True, cu_seqlens=(0, 22, 50, 64), **options)
            out.backward(grad)
            both.append([out.detach(), q.grad, k.grad, v.grad])
        found[method] = all(map(torch.equal, *both))
    return found


def test_every_bit_repeats():
    assert run_ranks(repeated, 4) == [dict.fromkeys(METHODS, True)] * 4


ROUNDED = [("zigzag", True, 1), ("stripe", True, 2), ("contiguous", False, 2)]
PAIRED = [(method, (*case, torch.bfloat16)) for method in METHODS for case in ROUNDED]
PAIRED += [("ring", (*case, torch.float16)) for case in ROUNDED]
SOME = [pair for at, pair in enumerate(PAIRED) if at % 2 == (pair[0] in ("ulysses", "hybrid"))]


@cache
def one_process(causal, sharpness, dtype):
    """Return the inputs, and results of one process in float64 and by PyTorch in 16 bits."""
    q, k, v, grad = random_tensors(8, 8, 512, 512, 32, dtype=dtype)
    q = q * sharpness
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    alone = [x.clone().requires_grad_() for x in (q, k, v)]
    one = F.scaled_dot_product_attention(*alone, is_causal=causal)
    expected, _ = attended(*exact, visible(512, causal))
    one.backward(grad)
    expected.backward(grad.double())
    wanted = [expected.detach(), *(x.grad for x in exact)]
    return (q, k, v, grad), wanted, [one.detach(), *(x.grad for x in alone)]


def rounded(method, kind, *case):
    """Return the errors in 16 bits against float64, of ranks and of PyTorch in one process."""
    (*qkv, grad), wanted, theirs = one_process(*case)
    layout = LAYOUTS[kind](512, dist.get_world_size())
    own = [share(x, layout).requires_grad_() for x in qkv]
    options = {"causal": case[0], "layout": layout, "method": method}
    out = attention(*own, **options, group=dist.group.WORLD)
    out.backward(share(grad, layout))
    ours = [joined(x.detach(), layout) for x in (out, *(x.grad for x in own))]
    return [[float((a - b).norm()) for a, b in zip(x, wanted, strict=True)] for x in (ours, theirs)]


def all_rounded(pairs):
    return [rounded(method, *case) for method, case in pairs]


@pytest.mark.parametrize(("world_size", "pairs"), [(2, PAIRED), (8, SOME)])
def test_16_bits_lose_little_more_than_one_process(world_size, pairs):
    for found in run_ranks(all_rounded, world_size, pairs, timeout=200):
        for (method, _), (ours, theirs) in zip(pairs, found, strict=True):
            assert all(a <= 1.25 * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)
            # Where no head is divided nothing is merged, and every bit is PyTorch's.
            assert method != "ulysses" or ours[0] == theirs[0]


DIFFERENT = {  # what all but rank 1 say, what that says, and a part of the message
    "method": ({"method": "ring"}, {"method": "all_gather"}, "method all_gather, subgroups of 1"),
    "window": ({"window": 3}, {"window": 4}, "window 4"),
    "no window": ({}, {"window": 1}, "window 1"),
    "softcap": ({"softcap": 3}, {"softcap": 4}, "softcap 4"),
    "sinks": ({}, {"sinks": torch.ones(4)}, "sinks True"),
    "documents": ({"cu_seqlens": (0, 5, 24)}, {"cu_seqlens": (0, 6, 24)}, "documents of digest"),
    "layout": ({"layout": "zigzag"}, {"layout": "stripe"}, "stripe layout of 24 positions"),
    "causal": ({}, {"causal": True}, "causal True"),
    "scale": ({}, {"scale": 0.5}, "scale 0.5"),
    "length": ({}, lambda *qkv: [x[:, :, :5] for x in qkv], "[1, 4, 5, 8]"),
    "dtype": ({}, lambda *qkv: [x.bfloat16() for x in qkv], "torch.bfloat16"),
    "heads": ({}, lambda q, k, v: (q, k[:, :2], v[:, :2]), "2 key/value heads of head dim 8"),
    "values": ({}, lambda q, k, v: (q, k, v[..., :5]), "4 key/value heads of head dim 5"),
    "gradient": ({}, lambda q, k, v: (q.requires_grad_(), k, v), "needs gradient True"),
}


def differing(name):
    given, other, _ = DIFFERENT[name]
    tensors, group = random_tensors(4, 4, 8, 8, 8)[:3], dist.new_group()
    if dist.get_rank() == 1:
        tensors = other(*tensors) if callable(other) else tensors
        given = given if callable(other) else other
    with pytest.raises(MismatchError) as caught:
        attention(*tensors, **{"layout": "contiguous"} | given, group=group)
    # The group is still usable: nothing had been sent.
    attention(*random_tensors(1, 1, 2, 2, 4)[:3], group=group)
    return str(caught.value)


def all_differing():
    return {name: differing(name) for name in DIFFERENT}


def test_ranks_that_differ_are_told_on_every_rank():
    for rank, messages in enumerate(run_ranks(all_differing, 3)):
        for name, message in messages.items():
            assert "the ranks disagree on this call of context-parallel attention" in message
            assert "rank 1 differs from ranks 0, 2" in message
            assert f"this is rank {rank}" in message
            assert DIFFERENT[name][2] in message, name


FINITE = "must be a finite number"
UNFIT = {  # of two ranks with three heads and eight positions each
    "method": ({"method": "rings"}, "method must be one of 'auto', 'ring'"),
    "layout": ({"layout": "snake"}, "layout must be a Layout or one of contiguous"),
    "another layout": (
        {"layout": LAYOUTS["zigzag"](20, 2)}, "gives each of 2 ranks 10, .*each of 2 ranks has 8"
    ),
    "documents": ({"cu_seqlens": (0, 8)}, "must end with the length of the sequences, 16"),
    "window": ({"window": 0}, "window must be at least 1"),
    "window True": ({"window": True}, "window must be at least 1, an integer.* it is True"),
    "window float": ({"window": 2.0}, "it is 2.0"),
    "softcap": ({"softcap": 0.0}, f"softcap {FINITE} above 0, or None; it is 0.0"),
    "softcap text": ({"softcap": "x"}, f"softcap {FINITE} above 0, or None; it is 'x'"),
    "causal None": ({"causal": None}, "causal must be True or False; it is None"),
    "scale text": ({"scale": "x"}, f"scale {FINITE}, or None; it is 'x'"),
    "scale nan": ({"scale": float("nan")}, f"scale {FINITE}, or None; it is nan"),
    "scale True": ({"scale": True}, "it is True"),
    "sinks": (
        {"sinks": torch.ones(2)}, r"one floating number for each of the 3 query heads.*got \[2\]"
    ),
    "sinks of integers": ({"sinks": torch.ones(3).int()}, "one floating number .* torch.int32"),
}  # fmt: skip


@distributed_test(2)
def test_what_does_not_fit_is_refused():
    q, k, v, _ = random_tensors(3, 3, 8, 8, 8)
    for options, message in UNFIT.values():
        with pytest.raises(InvalidArgumentError, match=message):
            attention(q, k, v, **{"layout": "contiguous"} | options, group=dist.new_group())
    for method in METHODS:
        x = random_tensors(4, 4, 8, 8, 8)[0].requires_grad_()
        out = attention(x, x, x, method=method, group=dist.group.WORLD)
        with pytest.raises(StateError, match="no second derivatives"):
            torch.autograd.grad(out.sum(), x, create_graph=True)


def refused_on_one():
    q, k, v, _ = random_tensors(4, 4, 8, 8, 8)
    last = dist.get_rank() == 2
    with pytest.raises((InvalidArgumentError, MismatchError), match=r"scale must be|its own error"):
        attention(q, k, v, scale="x" if last else 1.0, group=dist.group.WORLD)
    with pytest.raises(InvalidArgumentError if last else MismatchError) as caught:
        attention(q, k[:, :, :7] if last else k, v, group=dist.group.WORLD)
    return str(caught.value)


def test_a_call_that_one_rank_refuses_ends_on_every_rank():
    first, second, third = run_ranks(refused_on_one, 3)
    assert "k and v must have one shape" in third
    for message in (first, second):
        assert "rank 2 cannot take part in this call of context-parallel attention" in message


class Group:
    """A process group, which the cache of compared calls refers to weakly."""


@pytest.fixture
def compare(monkeypatch):
    """Return a function that compares a call, and the list of calls that it compared."""
    compared, ring = [], Ring(Group(), (0, 1), 0)
    module = import_module("scaletorch.parallel.context_parallel.attention")
    monkeypatch.setattr(module, "agree", lambda _, mine, *rest, **error: compared.append(mine))
    monkeypatch.setattr(module, "_MANY", 3)
    return lambda call, on: module.require_agreement((call,), torch.device(on), ring), compared


def test_off_the_cpu_a_call_is_compared_if_it_is_new_or_was_long_ago(compare):
    call, compared = compare
    for device, times in (("cuda", 1), ("cpu", 3)):
        compared.clear()
        for _ in range(3):
            call("the same", device)
        assert len(compared) == times
    compared.clear()
    for name in "01233301":  # the fourth takes the place of the first three
        call(name, "cuda")
    assert [name for (name,) in compared] == [*"012301"]
