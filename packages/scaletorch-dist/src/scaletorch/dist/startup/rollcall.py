"""Roll call: check that every rank of this start joins exactly once, before creating a group.

A store may outlive a start: torchrun's agent keeps one over restarts, with the keys of dead
processes. So rank 0 draws a new name for each start, and sends it to each rank that asks with a
fresh nonce, which no dead process can have answered. All keys of the start have its name as prefix.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    PrefixStore,
    QueueEmptyError,
    Store,
)

from ..errors import StateError
from ..members import name_ranks

ALL_ARE_HERE = "all are here"
_KNOCKS, _COMPLETE = "knocks", "complete"  # keys of the store
_HERE, _VERDICT, _GIVEN_UP, _HEARD = "here", "verdict", "given up", "heard"  # keys of a start
_SHARED = "two programs share this MASTER_PORT, or processes were given wrong variables"
_GRACE = 5.0  # seconds that a rank which gives up waits for rank 0's answer
_LINGER = 3.0  # seconds that rank 0 keeps its store open for the others to read the error
_last_start = ""  # name of the last start that this process joined


class Caller(NamedTuple):
    """One process in the roll call."""

    rank: int
    world_size: int
    job: str
    host: str
    process: int

    def __str__(self) -> str:
        return f"process {self.process} on host {self.host}"


def judge(callers: list[Caller], too_late: bool) -> str:
    """Return an error message, `ALL_ARE_HERE`, or "" while ranks are missing; rank 0 is first."""
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
                f"rank {caller.rank} ({caller}) expects a world of {caller.world_size} ranks and "
                f"rank 0 ({me}) one of {me.world_size}: {_SHARED}"
            )
        if caller.rank in seen:
            both = f"{seen[caller.rank]} and {caller}"
            return f"two processes claim rank {caller.rank}: {both}: {_SHARED}"
        seen[caller.rank] = caller
    if len(seen) == me.world_size:
        return ALL_ARE_HERE
    if not too_late:
        return ""
    absent = name_ranks([rank for rank in range(me.world_size) if rank not in seen])
    hosts = sorted({caller.host for caller in callers})
    return (
        f"the world of {me.world_size} ranks did not fill in time: {absent} never came; "
        f"{len(seen)} came, from {', '.join(hosts[:8])}. See what the missing ones printed, and "
        "whether all were started with the same MASTER_ADDR and MASTER_PORT"
    )


class StoreClosedError(Exception):
    """The store closed, or belongs to an earlier group of this process: connect again."""


def call_roll(store: Store, caller: Caller, deadline: float, shared: bool) -> Store:
    """Wait for all ranks; return the store (torchrun's if `shared`) with a prefix."""
    global _last_start
    if caller.rank == 0:
        _last_start = _lead(store, caller, deadline)
    else:
        _last_start = _follow(store, caller, deadline, shared)
    return PrefixStore(_last_start, store)


def _lead(store: Store, me: Caller, deadline: float) -> str:
    """Run the roll call on rank 0: answer knocks, list the callers, and publish the verdict."""
    name = secrets.token_hex(8)
    start = PrefixStore(name, store)
    callers = [me]

    def answer() -> None:
        for nonce in _drain(store, _KNOCKS):
            store.set(f"answer {nonce}", name)

    for _ in _pauses(me.world_size):
        answer()
        callers += [Caller(*json.loads(text)) for text in _drain(start, _HERE)]
        verdict = judge(callers, time.monotonic() > deadline or start.check([_GIVEN_UP]))
        if verdict:
            break
    if verdict == ALL_ARE_HERE:
        store.set(_COMPLETE, name)
    start.set(_VERDICT, verdict)
    if verdict == ALL_ARE_HERE:
        return name
    others = len(callers) - 1
    if time.monotonic() < deadline:  # late ranks should read it too
        others = max(others, me.world_size - 1)

    def heard() -> bool:
        answer()
        return start.add(_HEARD, 0) >= others

    _wait(heard, time.monotonic() + _LINGER, others)
    raise StateError(verdict)


def _follow(store: Store, me: Caller, deadline: float, shared: bool) -> str:
    """Run the roll call on other ranks: knock, report this process, and read the verdict."""
    try:
        name = _knock(store, me, deadline, shared)
    except DistNetworkError as error:
        raise StoreClosedError(str(error)) from error
    start = PrefixStore(name, store)
    try:
        start.queue_push(_HERE, json.dumps(me))
        if not _wait(lambda: start.check([_VERDICT]), deadline, me.world_size):
            start.set(_GIVEN_UP, "")  # rank 0 knows which ranks are missing
            _wait(lambda: start.check([_VERDICT]), time.monotonic() + _GRACE, me.world_size)
        known = start.check([_VERDICT])
        verdict = start.get(_VERDICT).decode() if known else "rank 0 has stopped in the roll call"
        if verdict != ALL_ARE_HERE:
            start.add(_HEARD, 1)
    except DistNetworkError as error:
        raise StateError(
            f"rank {me.rank} lost rank 0's store in the roll call: rank 0 has failed or was ended"
        ) from error
    if verdict != ALL_ARE_HERE:
        raise StateError(verdict)
    return name


def _knock(store: Store, me: Caller, deadline: float, shared: bool) -> str:
    """Ask rank 0 for the name of this start."""
    nonce = secrets.token_hex(8)
    key = f"answer {nonce}"
    store.queue_push(_KNOCKS, nonce)

    def answered() -> bool:
        if store.check([key]):
            return True
        if not shared and store.check([_COMPLETE]):
            name = store.get(_COMPLETE).decode()
            if name == _last_start:  # rank 0 is about to close this store and open the next one
                raise StoreClosedError(name)
            raise StateError(
                f"another process has already joined as rank {me.rank}, and all ranks are there: "
                f"{_SHARED}"
            )
        return False

    if not _wait(answered, deadline, me.world_size):
        raise StateError(
            f"rank {me.rank} has reached the store, but rank 0 never came to it: rank 0 has not "
            "called init_dist, or it has failed; see what it printed"
        )
    return store.get(key).decode()


def _drain(store: Store, key: str) -> Iterator[str]:
    while True:
        try:
            item: bytes = store.queue_pop(key, False)
        except QueueEmptyError:
            return
        yield item.decode()


def _wait(ready: Callable[[], bool], deadline: float, ranks: int) -> bool:
    """Poll until ready or too late; the store's own wait cannot be interrupted, and logs."""
    for _ in _pauses(ranks):
        if ready():
            return True
        if time.monotonic() > deadline:
            return False
    raise AssertionError("pauses never end")


def _pauses(ranks: int) -> Iterator[None]:
    """Sleep between two polls of the store, longer if more ranks poll it."""
    pause, longest = 0.001, 0.02 + ranks * 1e-4
    while True:
        yield
        time.sleep(pause)
        pause = min(1.5 * pause, longest)
