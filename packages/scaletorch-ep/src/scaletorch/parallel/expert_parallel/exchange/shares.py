"""The experts of each rank: contiguous ranges in rank order, of any lengths."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch.distributed import ProcessGroup

from ....dist import require_member
from ....dist.errors import InvalidArgumentError
from ...pg_manager import axis_group, describe_rank, get_process_group_manager


def expert_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """Return the ranks that share the experts; None is the manager's `ep` axis."""
    if group is not None:
        require_member(group)
        return group
    return axis_group("ep")


def token_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """Return the ranks that hold the same tokens and split them, or None if there are none.

    The default is the manager's tp axis if the expert view folds it (etp = 1).
    """
    if group is not None:
        require_member(group)
        return group
    manager = get_process_group_manager()
    if manager is None or manager.grid.tp == 1:
        return None
    folded = getattr(manager, "etp_size", manager.grid.tp) == 1
    return manager.group("tp") if folded else None


def share_out(number: int, ranks: int) -> tuple[int, ...]:
    """Return each rank's share of `number` items, the first ranks one more than the last."""
    least, more = divmod(number, ranks)
    return tuple(least + (rank < more) for rank in range(ranks))


def ranges_of(counts: Sequence[int]) -> tuple[range, ...]:
    """Return the indices of each rank."""
    return tuple(range(*ends) for ends in pairwise(accumulate(counts, initial=0)))


def counts_of(experts: int | Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the number of experts of each rank.

    Args:
        experts: The number of all experts, shared out evenly, or the number on each rank.
        ranks: The number of ranks.

    Raises:
        InvalidArgumentError: A rank would have none, or the numbers do not match the ranks.
    """
    counts = share_out(experts, ranks) if isinstance(experts, int) else tuple(experts)
    if len(counts) != ranks or min(counts) < 1:
        raise InvalidArgumentError(
            f"{describe_rank()}: each of {ranks} ranks needs at least one expert, got "
            f"{experts} ({', '.join(map(str, counts))} on the ranks): take fewer ranks for "
            "experts, at most as many as there are experts"
        )
    return counts
