"""A port for ranks to meet at, which nobody takes before they do."""

from __future__ import annotations

import contextlib
import random
import socket

RANGE = "/proc/sys/net/ipv4/ip_local_port_range"  # of Linux: the ports that it gives
BELOW = 10_000  # ports under these, of which one is drawn
TRIES = 100


def free_port() -> int:
    """Return a port of the loopback at which nobody listens.

    Others ask the system for any port all the time, as each gloo group does, and might be given
    this one before a rank binds it: so it is none that the system gives.

    Raises:
        OSError: None was found.
    """
    draw, end = random.SystemRandom(), _given_from()  # no seed of the caller's is used up
    for _ in range(TRIES):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", draw.randrange(end - BELOW, end) if end else 0))
            port: int = probe.getsockname()[1]
            return port
    raise OSError(f"of {TRIES} ports of the loopback none is free")


def _given_from() -> int:
    """Return the first port that the system gives; 0 if that is not known, or leaves no room."""
    with contextlib.suppress(OSError, ValueError), open(RANGE) as file:
        first = int(file.read().split()[0])
        return first if first > BELOW + 1024 else 0
    return 0
