"""How the watchers find the monitor: over the group that they guard, in two small collectives."""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile
from typing import Any

import torch
import torch.distributed as c10d
from torch.distributed import ProcessGroup

from ..collectives.raw import gather_ints, host_device
from ..errors import InvalidArgumentError, StateError
from ..startup.interfaces import is_loopback
from .processes import host_number
from .wire import Line

_WIDTH = 1024  # bytes of what rank 0 tells
_CONNECT = 30.0  # s


def meet(group: ProcessGroup, folder: str | None) -> tuple[socket.socket | None, dict[str, Any]]:
    """Agree on an address, a token and a folder; every rank calls it.

    Returns:
        On the first rank the listening socket, else None; and what was agreed.
    """
    hosts = {host for (host,) in gather_ints((host_number(),), group)}
    listener, agreed = None, b""
    if group.rank() == 0:
        listener, address = _listen(alone=len(hosts) == 1)
        agreed = json.dumps(
            {
                "address": address,
                "port": listener.getsockname()[1],
                "token": secrets.token_hex(16),
                "folder": _choose_folder(folder),
            }
        ).encode()
    data = torch.frombuffer(bytearray(agreed.ljust(_WIDTH)), dtype=torch.uint8)
    data = data.to(host_device(group))
    c10d.broadcast(data, c10d.get_process_group_ranks(group)[0], group)
    found: dict[str, Any] = json.loads(bytes(data.tolist()))
    make_private(found["folder"])
    return listener, found


def _listen(*, alone: bool) -> tuple[socket.socket, str]:
    """Listen on loopback where all ranks are here, else where the master's address leads."""
    master = os.environ.get("MASTER_ADDR", "")
    if alone:
        address = "127.0.0.1"
    elif master and not is_loopback(master):
        address = socket.gethostbyname(master)
    else:
        address = socket.gethostbyname(socket.gethostname())
    try:
        return socket.create_server((address, 0), backlog=4096), address
    except OSError:  # an address that is translated on the way here
        return socket.create_server(("", 0), backlog=4096), address


def _choose_folder(folder: str | None) -> str:
    """Name a folder for this job alone."""
    base = tempfile.gettempdir() if folder is None else os.path.abspath(folder)
    path = os.path.join(base, f"scaletorch-guard-{secrets.token_hex(8)}")
    if len(path.encode()) > _WIDTH // 2:
        raise InvalidArgumentError(f"the folder's path is too long: {path}")
    return path


def make_private(folder: str) -> None:
    """Make a folder that this user alone can read.

    Raises:
        StateError: somebody else has one of that name.
    """
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        status = os.lstat(folder)
        if status.st_uid != os.getuid() or status.st_mode & 0o170077 != 0o040000:
            raise StateError(f"{folder} is not a folder of this user alone") from None


def connect(agreed: dict[str, Any], hello: dict[str, Any]) -> Line:
    """Connect to the monitor.

    Raises:
        StateError: it cannot be reached.
    """
    address, port = agreed["address"], agreed["port"]
    try:
        line = Line(socket.create_connection((address, port), timeout=_CONNECT))
    except OSError as error:
        raise StateError(
            f"cannot reach the guard's monitor on rank 0 at {address}:{port}: {error}"
        ) from error
    line.send({"is": "hello", "token": agreed["token"], **hello})
    return line
