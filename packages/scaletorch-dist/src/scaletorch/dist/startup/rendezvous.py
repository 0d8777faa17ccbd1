"""Where ranks meet: address and port from a launcher's environment, and the store itself."""

from __future__ import annotations

import functools
import importlib
import ipaddress
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistNetworkError, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import default_pg_timeout

from ..errors import StateError
from .launchers import Placement, first_host

LOOPBACK = "127.0.0.1"
_FIRST_PORT, _PORTS = 15000, 17000  # derived ports stay below those that systems hand out


@dataclass(frozen=True, slots=True)
class Meeting:
    """Address and port of rank 0.

    Attributes:
        address: of rank 0, as the others reach it.
        port: of rank 0's store.
        listener: on rank 0, the listening socket if it has one already.
        own_store: whether all ranks open the store themselves (`open_store`) instead of leaving it
            to torch, whose keys differ: the same on all ranks.
    """

    address: str
    port: int
    listener: socket.socket | None = None
    own_store: bool = False


def find_meeting(placement: Placement, port: int | None) -> Meeting:
    """Work out where to meet; what the caller or the environment says comes first.

    Raises:
        StateError: no address to be had; it names the variable to set.
    """
    return _FINDERS[placement.launcher](placement, port)


def _meet_by_environment(placement: Placement, port: int | None) -> Meeting:
    address = os.environ.get("MASTER_ADDR")
    chosen = _asked_port(port)
    missing = [
        name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", chosen)) if value is None
    ]
    if address is None or chosen is None:
        raise StateError(
            f"launcher {placement.launcher!r} needs {' and '.join(missing)} in the environment: "
            "start this program with torchrun, or set what is missing (port= also gives the port)"
        )
    return Meeting(address, chosen)


def _asked_port(port: int | None) -> int | None:
    if port is not None:
        return port
    text = os.environ.get("MASTER_PORT")
    if text is None:
        return None
    if not text.isdecimal():
        raise StateError(f"the variable MASTER_PORT must be a number, but is {text!r}")
    return int(text)


def _meet_by_slurm(placement: Placement, port: int | None) -> Meeting:
    env = os.environ
    chosen = _asked_port(port)
    if chosen is None:  # other jobs and other steps of this job take other ports
        chosen = derived_port(f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}")
    address = env.get("MASTER_ADDR")
    if address is None and placement.local_size == placement.world_size:
        address = LOOPBACK
    if address is None:
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
        if not nodes:
            raise StateError(
                "launcher 'slurm' found no SLURM_STEP_NODELIST in the environment: start this "
                "program with srun, or set MASTER_ADDR to the host of rank 0"
            )
        address = _slurm_address(first_host(nodes))
    return Meeting(address, chosen)


def _slurm_address(host: str) -> str:
    """A node's name where it resolves, else the address that Slurm itself uses for it."""
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


def _meet_by_mpi(placement: Placement, port: int | None) -> Meeting:
    address, chosen = os.environ.get("MASTER_ADDR"), _asked_port(port)
    if address is None and placement.local_size != placement.world_size:
        return _meet_through_mpi4py(placement, chosen)
    if chosen is None:
        chosen = derived_port(os.environ.get("PMIX_NAMESPACE") or f"parent {os.getppid()}")
    return Meeting(address or LOOPBACK, chosen)


def _meet_through_mpi4py(placement: Placement, port: int | None) -> Meeting:
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except ImportError as error:
        raise StateError(
            f"{placement.program} started ranks on several nodes, and MPI does not say where rank "
            "0 is: set MASTER_ADDR (and MASTER_PORT) to rank 0's host, or install mpi4py"
        ) from error
    world = mpi.COMM_WORLD
    if world.Get_size() != placement.world_size:
        raise StateError(
            f"mpi4py sees {world.Get_size()} ranks where {placement.program} started "
            f"{placement.world_size}: it was built for another MPI. Set MASTER_ADDR instead"
        )
    listener = None
    meeting = None
    if placement.rank == 0:
        listener = socket.create_server(("", port or 0))
        meeting = (_own_address(), listener.getsockname()[1])
    address, chosen = world.bcast(meeting, root=0)
    return Meeting(address, chosen, listener, own_store=True)


def _own_address() -> str:
    """The address with which this machine reaches others; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


_FINDERS = {"pytorch": _meet_by_environment, "slurm": _meet_by_slurm, "mpi": _meet_by_mpi}


def derived_port(key: str) -> int:
    """A port that everyone who knows the key works out alike."""
    return _FIRST_PORT + zlib.crc32(key.encode()) % _PORTS


def is_loopback(address: str) -> bool:
    """Whether an address says, without being resolved, that it is this machine only.

    A host's own name often resolves to loopback on that host alone: it does not count.
    """
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def open_store(placement: Placement, meeting: Meeting, timeout: timedelta | None) -> Store:
    """Meet in a TCP store that listens no wider than it must.

    Raises:
        StateError: the port is taken, or another process has joined as this rank.
    """
    timeout = timeout or default_pg_timeout
    connect = functools.partial(
        TCPStore, meeting.address, meeting.port, placement.world_size, timeout=timeout,
        wait_for_workers=False,
    )  # fmt: skip
    if placement.rank == 0:
        listener = meeting.listener or _listen(meeting)
        # A socket of our own: TCPStore would listen on every interface, loopback address or not.
        store = connect(is_master=True, master_listen_fd=listener.detach())
        store.set(_SERVER, secrets.token_hex(8))
    else:
        store = _join(connect, time.monotonic() + timeout.total_seconds())
    _claim_rank(store, placement.rank)
    return store


_SERVER = "server"  # key of a store's random name
_last_server: bytes | None = None  # name of the store that this process joined last


def _join(connect: Callable[[], TCPStore], deadline: float) -> TCPStore:
    """Join rank 0's store, but not that of an earlier group that rank 0 is about to close."""
    global _last_server
    while True:
        try:
            store = connect()
            server = store.get(_SERVER)
        except DistNetworkError:  # closed meanwhile
            if _last_server is None or time.monotonic() > deadline:
                raise
        else:
            if server != _last_server or time.monotonic() > deadline:
                _last_server = server
                return store
        time.sleep(0.01)


def _listen(meeting: Meeting) -> socket.socket:
    family = socket.AF_INET6 if ":" in meeting.address else socket.AF_INET
    try:
        return socket.create_server((meeting.address, meeting.port), family=family, backlog=2048)
    except OSError as error:
        raise StateError(
            f"rank 0 cannot listen on {meeting.address} port {meeting.port} ({error.strerror}): "
            "another program may have it; set MASTER_PORT or pass port="
        ) from error


def _claim_rank(store: Store, rank: int) -> None:
    mine = secrets.token_hex(8)
    if store.compare_set(f"rank {rank} is", "", mine).decode() != mine:
        raise StateError(
            f"another process has already joined as rank {rank}: two programs share this "
            "MASTER_PORT, or two processes were given one RANK"
        )
