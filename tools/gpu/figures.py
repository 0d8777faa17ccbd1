"""Figures: steps compared with a plain loop, kernels with torch's, and waits of ranks."""

from __future__ import annotations

import gc
import re
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from scaletorch.models import LlamaConfig
from scaletorch.parallel.context_parallel import attention as ours
from scaletorch.parallel.pg_manager import (
    ProcessGroupManager,
    destroy_process_group_manager,
    setup_process_group_manager,
)

from .checks import Checks, Found
from .ranks import on_ranks
from .training import AXES, SMALL, Problem, batch, build, config_of, loss_of, on_grid, stepping

PEAK = 989e12  # dense bfloat16 FLOP/s of an H100 SXM and an H200, from their data sheets
TITAN = {"eager": 5762, "compiled": 6667}  # tokens/s a GPU of torchtitan, Llama 3 8B on 8 H100
WARM, TIMED = 3, 6  # steps
HALF = "bfloat16"
MEDIUM = Problem(
    config={
        "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_layers": 16,
        "num_heads": 16, "num_kv_heads": 4,
    },
    rows=8, length=2048, dtype=HALF,
)  # fmt: skip
LARGE = Problem(
    config={
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_layers": 32,
        "num_heads": 32, "num_kv_heads": 8, "rope_theta": 500000.0,
    },
    rows=2, length=8192, micro_batches=2, dtype=HALF, options={"recompute": "selective"},
)  # fmt: skip


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(calls: Iterable[Callable[[], Any]], device: str) -> float:
    """Return the median time of calls, each with a synchronization."""
    times = []
    for call in calls:
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def flops_per_token(config: LlamaConfig, length: int) -> float:
    """Return forward + backward FLOPs of one token: 6 per weight used, plus causal attention.

    Source: PaLM, https://arxiv.org/abs/2204.02311, appendix B, halved for the causal mask.
    """
    head_dim = config.hidden_size // config.num_heads
    attention = config.hidden_size * head_dim * 2 * (config.num_heads + config.num_kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    weights = config.num_layers * (attention + mlp) + config.hidden_size * config.vocab_size
    return 6.0 * weights + 6.0 * config.num_layers * config.hidden_size * length


def measured(problem: Problem, step: Callable[[int], Any], device: str) -> dict[str, Any]:
    """Return tokens/s, MFU, peak memory and host waits of a step on one rank."""
    for number in range(WARM):
        step(number)
    synchronize(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = seconds_of([partial(step, WARM + n) for n in range(TIMED)], device)
    tokens = problem.rows * problem.length / seconds
    flops = tokens * flops_per_token(config_of(problem), problem.length)
    figures: dict[str, Any] = {"ms": round(seconds * 1e3, 1), "tokens/s": round(tokens)}
    if device == "cuda":
        figures["MFU"] = round(flops / PEAK, 3)
        figures["peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return figures | waits(step, device)


def waits(step: Callable[[int], Any], device: str) -> dict[str, Any]:
    """Return how often the host waits for the device in a step, and the lines that wait most."""
    if device != "cuda":
        return {}
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = [
        f"{warning.filename.rpartition('/src/')[2].rpartition('site-packages/')[2]}:{warning.lineno}"
        for warning in caught
        if "synchroniz" in str(warning.message)
    ]
    most = sorted(set(lines), key=lines.count, reverse=True)[:6]
    return {"host waits": len(lines), "where": {line: lines.count(line) for line in most}}


def speed(checks: Checks, compiled: bool) -> None:
    """Time a Llama of 0.85 B: a plain loop, and `train_step` on one rank."""
    problem = replace(MEDIUM, config=SMALL, length=32, dtype="float32") if checks.quick else MEDIUM
    for name in ("plain", "train_step"):
        checks.run(name, _alone, problem, checks.device, name == "plain", compiled)


def _alone(problem: Problem, device: str, plain: bool, compiled: bool) -> Found:
    gc.collect()  # garbage of earlier checks
    if device == "cuda":
        torch.cuda.empty_cache()
    return Found(figures=figures_of(device, problem, plain, compiled))


def figures_of(device: str, problem: Problem, plain: bool, compiled: bool) -> dict[str, Any]:
    """Return the figures of this rank's step, with this library or, on dp only, without it."""
    manager = setup_process_group_manager(**problem.sizes)
    try:
        make = _loop if plain else _ours
        step = make(problem, device, manager, compiled)
        found = measured(problem, step, device)
        return found | messages(step, device) if manager.world_size > 1 else found
    finally:
        destroy_process_group_manager()


def _ours(
    problem: Problem, device: str, manager: ProcessGroupManager, compiled: bool
) -> Callable[[int], Any]:
    model = on_grid(problem, device, manager, compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return stepping(problem, device, model, optimizer)


def _loop(
    problem: Problem, device: str, manager: ProcessGroupManager, compiled: bool
) -> Callable[[int], Any]:
    """Return a step of plain PyTorch: on one rank, or with DistributedDataParallel."""
    model, rank, size = build(problem, device), manager.dp_rank, manager.dp_size
    for layer in getattr(model, "layers", ()) if compiled else ():
        layer.compile()
    if size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens, count = problem.rows * problem.length, problem.micro_batches

    def step(number: int) -> None:
        whole = batch(problem, number, device)
        parts = {name: x.chunk(size)[rank].chunk(count) for name, x in whole.items()}
        for each in range(count):
            is_last = each == count - 1 or size == 1
            with nullcontext() if is_last else model.no_sync():  # type: ignore[operator]
                some = {name: x[each] for name, x in parts.items()}
                (loss_of(model, some) * size / tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def large(checks: Checks) -> None:
    """Time a step of the shape of Llama 3 8B, with 8 layers if 32 do not fit."""
    checks.run("train_step", _large, checks.device, checks.quick)


def _large(device: str, quick: bool) -> Found:
    base = replace(LARGE, config=SMALL, length=32) if quick else LARGE
    for layers in (4,) if quick else (32, 8):
        problem = replace(base, config={**base.config, "num_layers": layers})
        with suppress(torch.OutOfMemoryError):
            figures = _alone(problem, device, plain=False, compiled=False).figures
            return Found(figures={"layers": layers, **figures, "torchtitan, 8 H100": TITAN})
    return Found(note="8 layers do not fit this device's memory")


SDPA = {  # heads, kv heads, length, options of our attention
    "causal": (32, 8, 8192, {"causal": True}),
    "full": (32, 8, 8192, {}),
    "causal, 32k": (32, 8, 32768, {"causal": True}),
    "window 1024": (32, 8, 8192, {"causal": True, "window": 1024}),
    "cap": (32, 8, 8192, {"causal": True, "softcap": 30.0}),
}


def attention(checks: Checks) -> None:
    """Time attention with head dim 128, compared with torch's, which has no windows or caps."""
    for name, case in SDPA.items():
        checks.run(name, _attention, checks.device, checks.quick, *case)


def _attention(
    device: str, quick: bool, heads: int, kv_heads: int, length: int, options: dict[str, Any]
) -> Found:
    length, dtype = (128, torch.float32) if quick else (length, torch.bfloat16)
    shapes = [(1, n, length, 128) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, grad = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    causal = bool(options.get("causal"))

    def torchs() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    def both(call: Callable[[], Tensor]) -> None:
        torch.autograd.grad(call(), leaves, grad)

    figures = {}
    for name, call in (("ours", partial(ours, q, k, v, **options)), ("torch", torchs)):
        for what, run in (("forward", call), ("both", partial(both, call))):
            run()
            figures[f"{name}, {what}, ms"] = round(seconds_of([run] * 5, device) * 1e3, 3)
    return Found(figures=figures)


WIDE = {
    "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816, "num_layers": 8,
    "num_heads": 8, "num_kv_heads": 4,
}  # fmt: skip


def axes(checks: Checks) -> None:
    """Measure the cost of a step on each axis, compared with DistributedDataParallel."""
    base = Problem(config=WIDE, length=1024, micro_batches=4, dtype=HALF)
    if checks.quick:
        base = replace(base, config=SMALL, length=32, dtype="float32")
    known = {"DDP": AXES["dp"], **AXES}
    for name in ("DDP", "dp") if checks.quick else known:
        axis = known[name]
        problem = replace(base, sizes=axis.sizes, options=axis.options, zero=axis.zero)
        if "num_experts" in axis.config:
            problem = replace(problem, config={**base.config, "num_experts": 4})
        checks.run(name, _axis, checks, problem, name == "DDP")


def _axis(checks: Checks, problem: Problem, plain: bool) -> Found:
    return Found(figures=on_ranks(checks, figures_of, problem.world_size, problem, plain, False)[0])


def messages(step: Callable[[int], Any], device: str) -> dict[str, Any]:
    """Return NCCL's calls in a step, and the share of their time that overlaps with computation."""
    if device != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step(0)
        torch.cuda.synchronize()
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in profiler.events():
        if event.device_type.name == "CUDA" and not event.name.startswith("nccl:"):  # a label
            span = event.time_range.start, event.time_range.end
            spans[re.match("nccl(Dev)?Kernel", event.name) is not None].append(span)
    nccl, compute = merged(spans[True]), merged(spans[False])
    total = sum(end - start for start, end in nccl)
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in nccl for b in compute)
    share = {"of it beside computation": round(both / total, 2)} if total else {}
    return {"NCCL calls": len(spans[True]), "NCCL ms": round(total / 1e3, 2), **share}


def merged(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of spans as disjoint spans."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found
