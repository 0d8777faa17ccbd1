"""Comparing what the ranks are about to do, before they do it: off unless asked for.

With `check_collectives(True)`, or `SCALETORCH_DIST_CHECK=1` in the environment, of *every* rank,
each call first compares its name, shapes, dtype, operation, root and group size over the group, and
raises on every rank if they differ, instead of mixing up data, aborting or hanging. A call that
fails on one rank before it has compared takes part with its error, so that no other waits for it.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import InvalidArgumentError, MismatchError
from ..naming import name_ranks
from ..world.info import group_ranks
from . import port
from .backend import all_gather_single, host_device, process_group

VARIABLE = "SCALETORCH_DIST_CHECK"
WIDTH = 512  # bytes of a description that travel; what is longer is cut and ends in a digest

P = ParamSpec("P")
R = TypeVar("R")

_switch: bool | None = None
_compared = 0  # how many calls have been compared, to tell what failed before


def check_collectives(on: bool | None = True) -> None:
    """Turn the comparison on or off for this process, whatever the environment says.

    Args:
        on: True or False; None goes by `SCALETORCH_DIST_CHECK` again. The same on every rank.

    Raises:
        InvalidArgumentError: Anything else.
    """
    global _switch
    if on is not None and not isinstance(on, bool):
        message = f"check_collectives takes True, False or None, got {on!r}"
        raise InvalidArgumentError(message)
    _switch = on


def __rank_state__() -> object:
    """Tell test ranks what is to be as before."""
    return _switch


def checking() -> bool:
    """Return whether anybody wants to know of calls: a comparison or a guard."""
    return port.guard is not None or comparing()


def comparing() -> bool:
    """Return whether calls are compared; the environment is read at every call."""
    return os.environ.get(VARIABLE, "0") not in ("", "0") if _switch is None else _switch


def compare(group: ProcessGroup, call: str, *facts: Any) -> None:
    """Tell the guard, if there is one, of a call, and compare it over its group if asked to.

    Args:
        group: The group that the call is about to communicate on.
        call: Its name.
        facts: Tensors (their shape and dtype count), and whatever else must agree.

    Raises:
        MismatchError: On every rank, if any rank's call differs; it shows who does what.
    """
    global _compared
    if port.guard is not None:
        port.record(group, call, facts)
        if not comparing():
            return
    _compared += 1
    texts = exchange_texts(describe(call, *facts, f"{group.size()} ranks"), group)
    if texts is not None:
        raise MismatchError(f"ranks make different calls: {who_says_what(texts, group)}")


def begin(group: ProcessGroup | None, call: str, *facts: Any) -> ProcessGroup | None:
    """Begin a collective, told of and compared as `compare` does.

    Args:
        group: None for the default group.
        call: Its name.
        facts: As in `compare`.

    Returns:
        The group that it communicates on; None if this rank is alone.

    Raises:
        NotInGroupError: This rank is outside the group.
        MismatchError: On every rank, if any rank's call differs.
    """
    members = process_group(group)
    if members is None or members.size() == 1:
        return None
    if checking():
        compare(members, call, *facts)
    return members


def tells_failure(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a collective: where calls are compared, an error before that reaches every rank."""

    @functools.wraps(call)
    def told(*args: P.args, **options: P.kwargs) -> R:
        if not comparing():
            return call(*args, **options)
        before = _compared
        try:
            return call(*args, **options)
        except Exception as error:
            group = _group_among((*args, *options.values()))
            if group is not None and before == _compared:
                exchange_texts(f"{call.__name__.lstrip('_')} fails: {error}", group)
            raise

    return told


def _group_among(arguments: Sequence[Any]) -> ProcessGroup | None:
    """Return the group that a call's arguments say; None for one that this rank is not in."""
    if any(argument is c10d.GroupMember.NON_GROUP_MEMBER for argument in arguments):
        return None
    groups = [argument for argument in arguments if isinstance(argument, ProcessGroup)]
    return groups[0] if groups else c10d.group.WORLD


def describe(call: str, *facts: Any) -> str:
    """Return one line on a call."""
    return f"{call}({', '.join(_fact(fact) for fact in facts)})"


def _fact(fact: Any) -> str:
    if isinstance(fact, Tensor):
        return f"{str(fact.dtype).removeprefix('torch.')}{list(fact.shape)}"
    if isinstance(fact, (list, tuple)):
        return f"[{', '.join(_fact(entry) for entry in fact)}]"
    return str(fact)


def exchange_texts(text: str, group: ProcessGroup) -> list[str] | None:
    """Return every rank's text if they differ, cut to `WIDTH` bytes; or None if all are one."""
    data = text.encode(errors="backslashreplace")
    if len(data) > WIDTH:
        digest = hashlib.sha256(data).hexdigest()[:16]
        data = f"{data[: WIDTH - 24].decode(errors='ignore')} … #{digest}".encode()
    own = torch.frombuffer(bytearray(data.ljust(WIDTH, b"\0")), dtype=torch.uint8)
    own = own.to(host_device(group))
    rows = own.new_empty((group.size(), WIDTH))
    all_gather_single(rows.view(-1), own, group=group)
    if bool((rows == own).all()):
        return None
    return [bytes(row).rstrip(b"\0").decode() for row in rows.tolist()]


def who_says_what(texts: Sequence[str], group: ProcessGroup | None) -> str:
    """Return the texts with the global ranks that said each, the most frequent first."""
    speakers: dict[str, list[int]] = {}
    for rank, text in zip(group_ranks(group), texts, strict=True):
        speakers.setdefault(text, []).append(rank)
    ordered = sorted(speakers.items(), key=lambda item: (-len(item[1]), item[1]))
    return "; ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in ordered)
