"""The store where ranks meet: opened by rank 0 on as few interfaces as possible."""

from __future__ import annotations

import functools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import default_pg_timeout

from ..errors import StateError
from ..launchers.environment import Placement, job_name
from ..launchers.interfaces import is_loopback
from .rendezvous import LOOPBACK, Meeting
from .rollcall import Caller, StoreClosedError, call_roll


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
    results: queue.SimpleQueue[TCPStore | BaseException] = queue.SimpleQueue()
    left = max(deadline - time.monotonic(), 1.0)
    connect = functools.partial(
        TCPStore, meeting.address, meeting.port, placement.world_size, is_master=False,
        timeout=timedelta(seconds=left), wait_for_workers=False,
    )  # fmt: skip
    threading.Thread(
        target=_put_result, args=(connect, results), daemon=True, name="scaletorch-store"
    ).start()
    try:
        result = results.get(timeout=left)
    except queue.Empty:
        result = TimeoutError("it says nothing")
    if isinstance(result, TCPStore):
        result.set_timeout(timeout)
        return result
    if isinstance(result, Exception):
        said = str(result).partition("\n")[0]
        what = f"what listens there is not the store of rank 0, or it has ended ({said})"
        raise _unreachable(placement, meeting, what) from result
    raise result


def _put_result(
    connect: Callable[[], TCPStore], results: queue.SimpleQueue[TCPStore | BaseException]
) -> None:
    try:
        results.put(connect())
    except BaseException as error:
        results.put(error)


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
