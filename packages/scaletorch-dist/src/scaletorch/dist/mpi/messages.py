"""Messages between two ranks over MPI, as bytes."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from .memory import MOST, bring_home, flat, raw
from .progress import Call


def send(mpi: Any, comm: Any, data: Tensor, dst: int, tag: int) -> Call:
    """Send a tensor to the group's rank `dst`."""
    content = flat(data)
    request = comm.Isend(raw(mpi, content), dest=dst, tag=tag)
    return Call("send", [request], [data], keep=content)


def receive(mpi: Any, comm: Any, data: Tensor, src: int, tag: int) -> Call:
    """Fill a tensor from the group's rank `src`, or from any."""
    content = flat(data)
    request = comm.Irecv(raw(mpi, content), source=src, tag=tag)
    finish = partial(bring_home, data, content)
    size = content.numel() * content.element_size()
    expected = size if size <= MOST else None  # beyond, MPI cannot say how many bytes came
    return Call("recv", [request], [data], finish, content, expected)
