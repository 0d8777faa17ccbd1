"""Attention of the whole with all of its scores at once, beside which tests compare, and shares."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F


def random_tensors(heads, kv_heads, rows, keys, dim, *, value_dim=None, batch=1,
                   dtype=torch.float64, seed=0):  # fmt: skip
    """Return q, k, v and the gradient of the output, in values that `dtype` can hold."""
    generator = torch.Generator().manual_seed(seed)
    value_dim = value_dim or dim
    sizes = [(heads, rows, dim), (kv_heads, keys, dim), (kv_heads, keys, value_dim)]
    return [
        torch.randn(batch, *size, generator=generator, dtype=torch.float64).to(dtype)
        for size in (*sizes, (heads, rows, value_dim))
    ]


def visible(length, causal, window=None, documents=None):
    """Return which keys the rows of a whole sequence see, [length, length], by a mask's words."""
    row, key = torch.arange(length)[:, None], torch.arange(length)
    sees = (key <= row) | (not causal)
    if window is not None:
        sees = sees & ((row - key).abs() < window)
    if documents is not None:
        which = torch.bucketize(torch.arange(length), torch.tensor(documents[1:]), right=True)
        sees = sees & (which[:, None] == which)
    return sees


def within(band, rows, keys):
    """Return which keys the rows of a block see, [rows, keys]."""
    lower, upper = (-math.inf if band[0] is None else band[0]), band[1]
    distance = torch.arange(keys) - torch.arange(rows)[:, None]
    return (distance >= lower) & (distance <= (math.inf if upper is None else upper))


def attended(q, k, v, sees, scale=None, cap=None, sinks=None):
    """Return the output and the log-sum-exp; rows that see nothing have 0 and -inf."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if cap is None else cap * (scores / cap).tanh()
    scores = scores.masked_fill(~sees, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.nan_to_num(neginf=0).unsqueeze(-1)).exp()
    return weights[..., : k.shape[2]].masked_fill(~sees, 0) @ v, lse


def dense(q, k, v, grad, scale, band, cap=None):
    """Return out, lse, dq, dk, dv of one block in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = attended(*leaves, within(band, q.shape[2], k.shape[2]), scale, cap)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def assert_close(found, expected, limit):
    """Compare out, lse, dq, dk, dv."""
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=True):
        assert a.shape == b.shape
        assert not a.isnan().any(), name
        torch.testing.assert_close(
            a.double(), b, rtol=limit, atol=limit, msg=lambda m, name=name: f"{name}: {m}"
        )


def share(x, layout):
    """Return this rank's share [B, H, L, D] of a whole, its padding filled with rubbish."""
    padded = F.pad(x, (0, 0, 0, layout.padded_length - x.shape[2]), value=9.0)
    return padded[:, :, layout.positions(dist.get_rank())].clone()


def joined(x, layout):
    """Return the whole of which every rank has a share."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 2).index_select(2, layout.order())
