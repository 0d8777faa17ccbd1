"""The processes in a roll call, and checks of their claims."""

from __future__ import annotations

from dataclasses import dataclass

from ..naming import name_ranks

ALL_ARE_HERE = "all are here"


@dataclass(frozen=True, slots=True)
class Caller:
    """One process in the roll call."""

    rank: int
    world_size: int
    job: str
    host: str
    process: int

    def __str__(self) -> str:
        return f"process {self.process} on host {self.host}"


def judge(callers: list[Caller], too_late: bool) -> str:
    """Return an error message, `ALL_ARE_HERE`, or "" while ranks are missing.

    Args:
        callers: Rank 0 first, then the others as they arrived.
        too_late: Whether missing ranks are an error.
    """
    me = callers[0]
    seen: dict[int, Caller] = {}
    for caller in callers:
        if caller.job != me.job:
            return (
                f"rank {caller.rank} ({caller}) belongs to job {caller.job!r} and rank 0 ({me}) to "
                f"{me.job!r}: two programs meet at one port; set another MASTER_PORT, or pass port="
            )
        if caller.world_size != me.world_size:
            return (
                f"rank {caller.rank} ({caller}) was told a world of {caller.world_size} ranks and "
                f"rank 0 ({me}) one of {me.world_size}: two programs share this MASTER_PORT, or "
                "the launcher's variables were changed"
            )
        if caller.rank in seen:
            return (
                f"two processes claim rank {caller.rank}: {seen[caller.rank]} and {caller}. Two "
                "programs share this MASTER_PORT, or two processes were given one RANK"
            )
        seen[caller.rank] = caller
    if len(seen) == me.world_size:
        return ALL_ARE_HERE
    return _missing(seen, me.world_size) if too_late else ""


def _missing(seen: dict[int, Caller], world_size: int) -> str:
    absent = name_ranks([rank for rank in range(world_size) if rank not in seen])
    hosts = sorted({caller.host for caller in seen.values()})
    shown = ", ".join(hosts[:8]) + (" …" if len(hosts) > 8 else "")
    return (
        f"the world of {world_size} ranks did not fill in time: {absent} never came; {len(seen)} "
        f"came, from {shown}. See what the missing ones printed, and whether all were started with "
        "the same MASTER_ADDR and MASTER_PORT"
    )
