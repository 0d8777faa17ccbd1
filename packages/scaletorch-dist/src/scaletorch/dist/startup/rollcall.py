"""The roll call: all ranks of this very start are here, each once, before a group is made.

A store may outlive a start: torchrun's agent keeps one over restarts, with all the keys of dead
processes. So rank 0 draws a new name for each start and tells it to whoever knocks with a nonce of
its own, which no dead process can have answered. All keys of the start carry its name.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    PrefixStore,
    QueueEmptyError,
    Store,
)

from ..errors import StateError
from .callers import ALL_ARE_HERE, Caller, judge

_KNOCKS, _COMPLETE = "knocks", "complete"  # keys of the store
_HERE, _VERDICT, _GIVEN_UP, _HEARD = "here", "verdict", "given up", "heard"  # keys of a start
_GRACE = 5.0  # seconds in which rank 0 answers one who gives up
_LINGER = 3.0  # seconds for which rank 0 keeps its store open for others to hear what is wrong
_last_start = ""  # the start that this process took part in last


class StoreClosedError(Exception):
    """The store went away, or belongs to an earlier group of this process: connect again."""


def call_roll(store: Store, caller: Caller, deadline: float, shared: bool) -> Store:
    """Wait until all ranks are here; every one of them gets the same verdict.

    Args:
        store: That all ranks have reached.
        caller: This process.
        deadline: Of `time.monotonic`, by which the world must be full.
        shared: Whether the store belongs to none of the ranks and outlives them.

    Returns:
        The part of the store that belongs to this start alone.

    Raises:
        StateError: Ranks are missing, two processes are one rank, or ranks were told different
            sizes of the world.
        StoreClosedError: The store went away before rank 0 said a word.
    """
    global _last_start
    name = _lead(store, caller, deadline) if caller.rank == 0 else None
    if name is None:
        name = _follow(store, caller, deadline, shared)
    _last_start = name
    return PrefixStore(name, store)


def _lead(store: Store, me: Caller, deadline: float) -> str:
    """Rank 0's part: answer who knocks, write down who is here, and judge."""
    name = secrets.token_hex(8)
    start = PrefixStore(name, store)
    callers = [me]
    verdict = ""
    for _ in _pauses(me.world_size):
        _answer(store, name)
        callers += [Caller(**json.loads(text)) for text in _drain(start, _HERE)]
        verdict = judge(callers, time.monotonic() > deadline or start.check([_GIVEN_UP]))
        if verdict:
            break
    if verdict == ALL_ARE_HERE:
        store.set(_COMPLETE, name)
    start.set(_VERDICT, verdict)
    if verdict != ALL_ARE_HERE:
        others = len(callers) - 1
        if time.monotonic() < deadline:  # who is still on the way is to hear it too
            others = max(others, me.world_size - 1)
        _linger(store, name, others)
        raise StateError(verdict)
    return name


def _answer(store: Store, name: str) -> None:
    for nonce in _drain(store, _KNOCKS):
        store.set(f"answer {nonce}", name)


def _linger(store: Store, name: str, others: int) -> None:
    """Keep the store open until others have heard the verdict, but not for long."""
    start = PrefixStore(name, store)

    def heard() -> bool:
        _answer(store, name)
        return start.add(_HEARD, 0) >= others

    _wait(heard, time.monotonic() + _LINGER, others)


def _follow(store: Store, me: Caller, deadline: float, shared: bool) -> str:
    """Everyone else's part: knock, say who is here, and hear the verdict."""
    try:
        name = _knock(store, me, deadline, shared)
    except DistNetworkError as error:
        raise StoreClosedError(str(error)) from error
    start = PrefixStore(name, store)
    try:
        start.queue_push(_HERE, json.dumps(asdict(me)))
        if not _wait(lambda: start.check([_VERDICT]), deadline, me.world_size):
            start.set(_GIVEN_UP, "")  # rank 0 knows who is missing
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
    """The name of this start, from rank 0."""
    nonce = secrets.token_hex(8)
    key = f"answer {nonce}"
    store.queue_push(_KNOCKS, nonce)

    def answered() -> bool:
        if store.check([key]):
            return True
        if not shared and store.check([_COMPLETE]):
            _refuse_latecomer(store.get(_COMPLETE).decode(), me)
        return False

    if not _wait(answered, deadline, me.world_size):
        raise StateError(
            f"rank {me.rank} has reached the store, but rank 0 never came to it: rank 0 has not "
            "called init_dist, or it has failed; see what it printed"
        )
    return store.get(key).decode()


def _refuse_latecomer(name: str, me: Caller) -> None:
    if name == _last_start:  # rank 0 is about to close it and to open the next
        raise StoreClosedError(name)
    raise StateError(
        f"another process has already joined as rank {me.rank}, all ranks being there: two "
        "programs share this MASTER_PORT, or two processes were given one RANK"
    )


def _drain(store: Store, key: str) -> Iterator[str]:
    while True:
        try:
            item: bytes = store.queue_pop(key, False)
        except QueueEmptyError:
            return
        yield item.decode()


def _wait(ready: Callable[[], bool], deadline: float, ranks: int) -> bool:
    """Ask until it is so or too late. The store's own wait cannot be interrupted, and logs."""
    for _ in _pauses(ranks):
        if ready():
            return True
        if time.monotonic() > deadline:
            return False
    raise AssertionError("pauses never end")


def _pauses(ranks: int) -> Iterator[None]:
    """Sleep between one look at the store and the next, the longer the more ranks ask it."""
    pause, longest = 0.001, 0.02 + ranks * 1e-4
    while True:
        yield
        time.sleep(pause)
        pause = min(1.5 * pause, longest)
