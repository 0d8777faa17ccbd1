"""Objects of which a process has one, however many copies of this package it imports.

A project may hold a copy of this library beside an installed one, and both may work on one process
group: what numbers that group's messages must then be the same to both. Such an object is kept
beside torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.distributed import distributed_c10d as c10d

T = TypeVar("T")


def one_per_process(name: str, make: Callable[[], T]) -> T:
    """Return this process's object of a name; the first call makes it.

    Not to be called at import, which changes nothing outside. Copies may be of different versions:
    what is used of the object under one name must stay as it is.

    Args:
        name: What it is.
        make: Makes it, cheaply.
    """
    kept: T = vars(c10d).setdefault(f"_scaletorch_{name}", make())
    return kept
