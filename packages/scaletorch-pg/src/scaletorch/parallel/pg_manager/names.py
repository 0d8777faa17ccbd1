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

# Away from the numbers that the program's own groups get.
MARGIN = 1000

# Where the count is kept: beside torch's own, so that vendored copies of this package share it.
_KEY = "_scaletorch_next_group_number"


def first_unused_number() -> int:
    """Lowest group number that this process can offer to the agreement of a new set-up."""
    used: int = getattr(c10d, _KEY, 0)
    return max(used, len(_torch_names()) + MARGIN)


@contextmanager
def numbered_from(number: int) -> Iterator[None]:
    """Let the groups made inside the block be number ``number``, ``number + 1`` and so on."""
    names = _torch_names()
    fillers = [object() for _ in range(number - len(names))]
    names.update((filler, f"scaletorch-{index}") for index, filler in enumerate(fillers))
    try:
        yield
    finally:
        setattr(c10d, _KEY, len(names))
        for filler in fillers:
            del names[filler]


def _torch_names() -> dict[Any, str]:
    # A torch that keeps no such list names groups in another way: nothing to mend then.
    return getattr(getattr(c10d, "_world", None), "pg_names", {})
