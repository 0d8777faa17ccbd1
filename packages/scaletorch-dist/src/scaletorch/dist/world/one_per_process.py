"""Process-wide singletons, shared by all copies of this package that a process imports.

A project may vendor a copy of this library while another is installed, and both may use one process
group. Then both must, for example, number that group's messages with one counter. Such objects are
stored in a module of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.distributed import distributed_c10d as c10d

T = TypeVar("T")


def one_per_process(name: str, make: Callable[[], T]) -> T:
    """Return this process's object of a name; the first call creates it.

    Do not call it at import, which must have no side effects. Copies may have different versions,
    so the interface of the object under one name must not change.

    Args:
        name: Name of the object.
        make: Creates the object, cheaply; called every time, but only the first object is kept.
    """
    kept: T = vars(c10d).setdefault(f"_scaletorch_{name}", make())
    return kept
