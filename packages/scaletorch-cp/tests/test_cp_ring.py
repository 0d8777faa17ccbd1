"""Ring attention on real ranks against one process in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as c10d
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from scaletorch.dist.errors import InvalidArgumentError, MismatchError
from scaletorch.dist.testing import relative_error, run_ranks, worst
from scaletorch.parallel.context_parallel import cp_comms, ring_attention, shard_sequence

contiguous_shard = partial(shard_sequence, layout="contiguous")

NAMES = ("out", "dq", "dk", "dv")


def _inputs(shape, kv_heads, seed, dtype=torch.float64):
    """Return whole q, k, v and the gradient of the output, in values that dtype can hold."""
    random = torch.Generator().manual_seed(seed)
    batch, _, length, dim = shape
    shapes = [shape, (batch, kv_heads, length, dim), (batch, kv_heads, length, dim), shape]
    return [torch.randn(s, generator=random, dtype=torch.float64).to(dtype) for s in shapes]


def _one_process(tensors, causal, scale=None, backend=SDPBackend.MATH):
    """Return out, dq, dk, dv of scaled_dot_product_attention."""
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    out.backward(tensors[3])
    return [out.detach(), q.grad, k.grad, v.grad]


def _ring(tensors, causal, scale=None, group=None):
    """Return this rank's out, dq, dk, dv."""
    group = group or c10d.group.WORLD
    q, k, v, grad = (contiguous_shard(x, 2, group).clone() for x in tensors)
    before = [x.clone() for x in (q, k, v, grad)]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = ring_attention(*leaves, scale, causal, group, layout="contiguous")
    out.backward(grad)
    for mine, old in zip((q, k, v, grad), before, strict=True):
        assert torch.equal(mine, old), "an input was changed"
    return [out.detach(), *(x.grad for x in leaves)]


def _errors(mine, reference, group=None):
    """Return the largest error of each tensor, relative to the reference's largest value."""
    shards = [contiguous_shard(x, 2, group or c10d.group.WORLD) for x in reference]
    return [
        relative_error(a, b, scale=whole)
        for a, b, whole in zip(mine, shards, reference, strict=True)
    ]


def _against_one_process(shape, kv_heads, causal, dtype, seed, scale=None):
    tensors = _inputs(shape, kv_heads, seed, dtype)
    reference = _one_process([x.double() for x in tensors], causal, scale)
    mine = _ring(tensors, causal, scale)
    assert {x.dtype for x in mine} == {dtype}
    return _errors(mine, reference)


def _assert_close(results, limit):
    for rank, errors in enumerate(results):
        named = dict(zip(NAMES, errors, strict=True))
        assert worst(errors) <= limit, f"rank {rank}: {named}"


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_float64_equals_one_process(size, heads, causal):
    shape = (2, heads[0], 7 * size, 8)
    _assert_close(
        run_ranks(_against_one_process, size, shape, heads[1], causal, torch.float64, size), 1e-12
    )


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("size", [2, 4])
def test_float32_equals_one_process(size, causal):
    shape = (1, 4, 48 * size, 32)
    _assert_close(run_ranks(_against_one_process, size, shape, 2, causal, torch.float32, 5), 1e-5)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    length=st.integers(1, 19),
    dim=st.integers(1, 17),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.31, 2.0]),
)
def test_float64_over_shapes(batch, kv_heads, group, length, dim, causal, scale):
    shape = (batch, kv_heads * group, 3 * length, dim)
    args = (shape, kv_heads, causal, torch.float64, length, scale)
    _assert_close(run_ranks(_against_one_process, 3, *args), 1e-12)


def _rounding(causal, kv_heads, seed):
    """Return each rank's squared error, one process's, and the squared norm, of every tensor."""
    tensors = _inputs((1, 8, 256, 32), kv_heads, seed, torch.bfloat16)
    reference = _one_process([x.double() for x in tensors], causal)
    plain = _one_process(tensors, causal, backend=SDPBackend.FLASH_ATTENTION)
    mine = _ring(tensors, causal)
    shards = [contiguous_shard(x, 2, c10d.group.WORLD) for x in reference]
    return [
        (
            (a.double() - part).square().sum().item(),
            (b.double() - whole).square().sum().item(),
        )
        for a, part, b, whole in zip(mine, shards, plain, reference, strict=True)
    ]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("size", [2, 4])
def test_bfloat16_loses_no_more_than_one_process(size, causal):
    by_rank = run_ranks(_rounding, size, causal, 2, 11)
    for name, parts in zip(NAMES, zip(*by_rank, strict=True), strict=True):
        ring = sum(mine for mine, _ in parts) ** 0.5
        plain = parts[0][1] ** 0.5
        assert ring <= 1.25 * plain, f"{name}: {ring:.3e} against {plain:.3e} of one process"


def _twice(causal):
    tensors = _inputs((1, 4, 64, 16), 2, 3, torch.float32)
    first, second = (_ring(tensors, causal) for _ in range(2))
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_bitwise_repeatable(causal):
    assert all(run_ranks(_twice, 4, causal))


def _strided():
    """Inputs as models hold them, [B, L, H, D] transposed, and an expanded gradient."""
    world = c10d.group.WORLD
    tensors = _inputs((2, 4, 12, 8), 2, 7)
    reference = _one_process([*tensors[:3], torch.ones_like(tensors[3])], True)
    q, k, v = (contiguous_shard(x.transpose(1, 2), 1, world) for x in tensors[:3])
    leaves = [x.contiguous().requires_grad_() for x in (q, k, v)]
    out = ring_attention(
        *(x.transpose(1, 2) for x in leaves), is_causal=True, group=world, layout="contiguous"
    )
    out.sum().backward()
    return _errors([out.detach(), *(x.grad.transpose(1, 2) for x in leaves)], reference)


def test_strided_inputs():
    _assert_close(run_ranks(_strided, 2), 1e-12)


def _bytes_sent(dtype, causal):
    """Return the bytes that this rank sends forward and in the whole call."""
    sent, exchange = [], cp_comms.exchange

    def counted(sends, **options):
        sent.append(sum(tensor.nbytes for tensor, _ in sends))
        return exchange(sends=sends, **options)

    world = c10d.group.WORLD
    q, k, v, grad = (contiguous_shard(x, 2, world) for x in _inputs((2, 4, 24, 8), 2, 7, dtype))
    cp_comms.exchange = counted
    try:
        out = ring_attention(
            q.requires_grad_(), k, v, is_causal=causal, group=world, layout="contiguous"
        )
        forward = sum(sent)
        out.backward(grad)
    finally:
        cp_comms.exchange = exchange
    return forward, sum(sent) - forward


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("dtype", "gradients"), [(torch.float64, 1), (torch.float32, 1), (torch.bfloat16, 2)]
)
def test_bytes_sent_are_those_of_the_formula(dtype, gradients, causal):
    size = 3
    kv_bytes = 2 * (2 * 2 * 24 // size * 8) * dtype.itemsize
    hop = (size - 1) * kv_bytes
    sent = run_ranks(_bytes_sent, size, dtype, causal)
    assert sent == [(hop, hop + gradients * hop)] * size


def _two_rings():
    rank = c10d.get_rank()
    rings = [c10d.new_group([0, 1]), c10d.new_group([2, 3])]
    group = rings[rank // 2]
    tensors = _inputs((1, 2, 10, 4), 1, 20 + rank // 2)
    return _errors(_ring(tensors, True, group=group), _one_process(tensors, True), group)


def test_rings_beside_each_other():
    _assert_close(run_ranks(_two_rings, 4), 1e-12)


def _autocast():
    world = c10d.group.WORLD
    q, k, v, _ = (contiguous_shard(x, 2, world) for x in _inputs((1, 2, 8, 4), 2, 1, torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = ring_attention(q.requires_grad_(), k, v.bfloat16(), group=world)
        mixed.float().sum().backward()
    plain = ring_attention(*(x.detach().bfloat16() for x in (q, k, v)), group=world)
    return torch.equal(mixed, plain), mixed.dtype == torch.bfloat16, q.grad.dtype == torch.float32


def test_autocast_casts_as_attention_does():
    assert run_ranks(_autocast, 2) == [(True, True, True)] * 2


def _without_gradient():
    tensors = _inputs((1, 2, 8, 4), 2, 1)
    q, k, v = (contiguous_shard(x, 2, c10d.group.WORLD) for x in tensors[:3])
    with torch.no_grad():
        out = ring_attention(q.requires_grad_(), k, v, group=c10d.group.WORLD)
    keys_only = ring_attention(q.detach(), k.requires_grad_(), v, group=c10d.group.WORLD)
    keys_only.sum().backward()
    return out.requires_grad, k.grad.isfinite().all().item(), v.grad


def test_only_what_needs_a_gradient_gets_one():
    assert run_ranks(_without_gradient, 2) == [(False, True, None)] * 2


def test_one_process_is_the_plain_function():
    q, k, v, _ = _inputs((2, 4, 9, 8), 2, 0, torch.float32)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)
    assert torch.equal(ring_attention(q, k, v, 0.2, True), expected)


def _differing(change):
    world = c10d.group.WORLD
    q, k, v = torch.ones(3, 1, 4, 6, 8).unbind()
    options = {"is_causal": False}
    if c10d.get_rank() == 1:
        if change == "length":
            q, k, v = q[:, :, :5], k[:, :, :5], v[:, :, :5]
        elif change == "dtype":
            q, k, v = q.double(), k.double(), v.double()
        elif change == "heads":
            k, v = k[:, :2], v[:, :2]
        elif change == "gradient":
            q = q.clone().requires_grad_()
        else:
            options[change] = True if change == "is_causal" else 0.5
    ring_attention(torch.ones(1, 1, 2, 4), *torch.ones(2, 1, 1, 2, 4).unbind(), group=world)
    with pytest.raises(MismatchError) as error:
        ring_attention(q, k, v, group=world, **options)
    # The ring is still usable: nothing had been sent.
    ring_attention(torch.ones(1, 1, 2, 4), *torch.ones(2, 1, 1, 2, 4).unbind(), group=world)
    return str(error.value)


@pytest.mark.parametrize(
    "change", ["length", "dtype", "heads", "gradient", "is_causal", "sm_scale"]
)
def test_ranks_that_differ_get_an_error_on_every_rank(change):
    messages = run_ranks(_differing, 3, change)
    for rank, message in enumerate(messages):
        assert "the ranks disagree on this call of context-parallel attention" in message
        assert "rank 1 differs from ranks 0, 2" in message
        assert f"this is rank {rank}" in message


def _q(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("q", "kv", "match"),
    [
        (_q(2, 3, 4), _q(2, 3, 4), r"must be \[B, heads, L, D\]"),
        (_q(1, 2, 0, 4), _q(1, 2, 0, 4), "none of them 0"),
        (_q(1, 2, 3, 4), _q(1, 2, 3, 4, dtype=torch.float64), "dtypes must be equal"),
        (_q(1, 2, 3, 4, dtype=torch.int64), _q(1, 2, 3, 4, dtype=torch.int64), "one of torch.fl"),
        (_q(1, 2, 3, 4), _q(2, 2, 3, 4), "batch size and head dim"),
        (_q(1, 2, 3, 4), _q(1, 2, 3, 5), "batch size and head dim"),
        (_q(1, 2, 1, 4), _q(1, 2, 3, 4), "neither decoding with a cache nor cross attention"),
        (_q(1, 3, 3, 4), _q(1, 2, 3, 4), "must divide the number of query heads; got q"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(q, kv, match):
    expected = f"context-parallel attention on rank 0: .*{match}"
    with pytest.raises(InvalidArgumentError, match=expected):
        ring_attention(q, kv, kv)


def test_keys_and_values_of_different_shape_are_refused():
    with pytest.raises(InvalidArgumentError, match="k and v must have one shape"):
        ring_attention(_q(1, 2, 3, 4), _q(1, 2, 3, 4), _q(1, 1, 3, 4))
