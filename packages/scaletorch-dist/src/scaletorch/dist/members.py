"""Check that this process may use a process group that it was given."""

from __future__ import annotations

from typing import Any

import torch.distributed as c10d
from torch.distributed import ProcessGroup

from .errors import InvalidArgumentError, NotInGroupError


def require_member(group: ProcessGroup | None) -> None:
    """Refuse a group that this rank is not in.

    Raises:
        NotInGroupError: It names the group's ranks as far as torch knows them here.
        InvalidArgumentError: It is no process group at all.
    """
    if group is None:
        return
    if not isinstance(group, ProcessGroup):
        raise _placeholder_error(group)
    if group.rank() < 0:
        ranks = ", ".join(map(str, c10d.get_process_group_ranks(group)))
        raise NotInGroupError(
            f"{_this_rank()} is not a member of the process group of ranks {ranks}"
        )


def _placeholder_error(group: Any) -> InvalidArgumentError:
    if not isinstance(group, int) or group != c10d.GroupMember.NON_GROUP_MEMBER:
        return InvalidArgumentError(
            f"group must be a ProcessGroup, or None for the default one, got {type(group).__name__}"
        )
    return NotInGroupError(
        f"{_this_rank()} is not a member of the process group it passed: new_group() gave it a "
        f"placeholder{_last_foreign_group(group)}. "
        "Call only on the ranks that new_group() was given"
    )


def _last_foreign_group(placeholder: Any) -> str:
    """The placeholder of torch for all groups without this rank."""
    try:
        ranks = c10d.get_process_group_ranks(placeholder)
    except (KeyError, ValueError):
        return ""
    return f" (the last one made without it has ranks {', '.join(map(str, ranks))})"


def _this_rank() -> str:
    return f"rank {c10d.get_rank()}" if c10d.is_initialized() else "this process"
