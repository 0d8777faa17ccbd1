"""Values that all ranks begin with: compared, or the first rank's sent to the others."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....dist import broadcast, group_ranks
from ....dist.building import agree
from ....dist.errors import InvalidArgumentError

INIT_SYNCS = ("check", "broadcast", "none")


def check_init_sync(given: object) -> None:
    """Refuse anything but one of `INIT_SYNCS`.

    Raises:
        InvalidArgumentError: It is none.
    """
    if given not in INIT_SYNCS:
        known = ", ".join(map(repr, INIT_SYNCS))
        raise InvalidArgumentError(f"init_sync must be one of {known}, got {given!r}")


def sync_initial_values(
    tensors: Sequence[tuple[str, Tensor]], how: str, group: ProcessGroup | None
) -> None:
    """Compare parameters and buffers over the ranks, or make them the first rank's, in place.

    Args:
        tensors: With their names; names, shapes and dtypes are the same on all ranks.
        how: One of `INIT_SYNCS`.
        group: The ranks.

    Raises:
        MismatchError: Values differ, and were to be compared: names them on every rank.
    """
    if how == "broadcast":
        source = group_ranks(group)[0]
        for _, tensor in tensors:
            broadcast(tensor.detach(), source, group=group)
    elif how == "check":
        lines = [f"{name} has values {_digest(tensor)}" for name, tensor in tensors]
        agree("the values to begin with (pass init_sync='broadcast' to send the first rank's)",
              lines, group)  # fmt: skip


def _digest(tensor: Tensor) -> str:
    """Return a hash of a tensor's bits; one on the meta device has none yet."""
    if tensor.is_meta:
        return "none"
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    flat = dense.detach().cpu().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    data = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
    return hashlib.blake2b(_bytes(data), digest_size=8).hexdigest()


def _bytes(data: Tensor) -> memoryview:
    """Return a flat uint8 tensor's memory, without a copy and without numpy."""
    import ctypes

    length = data.numel()
    if not length:
        return memoryview(b"")
    return memoryview((ctypes.c_char * length).from_address(data.data_ptr()))
