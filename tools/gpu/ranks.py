"""Ranks of this machine on its device: over NCCL on CUDA devices, over gloo on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from scaletorch.dist.testing import run_ranks

from .checks import Checks

MOST = 4  # ranks of any check
# NCCL refuses two ranks on one card of one host. It believes what a rank says of its host
# (NCCL_HOSTID, another on each rank), and then goes by sockets.
SHARED = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",
    "NCCL_BUFFSIZE": "1048576",
}


def is_shared() -> bool:
    """Return whether ranks have to share cards."""
    return 0 < torch.cuda.device_count() < MOST


def on_ranks(
    checks: Checks,
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
) -> list[Any]:
    """Return what `fn(device, *args)` returns on each rank; an error has hung ranks' stacks."""
    backend: dict[str, Any] = {} if checks.device == "cpu" else {"backend": "nccl"}
    limit = max(1.0, min(timeout * checks.slack, checks.left()))
    return run_ranks(
        _member, world_size, fn, checks.device, *args, timeout=limit, env=env, **backend
    )


def _member(fn: Callable[..., Any], device: str, *args: Any) -> Any:
    join(device)
    return fn(device, *args)


def join(device: str) -> None:
    """Choose this rank's card and host, before its first communicator is made."""
    if device == "cuda":
        if is_shared():
            os.environ.setdefault("NCCL_HOSTID", f"host{os.environ['RANK']}")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
