"""Initial values of all ranks: compared, or broadcast from the first rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from ....dist import broadcast, group_ranks
from ....dist.building import agree
from ....dist.errors import InvalidArgumentError
from ...pg_manager.building import digest_text

INIT_SYNCS = ("check", "broadcast", "none")


def check_init_sync(given: object) -> None:
    """Refuse anything but one of `INIT_SYNCS`.

    Raises:
        InvalidArgumentError: It is none of them.
    """
    if given not in INIT_SYNCS:
        known = ", ".join(map(repr, INIT_SYNCS))
        raise InvalidArgumentError(f"init_sync must be one of {known}, got {given!r}")


def sync_initial_values(
    tensors: Sequence[tuple[str, Tensor]], how: str, group: ProcessGroup | None
) -> None:
    """Compare parameters and buffers over the ranks, or broadcast the first rank's, in place.

    Args:
        tensors: Named tensors; names, shapes and dtypes are the same on all ranks.
        how: One of `INIT_SYNCS`.
        group: The ranks.

    Raises:
        MismatchError: Values differ under "check"; raised on every rank, with their names.
    """
    if how == "broadcast":
        source = group_ranks(group)[0]
        for _, tensor in tensors:
            broadcast(tensor.detach(), source, group=group)
    elif how == "check":
        lines = [f"{name} has values {digest_text(tensor)}" for name, tensor in tensors]
        agree("the values to begin with (pass init_sync='broadcast' to send the first rank's)",
              lines, group)  # fmt: skip
