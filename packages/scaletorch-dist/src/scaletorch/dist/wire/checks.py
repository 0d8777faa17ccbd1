"""Checks of a call before anything is sent: its arguments here, and the calls of other ranks.

Calls are compared if `check_collectives(True)` or `SCALETORCH_DIST_CHECK=1` asks for it on *every*
rank. Then each call first compares its name, shapes, dtype, operation, root and group size over the
group, and raises on every rank if they differ, instead of mixing up data, aborting or hanging. A
call that fails on one rank before it has compared takes part with its error, so that no other waits
for it.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import ProcessGroup

from ..devices import entry_of_backend
from ..errors import InvalidArgumentError, MismatchError, NotInGroupError
from ..naming import name_ranks
from ..world.info import group_ranks
from . import port
from .backend import all_gather_single, host_device, process_group, route

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
        global _compared
        if not comparing():
            return call(*args, **options)
        before = _compared
        try:
            return call(*args, **options)
        except Exception as error:
            group = _group_among((*args, *options.values()))
            if group is not None and before == _compared:
                _compared += 1  # a call around this one need not tell it again
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


def check_tensor(data: Any, call: str, name: str = "data") -> None:
    """Make sure that `data` is a dense tensor with memory.

    Raises:
        InvalidArgumentError: It is not.
    """
    if not isinstance(data, Tensor):
        message = f"{call} needs a tensor for {name}, got {type(data).__name__}"
        raise InvalidArgumentError(message)
    if data.layout is not torch.strided or data.is_quantized or data.is_meta:
        kind = "meta" if data.is_meta else "quantized" if data.is_quantized else str(data.layout)
        message = f"{call} needs a dense tensor for {name}, got a {kind} one: convert it first"
        raise InvalidArgumentError(message)


def check_target(data: Any, call: str, name: str = "data") -> None:
    """Make sure that `data` can be filled in place.

    Raises:
        InvalidArgumentError: It is no dense tensor, or an expanded one.
    """
    check_tensor(data, call, name)
    if data.is_contiguous():
        return
    if any(
        stride == 0 and size > 1 for stride, size in zip(data.stride(), data.shape, strict=True)
    ):
        message = (
            f"{call} fills {name} in place, but its entries share memory (shape "
            f"{tuple(data.shape)}, strides {data.stride()}): pass {name}.clone()"
        )
        raise InvalidArgumentError(message)


def check_list(
    tensors: Any,
    count: int,
    call: str,
    name: str,
    *,
    like: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Make sure that `tensors` are `count` dense tensors of one shape or dtype.

    Raises:
        InvalidArgumentError: They are not.
    """
    if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence) or len(tensors) != count:
        got = f"{len(tensors)}" if isinstance(tensors, Sequence) else type(tensors).__name__
        message = f"{call} needs a list of {count} tensors for {name}, one a rank, got {got}"
        raise InvalidArgumentError(message)
    for position, tensor in enumerate(tensors):
        label = f"{name}[{position}]" if count > 1 else name
        check_tensor(tensor, call, label)
        wanted = like.dtype if like is not None else dtype
        if wanted is not None and tensor.dtype != wanted:
            message = (
                f"{call} needs {wanted} for {label}, as the tensor beside it; got {tensor.dtype}"
            )
            raise InvalidArgumentError(message)
        if like is not None and tensor.shape != like.shape:
            message = (
                f"{call} needs shape {tuple(like.shape)} for {label}, as the tensor beside it; "
                f"got {tuple(tensor.shape)}"
            )
            raise InvalidArgumentError(message)


def check_form_with_list(
    args: Sequence[Any], options: Mapping[str, Any], names: tuple[str, str], call: str, needs: str
) -> None:
    """Make sure that a call which was not given one tensor was given a list and more.

    Raises:
        InvalidArgumentError: It was not.
    """
    first = args[0] if args else options.get("data")
    listed = names[0] in options or isinstance(first, Sequence)
    if not listed or not (len(args) > 1 or names[1] in options):
        raise InvalidArgumentError(f"{call} needs a tensor, or {needs}, got {type(first).__name__}")


def check_member(rank: Any, name: str, group: ProcessGroup | None) -> bool:
    """Make sure that global rank `rank` is in the group; tell whether it is this one.

    Raises:
        InvalidArgumentError: It is no whole number.
        NotInGroupError: It is outside.
    """
    if not isinstance(rank, int) or isinstance(rank, bool):
        message = f"{name} must be a global rank, got {rank!r}"
        raise InvalidArgumentError(message)
    ranks = group_ranks(group)
    if rank not in ranks:
        message = (
            f"{name}={rank} is not in the group, whose ranks are {', '.join(map(str, ranks))} "
            f"({name} is a global rank)"
        )
        raise NotInGroupError(message)
    members = process_group(group)
    return rank == (0 if members is None else ranks[members.rank()])


def check_tag(tag: Any, data: Tensor, group: ProcessGroup) -> None:
    """Make sure that messages can be told apart by `tag`.

    Args:
        tag: Of a message.
        data: What it carries.
        group: The group it goes by.

    Raises:
        InvalidArgumentError: It is no number of at least 0; or not 0, and the group's backend for
            tensors of this device has no tags.
    """
    if not isinstance(tag, int) or tag < 0:
        raise InvalidArgumentError(f"tag must be a number of at least 0, got {tag!r}")
    if tag:
        backend = route(data, group).backend
        entry = entry_of_backend(backend)
        if entry is not None and not entry.tags:
            raise InvalidArgumentError(
                f"tag={tag}: {backend} has no tags, it matches the messages between two ranks in "
                "the order of sending; leave tag=0 and receive in that order, or send each kind of "
                "message by a group of its own"
            )
