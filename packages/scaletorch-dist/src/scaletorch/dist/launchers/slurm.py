"""Parse Slurm's host lists and tasks per node, and find the address of a node."""

from __future__ import annotations

import itertools
import re
import shutil
import socket
import subprocess

from ..errors import StateError

# A name with lists in brackets, `rack[2-3]n[004-005,9]`, and a list of such names.
_NAME = r"(?:[^\s,\[\]]|\[[^\s,\[\]]+(?:,[^\s,\[\]]+)*\])+"
_LIST = re.compile(rf"\s*({_NAME})(?:\s*,\s*{_NAME})*\s*")
_BRACKET = re.compile(r"\[(\d+(?=-\d)|[^,\[\]]+)[^\[\]]*\]")  # captures the first entry


def first_host(nodelist: str) -> str:
    """Return the first host of a host list.

    Example:
        >>> first_host("gpu[003-007,12],login1")
        'gpu003'
    """
    read = _LIST.fullmatch(nodelist)
    if read is None:
        raise StateError(f"cannot read the node list {nodelist!r}: expected 'node[01-03,07],login'")
    return _BRACKET.sub(r"\1", read[1])


def expand_tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node from Slurm's short form.

    Example:
        >>> expand_tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return list(
        itertools.chain.from_iterable([int(count)] * int(times or 1) for count, times in runs)
    )


def node_address(host: str) -> str:
    """Return a node's name if it resolves, else the address that Slurm itself uses for it."""
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
