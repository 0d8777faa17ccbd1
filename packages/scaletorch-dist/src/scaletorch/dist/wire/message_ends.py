"""Comparing the two ends of a message through the group's store, before it is received.

The end that comes first leaves its description; the one that comes second compares and leaves the
verdict. Where they differ, the second end takes part with a scratch tensor as large as the first
one's, so that nothing stays unmatched in the group, and both raise when they wait.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import MismatchError
from ..world.info import get_rank
from ..world.one_per_process import one_per_process
from .backend import on_wire
from .checks import describe

_AGREED = "agreed"

# For each group, how many messages went by sender, receiver and tag.
Counts = WeakKeyDictionary[ProcessGroup, Counter[tuple[int, int, int]]]


class Agreement:
    """One end's knowledge of whether the ends of a message agree; to be awaited after it.

    Attributes:
        scratch: What to send or receive into instead of the data, where this end came second and
            they differ; else None.
    """

    __slots__ = ("_key", "_store", "_verdict", "scratch")

    def __init__(self, store: Any, key: str, verdict: str, scratch: Tensor | None) -> None:
        self._store = store
        self._key = key
        self._verdict = verdict  # "" for the end that came first
        self.scratch = scratch

    def is_completed(self) -> bool:
        """Tell that `wait()` does not wait: the message has arrived."""
        return True

    def wait(self) -> None:
        """Raise if the ends of the message differ.

        Raises:
            MismatchError: They do; on both ends.
        """
        if not self._verdict:
            self._verdict = self._store.get(_verdict_key(self._key)).decode()
            for key in (self._key, _verdict_key(self._key)):
                self._store.delete_key(key)
        if self._verdict != _AGREED:
            raise MismatchError(self._verdict)


def agree(group: ProcessGroup, data: Tensor, peer: int, tag: int, *, sends: bool) -> Agreement:
    """Compare this end of a message with the other one, if that has come.

    Args:
        group: The group that the message goes by.
        data: What is sent, or received into.
        peer: Global rank of the other end.
        tag: The message's tag.
        sends: Whether this is the end that sends.
    """
    me = get_rank()
    path = (me, peer, tag) if sends else (peer, me, tag)
    every: Counts = one_per_process("message_counts", WeakKeyDictionary)
    counts = every.setdefault(group, Counter())
    counts[path] += 1
    key = f"scaletorch/message/{'/'.join(map(str, path))}/{counts[path]}"
    what = describe("", data)[1:-1]
    own = f"rank {me} {'sends' if sends else 'receives'} {what}"
    entry = f"{own}|{what}|{data.nbytes}"
    store = _store(group)
    first = store.compare_set(key, "", entry).decode()
    if first == entry:
        return Agreement(store, key, "", None)
    other, expected, size = first.split("|")
    verdict = _AGREED if expected == what else f"a message does not match: {other}; {own}"
    store.set(_verdict_key(key), verdict)
    if verdict == _AGREED:
        return Agreement(store, key, verdict, None)
    scratch = torch.zeros(int(size), dtype=torch.uint8, device=data.device)
    return Agreement(store, key, verdict, on_wire(scratch, group))


def _verdict_key(key: str) -> str:
    return f"{key}/verdict"


def _store(group: ProcessGroup) -> Any:
    get_store = getattr(group, "get_group_store", None)
    return get_store() if get_store else c10d.distributed_c10d._get_process_group_store(group)
