"""Ranks on this machine's device: over NCCL on CUDA devices, over gloo on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from scaletorch.dist.testing import run_ranks

from .checks import Checks

MOST = 4  # largest number of ranks of a check


def is_shared() -> bool:
    """Return whether ranks have to share GPUs, which `run_ranks` allows."""
    return 0 < torch.cuda.device_count() < MOST


def on_ranks(
    checks: Checks,
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Return the result of `fn(device, *args)` on each rank; errors contain hung ranks' stacks."""
    backend: dict[str, Any] = {} if checks.device == "cpu" else {"backend": "nccl"}
    limit = max(1.0, min(timeout * checks.slack, checks.left()))
    return run_ranks(fn, world_size, checks.device, *args, timeout=limit, env=env, **backend)
