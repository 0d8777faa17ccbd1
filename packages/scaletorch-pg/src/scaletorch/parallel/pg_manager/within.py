"""Groups of some ranks of another group, which end with it."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from ...dist import get_rank, get_timeout, group_ranks
from .names import numbered_from

# As in GroupSet, torch alone holds the groups.
_made: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ReferenceType[ProcessGroup]]]
_made = WeakKeyDictionary()


def groups_within(
    parent: ProcessGroup, wanted: Iterable[tuple[int, ...]], number: int
) -> dict[tuple[int, ...], ProcessGroup]:
    """Return this rank's groups among those wanted; each is made once for a parent.

    Args:
        parent: Where all its ranks are wanted, it is that group itself.
        wanted: Global ranks of each group, in one order on all ranks of the parent.
        number: From where torch's group names count, agreed by all ranks of the parent.
    """
    rank, every = get_rank(), group_ranks(parent)
    known = _made.setdefault(parent, {})
    found = {}
    for place, ranks in enumerate(dict.fromkeys(wanted)):
        if rank not in ranks:
            continue
        group = parent if ranks == every else None
        if group is None and ranks in known:
            group = known[ranks]()
        if group is None:
            with numbered_from(number + place):
                group = torch_dist.new_group(
                    list(ranks),
                    timeout=get_timeout(),
                    use_local_synchronization=True,
                    group_desc="scaletorch_within",
                )
            known[ranks] = ref(group)
        found[ranks] = group
    return found


def destroy_within(parent: ProcessGroup) -> None:
    """Destroy the groups made within another one, newest first."""
    for reference in reversed(_made.pop(parent, {}).values()):
        group = reference()
        if group is not None:
            torch_dist.destroy_process_group(group)
