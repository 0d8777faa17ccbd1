"""Freeing threads that are blocked in gloo.

Gloo has no call for it: neither `abort` nor `shutdown` ends a collective that waits for a peer. But
a message that is not there in time makes it break all connections of its group in this process, and
that frees all threads that wait on them with an error, in collectives too. So: wait 1 ms for one.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d

_TAG = 0x5CA1E  # nobody's


def break_gloo_groups() -> None:
    """Break the gloo connections of every group of this process; they are of no use after."""
    for group in list(c10d.distributed_c10d._world.pg_map):
        with contextlib.suppress(Exception):
            _break(group)


def _break(group: Any) -> None:
    if group.size() < 2 or group.rank() < 0:
        return
    backend = group._get_backend(torch.device("cpu"))
    if backend.name() != "gloo":
        return
    for peer in set(range(group.size())) - {group.rank()}:
        try:
            backend.recv([torch.empty(1)], peer, _TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "Timed out" in str(error):
                return  # now all are broken; one that was so before says something else
