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
from .helper import start_monitor
from .leftovers import PREFIX, remove_old
from .processes import host_number
from .wire import Line

_WIDTH = 1024  # bytes of what rank 0 tells
_CONNECT = 30.0  # s
_TAKES = 60.0  # s that the monitor may be too busy to hear a rank


def meet(group: ProcessGroup, folder: str | None, limits: dict[str, float]) -> dict[str, Any]:
    """Start the monitor beside the first rank, and agree where it is; every rank calls it.

    Args:
        group: whose ranks come.
        folder: where to keep the ledgers; None for a temporary folder.
        limits: the monitor's.

    Returns:
        Its address, port and token, and the ledgers' folder; or ``failed``, why there is none.

    Raises:
        StateError: the folder is somebody else's.
    """
    hosts = {host for (host,) in gather_ints((host_number(),), group)}
    agreed = b""
    if group.rank() == 0:
        try:
            said = _start(_choose_folder(folder), group.size(), limits, alone=len(hosts) == 1)
        except (OSError, ValueError) as error:  # no port, or no process: on every rank
            said = {"failed": str(error)[: _WIDTH // 2]}
        agreed = json.dumps(said).encode()
    data = torch.frombuffer(bytearray(agreed.ljust(_WIDTH)), dtype=torch.uint8)
    data = data.to(host_device(group))
    c10d.broadcast(data, c10d.get_process_group_ranks(group)[0], group)
    found: dict[str, Any] = json.loads(bytes(data.tolist()))
    if "folder" in found and make_private(found["folder"]) and folder is None:
        remove_old(os.path.dirname(found["folder"]))
    return found


def _start(folder: str, size: int, limits: dict[str, float], *, alone: bool) -> dict[str, Any]:
    listener, address = _listen(alone=alone)
    port, token = listener.getsockname()[1], secrets.token_hex(16)
    start_monitor(listener, {"token": token, "size": size, "folder": folder, **limits})
    return {"address": address, "port": port, "token": token, "folder": folder}


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
    path = os.path.join(base, f"{PREFIX}{secrets.token_hex(8)}")
    if len(path.encode()) > _WIDTH // 2:
        raise InvalidArgumentError(f"the folder's path is too long: {path}")
    return path


def make_private(folder: str) -> bool:
    """Make a folder that this user alone can read; tell whether it was not there yet.

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
        return False
    return True


def connect(agreed: dict[str, Any], hello: dict[str, Any]) -> Line:
    """Connect to the monitor.

    Raises:
        StateError: it cannot be reached.
    """
    address, port = agreed["address"], agreed["port"]
    try:
        sock = socket.create_connection((address, port), timeout=_CONNECT)
    except OSError as error:
        raise StateError(
            f"cannot reach the guard's monitor on rank 0 at {address}:{port}: {error}"
        ) from error
    line = Line(sock, patience=_TAKES)
    line.send({"is": "hello", "token": agreed["token"], **hello})
    return line
