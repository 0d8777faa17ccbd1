"""Freeing the threads and streams of this process that wait for a rank which is at fault.

Gloo has no call for it: neither `abort` nor `shutdown` ends a collective that waits for a peer. But
a message that is not there in time makes it break all connections of its group in this process, and
that frees all threads that wait on them with an error, in collectives too. So: wait 1 ms for one.

NCCL and its like have `abort`, which ends the kernels that wait on a device: the host goes on, with
whatever is in the tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d

from .ledger import TRACE

_TAG = 0x5CA1E  # nobody's
_DUMPS = ("_dump_nccl_trace", "_dump_fr_trace")  # the second is there without NCCL too


def break_gloo_groups() -> None:
    """Break the gloo connections of every group of this process; they are of no use after."""
    for backend in _backends():
        if backend.name() == "gloo" and backend.size() > 1:
            with contextlib.suppress(Exception):
                _break(backend)


def abort_device_groups() -> None:
    """Abort every group of this process whose calls run on a device; they are of no use after.

    The aborts of NCCL's groups are one call to it, newest group first, as torch itself makes them:
    one after another they can wait for one another (pytorch/pytorch#119797).
    """
    found = [backend for backend in _backends() if backend.name() != "gloo" and backend.size() > 1]
    together = next((backend for backend in found if hasattr(backend, "_group_start")), None)
    if together is not None:
        together._group_start()
    for backend in reversed(found):
        with contextlib.suppress(Exception):
            backend.abort()
    if together is not None:
        together._group_end()


def dump_trace(folder: str, rank: int) -> None:
    """Write what torch's flight recorder knows of the last calls on the device, if anything.

    Without stacks: to look up their lines torch imports its compiler, which takes seconds.
    """
    for name in _DUMPS:
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            with contextlib.suppress(Exception):
                Path(folder, f"{TRACE}{rank}").write_bytes(dump(includeStackTraces=False))
            return


def _backends() -> Iterator[Any]:
    """Yield the backends of all groups that this rank is in, each once, oldest group first."""
    seen: list[Any] = []  # kept, since torch makes the objects anew once they are gone
    for group in list(c10d.distributed_c10d._world.pg_map):
        for device in group._device_types if group.rank() >= 0 else ():
            backend = group._get_backend(device)
            if not any(backend is other for other in seen):
                seen.append(backend)
                yield backend


def _break(backend: Any) -> None:
    for peer in set(range(backend.size())) - {backend.rank()}:
        try:
            backend.recv([torch.empty(1)], peer, _TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "Timed out" in str(error):
                return  # now all are broken; one that was so before says something else
