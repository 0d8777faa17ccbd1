"""`ring_attention`, as specified: what it takes and gives beside what `attention` does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as c10d
import torch.nn.functional as F
from dense_attention import random_tensors, share

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.context_parallel import contiguous, ring_attention


def _autocast():
    """Cast as attention casts."""
    world = c10d.group.WORLD
    whole = random_tensors(2, 2, 8, 8, 4, dtype=torch.float32)[:3]
    q, k, v = (share(x, contiguous(8, 2)) for x in whole)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = ring_attention(q.requires_grad_(), k, v.bfloat16(), group=world)
        mixed.float().sum().backward()
    assert torch.equal(mixed, ring_attention(*(x.detach().bfloat16() for x in (q, k, v)),
                                             group=world))  # fmt: skip
    assert mixed.dtype == torch.bfloat16
    assert q.grad.dtype == torch.float32


def _without_gradient():
    """Only what needs a gradient gets one."""
    q, k, v = (share(x, contiguous(8, 2)) for x in random_tensors(2, 2, 8, 8, 4)[:3])
    with torch.no_grad():
        out = ring_attention(q.requires_grad_(), k, v, group=c10d.group.WORLD)
    assert not out.requires_grad
    ring_attention(q.detach(), k.requires_grad_(), v, group=c10d.group.WORLD).sum().backward()
    assert k.grad.isfinite().all()
    assert v.grad is None


@distributed_test(2)
def test_autocast_and_gradients_that_are_asked_for():
    _autocast()
    _without_gradient()


def test_one_process_is_the_plain_function():
    q, k, v, _ = random_tensors(4, 2, 9, 9, 8, batch=2, dtype=torch.float32)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)
    assert torch.equal(ring_attention(q, k, v, 0.2, True), expected)


def _q(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("q", "k", "v", "match"),
    [
        (_q(2, 3, 4), _q(2, 3, 4), None, r"must be \[B, heads, L, D\]"),
        (_q(1, 2, 0, 4), _q(1, 2, 0, 4), None, "with sizes above 0"),
        (_q(1, 2, 3, 4), _q(1, 2, 3, 4, dtype=torch.float64), None, "dtypes must be equal"),
        (_q(1, 2, 3, 4, dtype=torch.int), _q(1, 2, 3, 4, dtype=torch.int), None, "one of torch.fl"),
        (_q(1, 2, 3, 4), _q(2, 2, 3, 4), None, "batch size and head dim"),
        (_q(1, 2, 3, 4), _q(1, 2, 3, 5), None, "batch size and head dim"),
        (_q(1, 2, 1, 4), _q(1, 2, 3, 4), None, "neither decoding with a cache nor cross attention"),
        (_q(1, 3, 3, 4), _q(1, 2, 3, 4), None, "must divide the number of query heads; got q"),
        (_q(1, 2, 3, 4), _q(1, 2, 3, 4), _q(1, 1, 3, 4), "k and v must have one shape"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(q, k, v, match):
    expected = f"context-parallel attention on rank 0: .*{match}"
    with pytest.raises(InvalidArgumentError, match=expected):
        ring_attention(q, k, k if v is None else v)
