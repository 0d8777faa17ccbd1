"""The block maths in one process: forward, backward from merged statistics, and the merge."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from scaletorch.parallel.context_parallel import blocks
from scaletorch.parallel.context_parallel.blocks import (
    block_backward,
    block_forward,
    row_delta,
    update_out_and_lse,
)


class _Blocks(torch.autograd.Function):
    """Attention over several blocks of keys, merged: a ring without ranks."""

    @staticmethod
    def forward(ctx, q, k, v, scale, causal, count):
        out = lse = None
        for start in range(0, k.shape[2], k.shape[2] // count):
            part = slice(start, start + k.shape[2] // count)
            out, lse = update_out_and_lse(
                out, lse, *block_forward(q, k[:, :, part], v[:, :, part], scale, causal)
            )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = (scale, causal, count)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        scale, causal, count = ctx.options
        delta = row_delta(grad, out)
        dq, dks, dvs = torch.zeros_like(q), [], []
        for keys, values in zip(k.chunk(count, 2), v.chunk(count, 2), strict=True):
            share, dk, dv = block_backward(grad, q, keys, values, lse, delta, scale, causal)
            dq += share
            dks.append(dk)
            dvs.append(dv)
        return dq, torch.cat(dks, 2), torch.cat(dvs, 2), None, None, None


def _reference(q, k, v, scale, causal):
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(
            q, k, v, scale=scale, is_causal=causal, enable_gqa=grouped
        )


def _qkv(batch, heads, kv_heads, length, keys, dim, seed=0):
    torch.manual_seed(seed)
    q = torch.randn(batch, heads, length, dim, dtype=torch.float64)
    k, v = torch.randn(2, batch, kv_heads, keys, dim, dtype=torch.float64).unbind()
    return q, k, v


@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck_through_grouped_heads(causal):
    inputs = [x.requires_grad_() for x in _qkv(1, 4, 2, 5, 5, 3)]
    assert torch.autograd.gradcheck(lambda *x: _Blocks.apply(*x, 0.7, causal, 1), inputs)


def test_gradcheck_through_merged_blocks():
    inputs = [x.requires_grad_() for x in _qkv(2, 2, 1, 3, 6, 4)]
    assert torch.autograd.gradcheck(lambda *x: _Blocks.apply(*x, 0.5, False, 3), inputs)


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    length=st.integers(1, 33),
    dim=st.integers(1, 9),
    causal=st.booleans(),
    tile=st.sampled_from([1, 50, 1 << 21]),
)
def test_block_is_attention_whatever_the_tile(batch, kv_heads, group, length, dim, causal, tile):
    q, k, v = _qkv(batch, kv_heads * group, kv_heads, length, length, dim)
    grad = torch.randn_like(q)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = _reference(*leaves, 0.3, causal)
    expected.backward(grad)
    whole, blocks.TILE_SCORES = blocks.TILE_SCORES, tile
    try:
        out, lse = block_forward(q, k, v, 0.3, causal)
        grads = block_backward(grad, q, k, v, lse, row_delta(grad, out), 0.3, causal)
    finally:
        blocks.TILE_SCORES = whole
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for mine, leaf in zip(grads, leaves, strict=True):
        torch.testing.assert_close(mine, leaf.grad, rtol=1e-11, atol=1e-12)


def test_lse_is_the_log_of_the_sum_of_exponentials():
    q, k, v = _qkv(2, 4, 2, 6, 9, 5)
    _, lse = block_forward(q, k, v, 0.4, causal=False)
    scores = q @ k.repeat_interleave(2, 1).mT * 0.4
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-13, atol=1e-13)


def test_statistics_are_float32_for_half_precision():
    q, k, v = (x.bfloat16() for x in _qkv(1, 2, 1, 4, 4, 8))
    out, lse = block_forward(q, k, v, 0.4, causal=True)
    grads = block_backward(q, q, k, v, lse, row_delta(q, out), 0.4, causal=True)
    assert {x.dtype for x in (out, lse, *grads)} == {torch.float32}


def test_large_scores_do_not_overflow():
    q, k, v = _qkv(1, 1, 1, 4, 4, 4)
    out, lse = block_forward(q * 1e4, k * 1e4, v, 1.0, causal=False)
    assert out.isfinite().all()
    assert lse.isfinite().all()


def test_memory_of_scores_is_one_tile(monkeypatch):
    monkeypatch.setattr(blocks, "TILE_SCORES", 4096)
    sizes = []
    plain = blocks._scores
    monkeypatch.setattr(
        blocks, "_scores", lambda *a: sizes.append(s := plain(*a)) or s, raising=True
    )
    q, k, v = _qkv(1, 2, 1, 256, 256, 4)
    block_forward(q, k, v, 1.0, causal=True)
    assert len(sizes) == 32
    assert max(s.numel() for s in sizes) <= 4096


def test_merge_equals_attention_over_all_keys():
    q, k, v = _qkv(2, 2, 2, 7, 10, 4)
    expected, expected_lse = block_forward(q, k, v, 0.5, causal=False)
    left = block_forward(q, k[:, :, :3], v[:, :, :3], 0.5, causal=False)
    right = block_forward(q, k[:, :, 3:], v[:, :, 3:], 0.5, causal=False)
    copies = [x.clone() for x in (*left, *right)]
    for pair in ((left, right), (right, left)):
        out, lse = update_out_and_lse(*update_out_and_lse(None, None, *pair[0]), *pair[1])
        torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-13, atol=1e-13)
    for before, after in zip(copies, (*left, *right), strict=True):
        assert torch.equal(before, after), "update_out_and_lse changed an argument"


def test_merge_keeps_rows_that_nothing_has_seen():
    nothing = torch.full((1, 1, 3), -torch.inf)
    out, lse = torch.zeros(1, 1, 3, 2), nothing.clone()
    block_out, block_lse = torch.ones(1, 1, 3, 2), torch.tensor([[[-torch.inf, 0.5, 2.0]]])
    block_out[:, :, 0] = 0
    merged, merged_lse = update_out_and_lse(out, lse, block_out, block_lse)
    assert torch.equal(merged, block_out)
    assert torch.equal(merged_lse, block_lse)
    again, again_lse = update_out_and_lse(merged, merged_lse, out, nothing)
    assert torch.equal(again, merged)
    assert torch.equal(again_lse, merged_lse)


def test_merge_is_differentiable_with_unseen_rows():
    out = torch.zeros(1, 1, 2, 2, dtype=torch.float64, requires_grad=True)
    lse = torch.tensor([[[-torch.inf, 0.3]]], dtype=torch.float64, requires_grad=True)
    block_lse = torch.tensor([[[-torch.inf, 0.5]]], dtype=torch.float64)
    merged, _ = update_out_and_lse(out, lse, torch.ones_like(out), block_lse)
    merged.sum().backward()
    assert out.grad.isfinite().all()
    assert lse.grad.isfinite().all()


def test_merge_is_float32_for_half_precision():
    out, lse = torch.zeros(1, 1, 2, 2).bfloat16(), torch.zeros(1, 1, 2).bfloat16()
    first = update_out_and_lse(None, None, out, lse)
    assert [x.dtype for x in first] == [torch.float32] * 2
    assert [x.dtype for x in update_out_and_lse(out, lse, out, lse)] == [torch.float32] * 2


def test_backward_of_an_unseen_row_is_zero():
    q, k, v = _qkv(1, 1, 1, 3, 3, 2)
    out, lse = block_forward(q, k, v, 1.0, causal=False)
    out[:, :, 1], lse[:, :, 1] = 0, -torch.inf
    grad = torch.randn_like(q)
    dq, dk, dv = block_backward(grad, q, k, v, lse, row_delta(grad, out), 1.0, causal=False)
    assert torch.equal(dq[:, :, 1], torch.zeros(1, 1, 2, dtype=torch.float64))
    assert dk.isfinite().all()
    assert dv.isfinite().all()
