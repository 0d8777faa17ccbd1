"""Ranks in messages, and checks that this rank is in a process group."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch.distributed as c10d
from torch.distributed import ProcessGroup

from .errors import InvalidArgumentError, NotInGroupError

MOST = 20  # how many ranks or runs of ranks to show


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text in the given order; three or more consecutive ones become a range.

    Example:
        >>> name_ranks([1, 4, 5, 6])
        'ranks 1, 4-6'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    named = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    shown = ", ".join(named[:MOST]) + (f", … ({len(ranks)} in all)" if named[MOST:] else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def require_member(group: ProcessGroup | None) -> None:
    """Check that this rank is a member of a group; None is the default group.

    Raises:
        NotInGroupError: This rank is no member; the message names the group's ranks if known.
        InvalidArgumentError: `group` is not a process group.
    """
    if group is None:
        return
    member = isinstance(group, ProcessGroup)
    if member and group.rank() >= 0:
        return
    if not member and (not isinstance(group, int) or group != c10d.GroupMember.NON_GROUP_MEMBER):
        raise InvalidArgumentError(
            f"group must be a ProcessGroup, or None for the default one, got {type(group).__name__}"
        )
    ranks = ""
    with contextlib.suppress(KeyError, ValueError):  # unknown without torch.distributed
        ranks = ", ".join(map(str, c10d.get_process_group_ranks(group)))
    me = f"rank {c10d.get_rank()}" if c10d.is_initialized() else "this process"
    if member:
        raise NotInGroupError(f"{me} is not a member of the process group of ranks {ranks}")
    last = f" (the last one made without it has ranks {ranks})" if ranks else ""
    raise NotInGroupError(
        f"{me} is not a member of the process group it passed: new_group() gave it a "
        f"placeholder{last}. Call only on the ranks that new_group() was given"
    )
