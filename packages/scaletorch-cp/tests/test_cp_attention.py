"""Attention over divided sequences is that of the whole, by every method, layout and mask."""

from random import Random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from scaletorch.dist.errors import InvalidArgumentError, MismatchError
from scaletorch.dist.testing import relative_error, run_ranks, worst
from scaletorch.parallel.context_parallel import LAYOUTS, attention, choose_method

METHODS = ("ring", "all_gather", "ulysses", "hybrid")


def dense(q, k, v, causal, window, documents, scale=None, softcap=None, sinks=None):
    """Return attention of the whole in q's dtype; rows that see nothing do not exist here."""
    length = q.shape[2]
    row, key = torch.arange(length)[:, None], torch.arange(length)[None]
    sees = torch.ones(length, length, dtype=torch.bool)
    if causal:
        sees &= key <= row
    if window is not None:
        sees &= (row - key < window) & (key - row < window)
    if documents is not None:
        which = torch.bucketize(torch.arange(length), torch.tensor(documents), right=True)
        sees &= which[:, None] == which[None]
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~sees, -torch.inf)
    if sinks is None:
        return scores.softmax(-1) @ v
    column = sinks[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


def whole(seed, batch, heads, kv_heads, length, dim, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, h, length, dim) for h in (heads, kv_heads, kv_heads, heads)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def share(x, layout):
    """Return this rank's share [B, H, L, D] of a whole, its padding filled with rubbish."""
    held = layout.positions(dist.get_rank())
    padded = torch.nn.functional.pad(x, (0, 0, 0, layout.padded_length - x.shape[2]), value=9.0)
    return padded[:, :, held].clone()


def joined(x, layout):
    """Return the whole of which every rank has a share."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 2).index_select(2, layout.order())


def differentiated(cases):
    """Return each case's largest error of the output and the gradients, relative."""
    errors = []
    for method, kind, sizes, causal, window, documents, softcap, sink in cases:
        q, k, v, grad = whole(0, *sizes)
        sinks = torch.linspace(-2, 3, sizes[1], dtype=q.dtype) if sink else None
        layout = LAYOUTS[kind](q.shape[2], dist.get_world_size())
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        both = [None if sinks is None else sinks.clone().requires_grad_() for _ in range(2)]
        expected = dense(*leaves, causal, window, documents, None, softcap, both[0])
        expected.backward(grad)
        own = [share(x, layout).requires_grad_() for x in (q, k, v)]
        out = attention(
            *own, causal=causal, window=window, cu_seqlens=documents, softcap=softcap,
            sinks=both[1], layout=layout, method=method, group=dist.group.WORLD,
        )  # fmt: skip
        out.backward(share(grad, layout))
        found = [out.detach(), *(x.grad for x in own)]
        wanted = [expected.detach(), *(x.grad for x in leaves)]
        pairs = [(joined(a, layout), b) for a, b in zip(found, wanted, strict=True)]
        if sinks is not None:
            dist.all_reduce(both[1].grad)  # each rank's is its part
            pairs.append((both[1].grad, both[0].grad))
        errors.append(worst(relative_error(a, b, scale=b.abs().clamp_min(1.0)) for a, b in pairs))
    return errors


def draw(random, world_size):
    """Return one case: method, layout, sizes (B, H, K, L, D), the mask, and what is of scores."""
    method = random.choice(METHODS)
    kv_heads = random.choice([1, 2, 3])
    heads = kv_heads * random.choice([1, 2])
    if method == "ulysses":
        kv_heads = random.choice([1, world_size, 2 * world_size])
        heads = 2 * max(kv_heads, world_size)
    length = random.randint(1, 40)
    cuts = {random.randint(1, length) for _ in range(random.randint(0, 4))}
    documents = random.choice([None, (0, *sorted(cuts - {length}), length)])
    window = random.choice([None, random.randint(1, length + 2)])
    sizes = random.randint(1, 2), heads, kv_heads, length, random.choice([4, 8])
    softcap = random.choice([None, 0.7, 20])
    causal, sink = random.random() < 0.5, random.random() < 0.5
    return method, random.choice(list(LAYOUTS)), sizes, causal, window, documents, softcap, sink


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_method_layout_and_mask(world_size):
    random = Random(world_size)
    cases = [draw(random, world_size) for _ in range(150)]
    for errors in run_ranks(differentiated, world_size, cases):
        for case, error in zip(cases, errors, strict=True):
            assert error < 1e-12, case


def probed(method):
    """Change one token of the second of three documents; return what else changes, bit by bit."""
    documents, changed = (0, 11, 25, 32), 14
    layout = LAYOUTS["zigzag"](32, dist.get_world_size())
    options = {"causal": True, "cu_seqlens": documents, "layout": layout, "method": method}
    results = []
    for step in (0.0, 1.0):
        q, k, v, grad = whole(3, 1, 4, 4, 32, 8, torch.float32)
        for x in (q, k, v, grad):
            x[:, :, changed] += step
        leaves = [share(x, layout).requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, **options, group=dist.group.WORLD)
        out.backward(share(grad, layout))
        results.append([joined(x, layout) for x in (out.detach(), *(x.grad for x in leaves))])
    others = [*range(documents[1]), *range(documents[2], 32)]
    before = range(documents[1], changed)  # of the same document: their outputs see no change
    pairs = zip(*results, strict=True)
    leaks = [not torch.equal(a[:, :, others], b[:, :, others]) for a, b in pairs]
    leaks.append(not torch.equal(results[0][0][:, :, before], results[1][0][:, :, before]))
    return leaks


@pytest.mark.parametrize("method", METHODS)
def test_nothing_leaks_between_documents_nor_backwards(method):
    for leaks in run_ranks(probed, 4, method):
        assert leaks == [False] * 5


def padded(method, kind):
    """Return the largest value in padding, of the output and of the gradients."""
    layout = LAYOUTS[kind](13, dist.get_world_size())
    tensors = whole(4, 1, 4, 4, 13, 8)
    q, k, v, grad = (share(x, layout) for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, causal=True, layout=layout, method=method, group=dist.group.WORLD)
    out.backward(grad)
    outside = layout.positions(dist.get_rank()) >= layout.length
    found = torch.stack([x[:, :, outside] for x in (out.detach(), *(x.grad for x in leaves))])
    return float(found.abs().sum())


@pytest.mark.parametrize("kind", list(LAYOUTS))
@pytest.mark.parametrize("method", METHODS)
def test_padding_sees_nothing_and_has_no_gradient(method, kind):
    assert run_ranks(padded, 4, method, kind) == [0.0] * 4


def repeated(method):
    """Run forward and backward twice; return whether every bit is the same."""
    runs = []
    for _ in range(2):
        q, k, v, grad = whole(5, 2, 4, 4, 64, 16, torch.bfloat16)
        layout = LAYOUTS["zigzag"](64, dist.get_world_size())
        leaves = [share(x, layout).requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, causal=True, layout=layout, method=method, group=dist.group.WORLD)
        out.backward(share(grad, layout))
        runs.append([out, *(x.grad for x in leaves)])
    return all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_results_are_bitwise_repeatable(method):
    assert all(run_ranks(repeated, 4, method))


def rounded(method, kind, causal, sharpness):
    """Return the errors in bfloat16 against float64, of ranks and of PyTorch in one process."""
    q, k, v, grad = whole(6, 1, 8, 8, 512, 32, torch.bfloat16)
    q = q * sharpness
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    alone = [x.clone().requires_grad_() for x in (q, k, v)]
    layout = LAYOUTS[kind](512, dist.get_world_size())
    own = [share(x, layout).requires_grad_() for x in (q, k, v)]
    options = {"causal": causal, "layout": layout, "method": method, "group": dist.group.WORLD}
    out = attention(*own, **options)
    one = F.scaled_dot_product_attention(*alone, is_causal=causal)
    expected = dense(*exact, causal, None, None)
    out.backward(share(grad, layout))
    one.backward(grad)
    expected.backward(grad.double())
    wanted = [expected.detach(), *(x.grad for x in exact)]
    ours = [joined(x.detach(), layout) for x in (out, *(x.grad for x in own))]
    theirs = [one.detach(), *(x.grad for x in alone)]
    return [[float((a - b).norm()) for a, b in zip(x, wanted, strict=True)] for x in (ours, theirs)]


@pytest.mark.parametrize(
    "case", [("zigzag", True, 1), ("stripe", True, 2), ("contiguous", False, 2)]
)
@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_loses_little_more_than_one_process(method, case):
    for world_size in (2, 8):
        for ours, theirs in run_ranks(rounded, world_size, method, *case):
            assert all(a <= 1.25 * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)
            # Where no head is divided nothing is merged, and every bit is PyTorch's.
            assert method != "ulysses" or ours[0] == theirs[0]


def differing(options):
    q, k, v, _ = whole(7, 1, 4, 4, 8, 8)
    options = {"layout": "contiguous"} | options[dist.get_rank()]
    with pytest.raises(MismatchError) as caught:
        attention(q, k, v, **options, group=dist.new_group())
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (({"method": "ring"}, {"method": "all_gather"}), "method all_gather, over parts of 1"),
        (({"window": 3}, {"window": 4}), "window 4"),
        (({"softcap": 3}, {"softcap": 4}), "softcap 4"),
        (({}, {"sinks": torch.ones(4)}), "sinks True"),
        (({}, {"window": 1}), "window 1"),
        (({"cu_seqlens": (0, 5, 16)}, {"cu_seqlens": (0, 6, 16)}), "documents of digest"),
        (({"layout": "zigzag"}, {"layout": "stripe"}), "stripe layout of 16 positions"),
    ],
)
def test_ranks_that_differ_are_told_on_every_rank(options, said):
    first, second = run_ranks(differing, 2, options)
    assert said in first
    assert said in second


def refused(options, message):
    q, k, v, _ = whole(7, 1, 3, 3, 8, 8)
    options = {"layout": "contiguous"} | options
    with pytest.raises(InvalidArgumentError, match=message):
        attention(q, k, v, **options, group=dist.new_group())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "rings"}, "method must be one of 'auto', 'ring'"),
        ({"layout": "snake"}, "layout must be a Layout or one of contiguous"),
        ({"layout": LAYOUTS["zigzag"](20, 2)}, "gives each of 2 ranks 10, .*each of 2 ranks has 8"),
        ({"cu_seqlens": (0, 8)}, "must end with the length of the sequences, 16"),
        ({"window": 0}, "window must be at least 1"),
        ({"softcap": 0.0}, "softcap must be a finite number above 0, or None; it is 0.0"),
        ({"softcap": "x"}, "softcap must be a finite number above 0, or None; it is 'x'"),
        ({"sinks": torch.ones(2)}, r"one floating number for each of the 3 query heads.*got \[2\]"),
        ({"sinks": torch.ones(3).int()}, "one floating number .* torch.int32"),
        ({"method": "ulysses"}, "divides heads over 2 ranks: .* there are 3 and 3"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    run_ranks(refused, 2, options, message)


def test_the_choice_says_why():
    def tensors(heads, kv_heads, length):
        return torch.empty(1, heads, length, 64), torch.empty(1, kv_heads, length, 64)

    assert choose_method(*tensors(8, 8, 4096), 1)[0] == "ring"
    assert choose_method(*tensors(8, 8, 64), 4) == (
        "all_gather", "one message for 64 positions a rank, not one for each hop",
    )  # fmt: skip
    assert choose_method(*tensors(8, 8, 4096), 8)[0] == "ulysses"
    assert choose_method(*tensors(8, 2, 4096), 4)[0] == "ring"


def refused_on_one(_):
    q, k, v, _ = whole(7, 1, 4, 4, 8, 8)
    last = dist.get_rank() == 2
    expected = InvalidArgumentError if last else MismatchError
    with pytest.raises(expected) as caught:
        attention(q, k[:, :, :7] if last else k, v, group=dist.group.WORLD)
    return str(caught.value)


def test_a_call_that_one_rank_refuses_ends_on_every_rank():
    first, second, third = run_ranks(refused_on_one, 3, None)
    assert "k and v must have one shape" in third
    for message in (first, second):
        assert "rank 2 cannot take part in this call of context-parallel attention" in message


def unlike_head_dims(method, dims):
    """Return the largest error of values with another head dim than keys, as some models have."""
    head_dim, value_dim = dims
    q, k, v, _ = whole(8, 1, 4, 4, 16, head_dim)
    v, grad = (x[..., :value_dim] for x in whole(9, 1, 4, 4, 16, 8)[2:])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = dense(*leaves, True, None, None)
    expected.backward(grad)
    layout = LAYOUTS["zigzag"](16, dist.get_world_size())
    own = [share(x, layout).requires_grad_() for x in (q, k, v)]
    out = attention(*own, causal=True, layout=layout, method=method, group=dist.group.WORLD)
    out.backward(share(grad, layout))
    found = [joined(x, layout) for x in (out.detach(), *(x.grad for x in own))]
    wanted = [expected.detach(), *(x.grad for x in leaves)]
    return worst(map(relative_error, found, wanted))


@pytest.mark.parametrize("dims", [(8, 4), (4, 8)], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_values_of_another_head_dim(method, dims):
    assert worst(run_ranks(unlike_head_dims, 2, method, dims)) < 1e-12


def scaled(method, scale):
    """Return the largest error of causal attention with a scale that fused kernels are wrong at."""
    q, k, v, _ = whole(8, 1, 4, 4, 16, 8)
    layout = LAYOUTS["zigzag"](16, dist.get_world_size())
    own = [share(x, layout) for x in (q, k, v)]
    options = {"causal": True, "layout": layout, "method": method, "group": dist.group.WORLD}
    out = joined(attention(*own, scale=scale, **options), layout)
    return relative_error(out, dense(q, k, v, True, None, None, scale))


@pytest.mark.parametrize("scale", [0.0, -0.5])
@pytest.mark.parametrize("method", METHODS)
def test_any_scale(method, scale):
    assert worst(run_ranks(scaled, 2, method, scale)) < 1e-12
