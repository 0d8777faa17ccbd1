"""Checks of a call's arguments before anything is sent, and of what must be the same on all ranks.

Calls are compared if `check_collectives(True)` or `SCALETORCH_DIST_CHECK=1` is set on *every* rank.
Then each call first compares its name, shapes, dtype, operation, root and group size over the
group, and raises on every rank if they differ, instead of mixing up data, aborting or hanging.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..devices import entry_of_backend
from ..errors import InvalidArgumentError, MismatchError, NotInGroupError, ScaletorchError
from ..members import name_ranks
from ..world.info import get_rank, group_ranks
from . import backend
from .backend import digest_of, gather_ints, gather_texts, process_group, route

VARIABLE = "SCALETORCH_DIST_CHECK"
SHOWN = 12  # lines of difference for each rank

_switch: bool | None = None


def check_collectives(on: bool | None = True) -> None:
    """Turn the comparison of calls on or off in this process, overriding the environment.

    Args:
        on: True or False, or None to follow `SCALETORCH_DIST_CHECK` again; equal on every rank.

    Raises:
        InvalidArgumentError: `on` is anything else.
    """
    global _switch
    if on is not None and not isinstance(on, bool):
        raise InvalidArgumentError(f"check_collectives takes True, False or None, got {on!r}")
    _switch = on


def __rank_state__() -> object:
    """Return the setting that a test must leave unchanged, for the test ranks to compare."""
    return _switch


def checking() -> bool:
    """Return whether calls must be described: the comparison is on, or a guard is installed."""
    return backend.guard is not None or comparing()


def comparing() -> bool:
    """Return whether calls are compared; the environment is read at every call."""
    return os.environ.get(VARIABLE, "0") not in ("", "0") if _switch is None else _switch


def compare(group: ProcessGroup, call: str, *facts: Any) -> None:
    """Report a call to an installed guard, and compare it over its group if comparison is on.

    Facts are tensors, whose shapes and dtypes are compared, and other values that must agree.
    """
    if backend.guard is not None:
        backend.record(group, call, facts)
        if not comparing():
            return
    difference = differing_texts(describe(call, *facts, f"{group.size()} ranks"), group)
    if difference:
        raise MismatchError(f"ranks make different calls: {difference}")


def begin(group: ProcessGroup | None, call: str, *facts: Any) -> ProcessGroup | None:
    """Report and compare a call as `compare` does; return its group, or None for one rank."""
    members = process_group(group)
    if members is None or members.size() == 1:
        return None
    if checking():
        compare(members, call, *facts)
    return members


def describe(call: str, *facts: Any) -> str:
    """Return a one-line description of a call."""
    return f"{call}({', '.join(_fact(fact) for fact in facts)})"


def _fact(fact: Any) -> str:
    if isinstance(fact, Tensor):
        return f"{str(fact.dtype).removeprefix('torch.')}{list(fact.shape)}"
    if isinstance(fact, (list, tuple)):
        return f"[{', '.join(_fact(entry) for entry in fact)}]"
    return str(fact)


def differing_texts(text: str, group: ProcessGroup) -> str:
    """Return each text with its ranks, the most frequent first; "" if all are equal."""
    digests = gather_ints((digest_of(text),), group)
    if digests.count(digests[0]) == len(digests):
        return ""
    speakers: dict[str, list[int]] = {}
    for rank, said in zip(group_ranks(group), gather_texts(text, group), strict=True):
        speakers.setdefault(said, []).append(rank)
    ordered = sorted(speakers.items(), key=lambda item: (-len(item[1]), item[1]))
    return "; ".join(f"{name_ranks(ranks)}: {said}" for said, ranks in ordered)


def check_tensor(data: Any, call: str, name: str = "data") -> None:
    """Check that `data` is a dense tensor with memory."""
    if not isinstance(data, Tensor):
        raise InvalidArgumentError(f"{call} needs a tensor for {name}, got {type(data).__name__}")
    if data.layout is not torch.strided or data.is_quantized or data.is_meta:
        kind = "meta" if data.is_meta else "quantized" if data.is_quantized else str(data.layout)
        message = f"{call} needs a dense tensor for {name}, got a {kind} one: convert it first"
        raise InvalidArgumentError(message)


def check_target(data: Any, call: str, name: str = "data") -> None:
    """Check that `data` can be filled in place."""
    check_tensor(data, call, name)
    pairs = zip(data.stride(), data.shape, strict=True)
    if not data.is_contiguous() and any(stride == 0 and size > 1 for stride, size in pairs):
        raise InvalidArgumentError(
            f"{call} fills {name} in place, but its entries share memory (shape "
            f"{tuple(data.shape)}, strides {data.stride()}): pass {name}.clone()"
        )


def check_list(
    tensors: Any,
    count: int,
    call: str,
    name: str,
    *,
    like: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Check that `tensors` are `count` dense tensors, all shaped as `like` or all of `dtype`."""
    if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence) or len(tensors) != count:
        got = f"{len(tensors)}" if isinstance(tensors, Sequence) else type(tensors).__name__
        message = f"{call} needs a list of {count} tensors for {name}, one per rank, got {got}"
        raise InvalidArgumentError(message)
    for position, tensor in enumerate(tensors):
        label = f"{name}[{position}]" if count > 1 else name
        check_tensor(tensor, call, label)
        wanted = like.dtype if like is not None else dtype
        if wanted is not None and tensor.dtype != wanted:
            raise InvalidArgumentError(
                f"{call} needs {wanted} for {label}, like its other tensor; got {tensor.dtype}"
            )
        if like is not None and tensor.shape != like.shape:
            raise InvalidArgumentError(
                f"{call} needs shape {tuple(like.shape)} for {label}, like its other tensor; "
                f"got {tuple(tensor.shape)}"
            )


def check_form_with_list(
    args: Sequence[Any], options: Mapping[str, Any], names: tuple[str, str], call: str, needs: str
) -> None:
    """Check that a call without a single tensor got a list and the second argument."""
    first = args[0] if args else options.get("data")
    listed = names[0] in options or isinstance(first, Sequence)
    if not listed or not (len(args) > 1 or names[1] in options):
        raise InvalidArgumentError(f"{call} needs a tensor, or {needs}, got {type(first).__name__}")


def check_member(rank: Any, name: str, group: ProcessGroup | None) -> bool:
    """Check that global rank `rank` is in the group; return whether it is this rank."""
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise InvalidArgumentError(f"{name} must be a global rank, got {rank!r}")
    ranks = group_ranks(group)
    if rank not in ranks:
        raise NotInGroupError(
            f"{name}={rank} is not in the group, whose ranks are {', '.join(map(str, ranks))} "
            f"({name} is a global rank)"
        )
    members = process_group(group)
    return rank == (0 if members is None else ranks[members.rank()])


def check_tag(tag: Any, data: Tensor, group: ProcessGroup) -> None:
    """Check that the backend of a message's tensor supports its tag."""
    if not isinstance(tag, int) or tag < 0:
        raise InvalidArgumentError(f"tag must be a number of at least 0, got {tag!r}")
    if tag:
        name = route(data, group).backend
        entry = entry_of_backend(name)
        if entry is not None and not entry.tags:
            raise InvalidArgumentError(
                f"tag={tag}: {name} has no tags, it matches the messages between two ranks in "
                "the order of sending; leave tag=0 and receive in that order, or send each kind of "
                "message by a group of its own"
            )


def caught(check: Callable[..., object], *arguments: Any) -> ScaletorchError | None:
    """Run a check and return its error, for `agree` to report to the other ranks, or None."""
    try:
        check(*arguments)
    except ScaletorchError as error:
        return error
    return None


def agree(
    subject: str,
    lines: Sequence[str],
    group: ProcessGroup | None = None,
    *,
    error: Exception | None = None,
    note: int = 0,
) -> tuple[int, ...]:
    """Raise on every rank of `group` unless all have equal `lines` and none has an `error`.

    Costs one all-gather of 24 bytes per rank; the lines are sent only if they differ. A rank
    with an error of its own must call this too, so that the others do not wait for it forever.

    Args:
        subject: The values that are compared, for the message.
        lines: One line of text for each value that must be equal.
        group: The ranks that compare; None for all.
        error: An error of this rank, raised once the other ranks have received it.
        note: A number to send to the other ranks, not compared.

    Returns:
        Every rank's note.

    Raises:
        MismatchError: Lines differ, or another rank has an error.
    """
    notes: tuple[int, ...] = (note,)
    members = begin(group, "agree", subject)
    if members is not None:
        digest = digest_of("\n".join(lines))
        heads = gather_ints((digest, error is not None, note), members)
        notes = tuple(theirs for _, _, theirs in heads)
        if any(said != [heads[0][0], 0] for *said, _ in heads):
            text = None if error is None else f"{type(error).__name__}: {error}"
            texts = gather_texts(json.dumps([list(lines), text]), members)
            if error is None:
                reports = [json.loads(report) for report in texts]
                raise MismatchError(_difference(subject, group_ranks(members), reports))
    if error is not None:
        try:
            raise error
        finally:
            del error  # breaks a cycle: its traceback holds this frame, and a step's tensors
    return notes


def _difference(
    subject: str, ranks: Sequence[int], reports: Sequence[tuple[list[str], str | None]]
) -> str:
    for rank, (_, text) in zip(ranks, reports, strict=True):
        if text is not None:
            return f"rank {rank} cannot take part in {subject}: {text}"
    speakers: dict[tuple[str, ...], list[int]] = {}
    for rank, (said, _) in zip(ranks, reports, strict=True):
        speakers.setdefault(tuple(said), []).append(rank)
    usual = max(speakers, key=lambda lines: len(speakers[lines]))  # the first one on a tie
    odd = [rank for lines, said in speakers.items() if lines != usual for rank in said]
    differ = f"{name_ranks(odd)} differ{'s' * (len(odd) == 1)} from {name_ranks(speakers[usual])}"
    message = [
        f"the ranks disagree on {subject}: {differ}; every rank must be given the "
        f"same (this is rank {get_rank()})"
    ]
    for lines, odd in speakers.items():
        if lines != usual:
            diff = difflib.unified_diff(usual, lines, n=0, lineterm="")
            changed = [line for line in diff if not line.startswith(("---", "+++", "@@"))]
            message.append(f"{name_ranks(odd)} (+), {name_ranks(speakers[usual])} (-):")
            message += [f"  {line[0]} {line[1:]}" for line in changed[:SHOWN]]
            if len(changed) > SHOWN:
                message.append(f"  … and {len(changed) - SHOWN} lines more")
    return "\n".join(message)
