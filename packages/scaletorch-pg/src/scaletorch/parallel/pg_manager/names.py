"""Names for new groups that are equal on all members and were never used before.

torch names a group made by local synchronisation after its ranks and the number of groups this
process holds. Two mistakes follow. Where a program has made a group of some ranks only, the
numbers differ between ranks, and members of one new group wait under different names for ever.
And a group made again after it was destroyed gets its old name, under which the store still
holds the old members' addresses: the members connect to sockets that are gone. So a set-up
agrees on a number that no rank has used, and fills torch's list up to it while groups are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import distributed_c10d as c10d

from ...dist.building import one_per_process

# Away from the numbers that the program's own groups get.
MARGIN = 1000


def first_unused_number() -> int:
    """Return the lowest group number that this process can offer in a new set-up."""
    return max(_next_number()[0], len(_torch_names()) + MARGIN)


@contextmanager
def numbered_from(number: int) -> Iterator[None]:
    """Let the groups made inside the block be number `number`, `number + 1` and so on."""
    names = _torch_names()
    fillers = [object() for _ in range(number - len(names))]
    names.update((filler, f"scaletorch-{index}") for index, filler in enumerate(fillers))
    try:
        yield
    finally:
        _next_number()[0] = len(names)
        for filler in fillers:
            del names[filler]


def _next_number() -> list[int]:
    """Return a list of the next unused number, which vendored copies of this package share."""
    return one_per_process("group_numbers", lambda: [0])


def _torch_names() -> dict[Any, str]:
    # A torch that keeps no such list names groups in another way: nothing to mend then.
    return getattr(getattr(c10d, "_world", None), "pg_names", {})
