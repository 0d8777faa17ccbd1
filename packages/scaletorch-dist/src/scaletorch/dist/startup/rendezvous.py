"""Rendezvous of the ranks: address and port of rank 0's store, and the store itself.

A launcher's environment gives the address. Rank 0 opens the store on as few interfaces as possible.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import re
import secrets
import shutil
import socket
import subprocess
import threading
import time
import zlib
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import default_pg_timeout

from ..errors import InvalidArgumentError, StateError
from ..launchers import Placement, is_loopback, job_name, own_address
from .rollcall import Caller, StoreClosedError, call_roll

LOOPBACK = "127.0.0.1"
_FIRST_PORT, _PORTS = 15000, 17000  # derived ports stay below the systems' ephemeral ports
_TRIES = 100  # ports to try until one is free


@dataclass(frozen=True, slots=True)
class Meeting:
    """Address and port of the store."""

    address: str  # of rank 0, for the other ranks to reach
    port: int
    listener: socket.socket | None = None  # on rank 0, if it is open already
    by_agent: bool = False  # torchrun's agent holds the store, so that no rank opens one


def find_meeting(
    placement: Placement, port: int | None, init_method: str | None = None
) -> Meeting | str:
    """Return the store's address and port, or a URL that replaces them.

    The caller's port comes first, then the environment's values.
    """
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's
    if init_method not in (None, "env://"):
        if by_agent and init_method.startswith("tcp://"):
            raise InvalidArgumentError(
                f"init_method {init_method!r} hangs under torchrun, whose agent holds the store so "
                "that no rank opens one: leave init_method out"
            )
        return init_method
    launcher, address = placement.launcher, os.environ.get("MASTER_ADDR")
    by_agent = by_agent and launcher == "pytorch"
    port = _asked_port(None if by_agent else port)
    if launcher == "pytorch":
        return _meet_by_environment(address, port, by_agent)
    one_node = placement.local_size == placement.world_size
    if address is None and not one_node and launcher == "mpi":
        return _meet_through_mpi4py(placement, port)
    if port is None:  # differs between jobs and between steps of a job
        port = derived_port(job_name(placement) or f"process {_starter()}")
    return Meeting(address or (LOOPBACK if one_node else _first_node()), port)


def _meet_by_environment(address: str | None, port: int | None, by_agent: bool) -> Meeting:
    if address is None or port is None:
        found = {"MASTER_ADDR": address, "MASTER_PORT": port}
        missing = " and ".join(name for name, value in found.items() if value is None)
        raise StateError(
            f"launcher 'pytorch' needs {missing} in the environment: start this program with "
            "torchrun, or set what is missing (port= also gives the port)"
        )
    return Meeting(address, port, by_agent=by_agent)


def _asked_port(port: int | None) -> int | None:
    text = os.environ.get("MASTER_PORT")
    if port is not None or text is None:
        return port
    if not text.isdecimal():
        raise StateError(f"the variable MASTER_PORT must be a number, but is {text!r}")
    return int(text)


def _first_node() -> str:
    """Return the address of the first node of this step of Slurm."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise StateError(
            "launcher 'slurm' found no SLURM_STEP_NODELIST in the environment: start this "
            "program with srun, or set MASTER_ADDR to the host of rank 0"
        )
    return node_address(first_host(nodes))


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


def node_address(host: str) -> str:
    """Return a node's name if it resolves, else the address that Slurm itself uses for it."""
    with contextlib.suppress(OSError):
        socket.getaddrinfo(host, None)
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


def _starter() -> int:
    """Return the process that started this node's ranks: the first ancestor without PMI_RANK."""
    process = os.getppid()
    while True:
        try:
            environment = Path(f"/proc/{process}/environ").read_bytes()
            status = Path(f"/proc/{process}/stat").read_text()
        except OSError:  # not Linux, or another user's
            return process
        if not any(line.startswith(b"PMI_RANK=") for line in environment.split(b"\0")):
            return process
        process = int(status.rpartition(")")[2].split()[1])


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
    listener = meeting = None
    if placement.rank == 0:
        listener = socket.create_server(("", port or 0))
        meeting = own_address(), listener.getsockname()[1]
    address, chosen = world.bcast(meeting, root=0)
    return Meeting(address, chosen, listener)


def derived_port(key: str) -> int:
    """Return a port that depends on the key alone, so that every rank derives the same one."""
    return _FIRST_PORT + zlib.crc32(key.encode()) % _PORTS


def free_port() -> int:
    """Return a free port of the loopback interface that the system gives to no other program."""
    for _ in range(_TRIES):
        port = derived_port(secrets.token_hex(8))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    raise OSError(f"none of {_TRIES} loopback ports is free")


def open_store(placement: Placement, meeting: Meeting, timeout: timedelta | None) -> Store:
    """Meet all other ranks in a TCP store; return it with this start's key prefix."""
    timeout = timeout or default_pg_timeout
    deadline = time.monotonic() + timeout.total_seconds()
    own = placement.rank, placement.world_size, job_name(placement)
    caller = Caller(*own, socket.gethostname(), os.getpid())
    while True:
        if placement.rank == 0 and not meeting.by_agent:
            store: Store = _serve(meeting, placement.world_size, timeout)
        else:
            store = _reach(placement, meeting, timeout, deadline)
        try:
            return call_roll(store, caller, deadline, shared=meeting.by_agent)
        except StoreClosedError as error:
            if time.monotonic() > deadline:
                raise _unreachable(placement, meeting, f"it closed ({error})") from error
        del store
        time.sleep(0.01)


def _serve(meeting: Meeting, world_size: int, timeout: timedelta) -> TCPStore:
    """Open the store on rank 0."""
    listener = meeting.listener or _listen(meeting)
    # Our own socket, since TCPStore would listen on every interface even for a loopback address.
    # If it listens on all interfaces, rank 0 connects by loopback and need not resolve a name.
    address = meeting.address if is_loopback(meeting.address) else LOOPBACK
    return TCPStore(
        address, meeting.port, world_size, is_master=True, timeout=timeout, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def _listen(meeting: Meeting) -> socket.socket:
    host = meeting.address if is_loopback(meeting.address) else ""
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    try:
        return socket.create_server(
            (host, meeting.port), family=family, backlog=2048, dualstack_ipv6=both
        )
    except OSError as error:
        raise StateError(
            f"rank 0 cannot listen on {meeting.address} port {meeting.port} ({error.strerror}): "
            "another program may have it; set MASTER_PORT or pass port="
        ) from error


def _reach(placement: Placement, meeting: Meeting, timeout: timedelta, deadline: float) -> TCPStore:
    """Connect to the store.

    TCPStore does not report a name that fails to resolve, and waits forever for a program that is
    no store. So a plain connection comes first, and TCPStore connects in a thread.
    """
    _try_plainly(placement, meeting, deadline)
    results: queue.SimpleQueue[TCPStore | Exception] = queue.SimpleQueue()
    left = max(deadline - time.monotonic(), 1.0)

    def connect() -> None:
        own = placement.world_size, False, timedelta(seconds=left), False
        try:
            results.put(TCPStore(meeting.address, meeting.port, *own))
        except Exception as error:
            results.put(error)

    threading.Thread(target=connect, daemon=True, name="scaletorch-store").start()
    try:
        result = results.get(timeout=left)
    except queue.Empty:
        result = TimeoutError("it says nothing")
    if isinstance(result, Exception):
        said = str(result).partition("\n")[0]
        what = f"what listens there is not the store of rank 0, or it has ended ({said})"
        raise _unreachable(placement, meeting, what) from result
    result.set_timeout(timeout)
    return result


def _try_plainly(placement: Placement, meeting: Meeting, deadline: float) -> None:
    pause, problem = 0.01, "there was no time to try"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((meeting.address, meeting.port), timeout=left):
                return
        except socket.gaierror as error:
            problem = f"the name does not resolve ({error.strerror})"
        except OSError as error:
            problem = error.strerror or str(error)
        time.sleep(min(pause, max(deadline - time.monotonic(), 0)))
        pause = min(2 * pause, 0.5)
    raise _unreachable(placement, meeting, problem)


def _unreachable(placement: Placement, meeting: Meeting, problem: str) -> StateError:
    holder = "the store of torchrun's agent" if meeting.by_agent else "rank 0"
    return StateError(
        f"rank {placement.rank} could not reach {holder} at {meeting.address} port {meeting.port} "
        f"in time: {problem}. See whether rank 0 was started and what it printed, and set "
        "MASTER_ADDR and MASTER_PORT to where the others can reach it"
    )
