"""The times of a schedule whose ranks share cores: each is slower, the more of them compute."""

from __future__ import annotations

from collections.abc import Sequence

from ...parallel.pipeline_parallel import Action, Schedule
from .closed import Times

_AFTER = 1e-12  # of the time: what ends together ends in one


def shared_ends(
    schedule: Schedule, stages: Sequence[Times], message: float, speeds: Sequence[float]
) -> list[float]:
    """Return when each rank ends its last action; every rank runs its actions in order.

    Args:
        schedule: The schedule.
        stages: Seconds of each stage while all ranks compute.
        message: Seconds from a stage to the next on another rank.
        speeds: How much quicker a rank is while 1, 2 ... ranks compute than while all do.
    """
    made: dict[tuple[str, int, int], tuple[float, int]] = {}  # output -> when, on which rank
    reached, left = [0] * schedule.num_ranks, [0.0] * schedule.num_ranks
    running: set[int] = set()
    found = [0.0] * schedule.num_ranks
    now = 0.0
    while True:
        later: list[float] = []
        for rank, actions in enumerate(schedule.ranks):
            if rank in running or reached[rank] == len(actions):
                continue
            action = actions[reached[rank]]
            since = _ready(action, rank, schedule, made, message)
            if since is not None and since <= now * (1 + _AFTER):
                running.add(rank)
                left[rank] = _seconds(action, stages[schedule.stages[rank][action.chunk]])
            elif since is not None:
                later.append(since)
        if not running and not later:
            return found
        speed = speeds[len(running) - 1] if running else 1.0
        until = min([now + left[rank] / speed for rank in running] + later)
        for rank in tuple(running):
            left[rank] -= (until - now) * speed
            if left[rank] <= _AFTER * until:
                action = schedule.ranks[rank][reached[rank]]
                stage = schedule.stages[rank][action.chunk]
                kind = "B" if action.kind == "I" else action.kind
                made[kind, action.micro_batch, stage] = until, rank
                running.remove(rank)
                reached[rank] += 1
                found[rank] = until
        now = until


def _ready(
    action: Action, rank: int, schedule: Schedule,
    made: dict[tuple[str, int, int], tuple[float, int]], message: float,
) -> float | None:  # fmt: skip
    """Return when the input of an action is there; None if it has not been made yet."""
    stage = schedule.stages[rank][action.chunk]
    last = schedule.num_stages - 1
    if action.kind == "W" or (action.kind == "F" and stage == 0):
        return 0.0
    if action.kind == "F":
        need = ("F", action.micro_batch, stage - 1)
    elif stage == last:
        need = ("F", action.micro_batch, stage)
    else:
        need = ("B", action.micro_batch, stage + 1)
    if need not in made:
        return None
    when, maker = made[need]
    return when + (message if maker != rank else 0.0)


def _seconds(action: Action, stage: Times) -> float:
    return {
        "F": stage.forward,
        "B": stage.backward,
        "I": stage.backward - stage.weights,
        "W": stage.weights,
    }[action.kind]
