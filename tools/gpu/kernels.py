"""Attention kernels of one block, and attention calls, compared with float64 on the device."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from scaletorch.dist.testing import relative_error, worst
from scaletorch.parallel.context_parallel import attention
from scaletorch.parallel.context_parallel import kernels as table
from scaletorch.parallel.context_parallel.kernels.block import Kernel, Operands
from scaletorch.parallel.context_parallel.masks import CAUSAL, FULL, Band

from .checks import Checks, Found, Skip

# For out, lse and gradients: the largest difference over the largest exact value.
BOUNDS = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 1e-4}
HEADS = ((4, 4), (8, 2))
DIMS = (64, 80, 128)
ODD = 36  # a head dim that fused operators refuse
CAP = 20.0
CAPS = (CAP, None)
SHAPES = ((513, 513), (300, 700))  # rows and keys, no multiples of a tile
BANDS: dict[str, Band] = {
    "full": FULL, "causal": CAUSAL, "window 100": (-99, 0), "two-sided": (-40, 40),
}  # fmt: skip
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 100},
    "two-sided window": {"window": 60},
    "cap": {"causal": True, "softcap": CAP},
    "cap in a window": {"causal": True, "softcap": CAP, "window": 100},
    "sinks": {"causal": True, "sinks": True},
    "sinks in a window": {"causal": True, "sinks": True, "window": 100},
    "documents": {"causal": True, "cu_seqlens": (0, 130, 131, 513)},
    "documents in a window": {"causal": True, "cu_seqlens": (0, 130, 513), "window": 100},
}


def inputs(device: str, dtype: torch.dtype, *shape: int) -> list[Tensor]:
    """Return q, k, v and the gradient of out, for (heads, kv heads, head dim, rows, keys)."""
    heads, kv_heads, dim, rows, keys = shape
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, n, length, dim, generator=generator).to(device, dtype)
        for n, length in ((heads, rows), (kv_heads, keys), (kv_heads, keys), (heads, rows))
    ]


def dense(
    given: list[Tensor], seen: Tensor, softcap: float | None = None, sinks: Tensor | None = None
) -> list[Tensor]:
    """Return out, lse, dq, dk, dv and the sinks' gradient in float64, from full scores."""
    leaves = [x.detach().double().requires_grad_() for x in given[:3]]
    group = given[0].shape[1] // given[1].shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in leaves[1:])
    scores = leaves[0] @ k.mT * given[0].shape[-1] ** -0.5
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        leaves.append(sinks.detach().double().requires_grad_())
        column = leaves[3].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores, v = (
            torch.cat([scores, column], -1),
            torch.cat([v, v.new_zeros(v[:, :, :1].shape)], 2),
        )
    lse = scores.logsumexp(-1)
    out = torch.where(lse.isfinite()[..., None], scores - lse[..., None], -torch.inf).exp() @ v
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, given[3].double())]


def visible(device: str, rows: int, keys: int, band: Band) -> Tensor:
    """Return the mask of keys that each row sees."""
    distance = torch.arange(keys, device=device) - torch.arange(rows, device=device)[:, None]
    lower, upper = band
    seen = torch.ones_like(distance, dtype=torch.bool)
    seen = seen if lower is None else seen & (distance >= lower)
    return seen if upper is None else seen & (distance <= upper)


def blocks(checks: Checks, name: str) -> None:
    """Compare a kernel, forward and backward, in all cases that it supports."""
    kernels = (*table.KERNELS[checks.device], table.TILE)
    kernel = next((each for each in kernels if each.name == name), None)
    cases: Iterable[Any] = itertools.product(BOUNDS, HEADS, DIMS, (None,), SHAPES, BANDS)
    if name == table.FLEX.name:  # compiled for each dtype, head dim and number of heads
        cases = itertools.product(tuple(BOUNDS)[1:], HEADS[1:], (ODD, 128), CAPS, SHAPES, BANDS)
    for dtype, heads, dim, cap, shape, band in itertools.islice(cases, 3 if checks.quick else None):
        says = f"{str(dtype)[6:]} {heads} {dim} {shape} {band}" + (" cap" if cap else "")
        case = (dtype, *heads, dim, *shape)
        checks.run(says, _block, checks.device, kernel, case, band, cap)


def _block(device: str, kernel: Kernel | None, case: Any, band: str, cap: float | None) -> Found:
    given, (rows, keys) = inputs(device, *case), case[-2:]
    q, k, v, grad = given
    how = (case[3] ** -0.5, BANDS[band], *(() if cap is None else (cap,)))
    if kernel is None or not kernel.fits(q, k, v, BANDS[band]):
        raise Skip("the kernel does not fit")
    with warnings.catch_warnings():  # flex_attention would fall back to the tile kernel
        warnings.filterwarnings("error", "flex_attention does not run")
        out, lse = kernel.forward(q, k, v, *how)
        found = kernel.backward(Operands(grad, q, k, v, out, lse), *how)
    exact = dense(given, visible(device, rows, keys, BANDS[band]), cap)
    finite = exact[1].isfinite()
    exact[1], lse = exact[1][finite], lse[finite]
    return _judged([out, lse, *found], exact, case[0])


def calls(checks: Checks) -> None:
    """Compare attention calls of a model on one rank, with the kernels that they choose."""
    cases = itertools.product(BOUNDS, HEADS, DIMS, CALLS)
    some = itertools.islice(cases, len(CALLS) if checks.quick else None)
    for dtype, heads, dim, name in sorted(some, key=_is_compiled):
        case = (dtype, *heads, dim, 513, 513)
        says = f"{str(dtype)[6:]} {heads} {dim} {name}"
        checks.run(says, _call, checks.device, case, CALLS[name])


def _is_compiled(case: tuple[torch.dtype, tuple[int, int], int, str]) -> bool:
    """Return whether a call on CUDA uses flex_attention: these are slow and run last."""
    dtype, options = case[0], CALLS[case[3]]
    return "softcap" in options or (dtype == torch.float32 and "window" in options)


def _call(device: str, case: Any, options: dict[str, Any]) -> Found:
    given, options = inputs(device, *case), dict(options)
    if options.get("sinks"):
        options["sinks"] = torch.linspace(-1, 2, case[1], device=device)
    leaves = [x.requires_grad_() for x in given[:3]]
    leaves += [options["sinks"].requires_grad_()] if "sinks" in options else []
    out = attention(*given[:3], **options)
    found = torch.autograd.grad(out, leaves, given[3])
    window = options.get("window")
    lower = None if window is None else 1 - window
    upper = 0 if options.get("causal") else None if window is None else window - 1
    seen = visible(device, case[-2], case[-1], (lower, upper))
    if "cu_seqlens" in options:
        ends = torch.tensor(options["cu_seqlens"][1:], device=device)
        document = torch.bucketize(torch.arange(case[-1], device=device), ends, right=True)
        seen &= document == document[:, None]
    exact = dense(given, seen, options.get("softcap"), options.get("sinks"))
    del exact[1]  # attention returns no lse
    return _judged([out.detach(), *found], exact, case[0])


def _judged(mine: list[Tensor], exact: list[Tensor], dtype: torch.dtype) -> Found:
    errors = [relative_error(a, b) for a, b in zip(mine, exact, strict=True)]
    return Found(worst(errors), BOUNDS[dtype], " ".join(f"{error:.0e}" for error in errors))
