"""Start the monitor, and send its address to all ranks with two small collectives."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from typing import IO, NamedTuple, cast

import torch
import torch.distributed as c10d
from torch.distributed import ProcessGroup

from ..dist.building import gather_ints, host_device, is_loopback, this_host
from ..dist.errors import StateError
from .messages import Connection, Hello

_WIDTH = 1024  # bytes of the text that rank 0 sends
_CONNECT = 30.0  # seconds
_READS = 60.0  # seconds for which the monitor may be too busy to read a rank's messages

# Skips this package's `__init__`, which imports torch, and so starts in a tenth of a second.
_BOOT = (
    "import importlib, sys, types\n"
    "package = types.ModuleType({package!r})\n"
    "package.__path__ = [{folder!r}]\n"
    "sys.modules[{package!r}] = package\n"
    "importlib.import_module({package!r} + '.monitor').serve()\n"
)


class Agreed(NamedTuple):
    """The result of `start_monitor`, the same on every rank."""

    board: str = ""  # name of the hosts' boards
    address: str = ""  # where the monitor listens
    port: int = 0
    token: str = ""  # secret that ranks show to the monitor
    failed: str = ""  # why the monitor did not start; "" if it did


def start_monitor(group: ProcessGroup, limits: dict[str, float]) -> Agreed:
    """Start the monitor on the first rank's host, and agree on its address; every rank calls it."""
    hosts = {host for (host,) in gather_ints((this_host(),), group)}
    text = b""
    if group.rank() == 0:
        try:
            agreed = _start(group.size(), limits, alone=len(hosts) == 1)
        except (OSError, ValueError) as error:  # no port or process: reported to every rank
            agreed = Agreed(failed=str(error)[: _WIDTH // 2] or type(error).__name__)
        text = json.dumps(agreed).encode()
    data = torch.frombuffer(bytearray(text.ljust(_WIDTH)), dtype=torch.uint8)
    data = data.to(host_device(group))
    c10d.broadcast(data, c10d.get_process_group_ranks(group)[0], group)
    return Agreed(*json.loads(bytes(data.tolist())))


def _start(size: int, limits: dict[str, float], *, alone: bool) -> Agreed:
    listener, address = _listen(alone=alone)
    board, token = f"scaletorch-guard-{secrets.token_hex(8)}", secrets.token_hex(16)
    with listener:
        port = listener.getsockname()[1]
        _run_monitor(listener, {"token": token, "size": size, **limits})
    return Agreed(board, address, port, token)


def _listen(*, alone: bool) -> tuple[socket.socket, str]:
    """Listen on loopback if all ranks are on this host, else on the address of MASTER_ADDR."""
    master = os.environ.get("MASTER_ADDR", "")
    if alone:
        address = "127.0.0.1"
    elif master and not is_loopback(master):
        address = socket.gethostbyname(master)
    else:
        address = socket.gethostbyname(socket.gethostname())
    try:
        return socket.create_server((address, 0), backlog=4096), address
    except OSError:  # the address is not this host's own, for example behind NAT
        return socket.create_server(("", 0), backlog=4096), address


def _run_monitor(listener: socket.socket, arguments: dict[str, object]) -> None:
    """Run the monitor in a process that inherits only the listener, and ignores Ctrl-C."""
    boot = _BOOT.format(package=__package__, folder=os.path.dirname(os.path.abspath(__file__)))
    process = subprocess.Popen(
        [sys.executable, "-S", "-P", "-c", boot],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # a reader of a rank's output must not wait for the monitor
        stderr=subprocess.DEVNULL,
        pass_fds=(listener.fileno(),),
        cwd="/",
        start_new_session=True,
    )
    # Through stdin, since other users can read the command line.
    with cast(IO[bytes], process.stdin) as words:
        words.write(json.dumps({"listener": listener.fileno(), **arguments}).encode())
    threading.Thread(target=process.wait, name="scaletorch-guard-reaper", daemon=True).start()


def connect(agreed: Agreed, hello: Hello) -> Connection:
    """Connect to the monitor and greet it."""
    address, port = agreed.address, agreed.port
    try:
        sock = socket.create_connection((address, port), timeout=_CONNECT)
    except OSError as error:
        raise StateError(
            f"cannot reach the guard's monitor on rank 0 at {address}:{port}: {error}"
        ) from error
    connection = Connection(sock, patience=_READS)
    connection.send(hello)
    return connection
