"""Backends as users write them: 'nccl', 'mpi', or 'cpu:gloo,cuda:nccl'."""

from __future__ import annotations

import torch.distributed as c10d

from ..errors import InvalidArgumentError
from .probe import is_usable
from .table import entry_of_backend


def resolve_backend(backend: str) -> list[tuple[str, str]]:
    """Read a backend's name or `device:backend` pairs with commas between.

    Returns:
        (device, backend) pairs; the device is "" where a name stands alone. A backend that this
        torch was built without is replaced by the table's substitute.

    Raises:
        InvalidArgumentError: Pairs and names mixed, a device twice, or a part left out.

    Example:
        >>> resolve_backend("cpu:gloo,cuda:nccl")
        [('cpu', 'gloo'), ('cuda', 'nccl')]
    """
    if not isinstance(backend, str):
        message = f"a backend is named by a text such as 'nccl', got {backend!r}"
        raise InvalidArgumentError(message)
    parts = [part.strip().lower() for part in backend.split(",")]
    pairs = [(device, name) for device, _, name in (part.rpartition(":") for part in parts)]
    named = [device for device, _ in pairs]
    if not all(name for _, name in pairs) or (len(pairs) > 1 and not all(named)):
        raise InvalidArgumentError(
            f"cannot read backend {backend!r}: write one name, such as 'nccl', or device:backend "
            "pairs with commas between, such as 'cpu:gloo,cuda:nccl'"
        )
    if len(set(named)) < len(named):
        raise InvalidArgumentError(f"backend {backend!r} names a device twice")
    return [(device, _substitute(name)) for device, name in pairs]


def check_pair(device: str, backend: str) -> None:
    """Make sure that a backend serves the device it is asked for.

    Raises:
        InvalidArgumentError: It serves others.
    """
    entry = entry_of_backend(backend)
    served = c10d.Backend.backend_capability.get(backend)
    if served is None:
        served = [entry.device] if entry is not None else [device]
    if device and device not in served:
        raise InvalidArgumentError(
            f"backend {backend!r} serves {' and '.join(served)} tensors, not {device}: write "
            f"'{served[0]}:{backend}'"
        )


def _substitute(backend: str) -> str:
    entry = entry_of_backend(backend)
    if entry is not None and entry.instead and not c10d.is_backend_available(backend):
        return entry.instead
    return backend


def backend_config(backend: str) -> str:
    """What `init_process_group` is to be told: CPU tensors keep gloo beside a device's backend.

    Example:
        >>> backend_config("nccl")
        'cpu:gloo,cuda:nccl'
    """
    if ":" in backend or backend in ("gloo", "mpi"):
        return backend
    served = [d for d in c10d.Backend.backend_capability.get(backend, ["cpu"]) if is_usable(d)]
    parts = [] if "cpu" in served else ["cpu:gloo"]
    return ",".join(parts + [f"{device}:{backend}" for device in served])
