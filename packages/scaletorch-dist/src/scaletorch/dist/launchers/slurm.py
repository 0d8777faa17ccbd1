"""Slurm's short forms: host lists, tasks of each node, the address of a node without a name."""

from __future__ import annotations

import itertools
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator

from ..errors import StateError

_RANGE = re.compile(r"(\d+)-(\d+)")


def first_host(nodelist: str) -> str:
    """Return the first host of a host list, without making the others.

    Example:
        >>> first_host("gpu[003-007,12],login1")
        'gpu003'
    """
    return next(expand_hosts(nodelist))


def expand_hosts(nodelist: str) -> Iterator[str]:
    """Yield all hosts of a host list, in its order.

    Args:
        nodelist: Names with commas between; brackets hold numbers, ranges (zeros in front are
            kept) or names, several in one name or one in another.

    Raises:
        StateError: It is empty, or its brackets or ranges are broken.
    """
    found = False
    for item in _split(nodelist, nodelist):
        for host in _names(item.strip(), nodelist):
            found = True
            yield host
    if not found:
        raise _unreadable(nodelist)


def _split(text: str, nodelist: str) -> list[str]:
    """Cut at the commas that are in no bracket."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if depth < 0:
            raise _unreadable(nodelist)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    if depth or not all(part.strip() for part in parts):
        raise _unreadable(nodelist)
    return parts


def _names(item: str, nodelist: str) -> Iterator[str]:
    """The names that one item with brackets stands for; the last bracket runs fastest."""
    head, bracket, rest = item.partition("[")
    if not bracket:
        yield head
        return
    depth, end = 1, 0
    while depth:
        depth += (rest[end] == "[") - (rest[end] == "]")
        end += 1
    inside, tail = rest[: end - 1], rest[end:]
    for part in _split(inside, nodelist):
        for middle in _range(part, nodelist):
            for end_of_name in _names(tail, nodelist):
                yield head + middle + end_of_name


def _range(part: str, nodelist: str) -> Iterator[str]:
    match = _RANGE.fullmatch(part)
    if match is None:
        yield from _names(part, nodelist)
        return
    first, last = match.groups()
    if int(first) > int(last):
        raise _unreadable(nodelist)
    for number in range(int(first), int(last) + 1):
        yield str(number).zfill(len(first))


def _unreadable(nodelist: str) -> StateError:
    return StateError(f"cannot read the node list {nodelist!r}: expected 'node[01-03,07],login'")


def expand_tasks_per_node(text: str) -> list[int]:
    """Tasks of each node from Slurm's short form.

    Example:
        >>> expand_tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return list(
        itertools.chain.from_iterable([int(count)] * int(times or 1) for count, times in runs)
    )


def node_address(host: str) -> str:
    """A node's name if it resolves, else the address that Slurm itself uses for it.

    Raises:
        StateError: Neither is to be had.
    """
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        pass
    else:
        return host
    scontrol = shutil.which("scontrol")
    answer = ""
    if scontrol is not None:
        command = [scontrol, "-o", "show", "node", host]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    found = re.search(r"\bNodeAddr=(\S+)", answer)
    if found is None:
        raise StateError(
            f"the name of Slurm node {host!r} does not resolve and scontrol gives no address for "
            "it: set MASTER_ADDR to an address of rank 0's node"
        )
    return found.group(1)
