"""A scheduler's state: seen to be one that the scheduler takes, before anything is changed."""

from __future__ import annotations

import copy
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from ..errors import DamagedCheckpointError
from ..format.values import decode, like
from .optimizer import check_alike


def decode_schedule(scheduler: Any, saved: Any) -> dict[str, Any]:
    """Return a scheduler's state, as the scheduler has its own.

    Raises:
        DamagedCheckpointError: It is not such a scheduler's.
    """
    current = scheduler.state_dict()
    state: dict[str, Any] = like(current, decode(saved))
    check_alike(current, state, "its scheduler")
    # Private names come and go with versions of torch, and others' names as they please.
    lacking = sorted(name for name in set(current) - set(state) if not name.startswith("_"))
    if lacking and isinstance(scheduler, LRScheduler):
        raise DamagedCheckpointError(f"its scheduler lacks {', '.join(lacking)}")
    return state


def rehearse_schedule(scheduler: Any, state: dict[str, Any]) -> None:
    """Let a scheduler take a state, and give it its own back.

    Raises:
        DamagedCheckpointError: It does not take it.
    """
    before = copy.deepcopy(scheduler.state_dict())
    try:
        scheduler.load_state_dict(copy.deepcopy(state))
    except Exception as error:  # of whatever kind: it is the user's own
        message = f"its scheduler's state is not taken: {type(error).__name__}: {error}"
        raise DamagedCheckpointError(message) from error
    finally:
        scheduler.load_state_dict(before)
