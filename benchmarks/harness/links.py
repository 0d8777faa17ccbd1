"""Slow links between ranks of this machine, for kernels with and without netem.

Each rank enters its own network namespace, where a tun device is the only way out. A process
forwards IP packets between the devices at a limited bandwidth and delays each by the latency, so
that TCP and gloo run unchanged. It needs root (also of a user namespace, `unshare -r`, if
/dev/net/tun is open to all).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator

DEVICE = "slow"
LARGEST = 65_000  # bytes of a packet
CLONE_NEWNET, TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x40000000, 0x400454CA, 0x0001, 0x1000
PR_SET_PDEATHSIG = 1
IP_VERSION_4 = 4


@contextlib.contextmanager
def slow_links(num_ranks: int, seconds: float, bandwidth: float | None = None) -> Iterator[str]:
    """Yield the address to `join`.

    Args:
        num_ranks: Number of ranks that will join.
        seconds: One-way latency of a packet.
        bandwidth: Bytes a second that each rank can receive; None for no limit.
    """
    with tempfile.TemporaryDirectory() as folder:
        address = os.path.join(folder, "links")
        arguments = ["--address", address, "--ranks", str(num_ranks), "--seconds", str(seconds)]
        arguments += ["--bandwidth", str(bandwidth)] if bandwidth else []
        process = subprocess.Popen([sys.executable, __file__, *arguments])
        try:
            yield address
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def join(address: str, rank: int) -> None:
    """Put this process on the links; new sockets can be reached only through them.

    Raises:
        OSError: This process may not create a network namespace.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"a network namespace needs root: {os.strerror(number)}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    for words in (
        f"addr add {_ip(rank)}/24 dev {DEVICE}",
        f"link set {DEVICE} up mtu {LARGEST} txqueuelen 10000",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    with socket.socket(socket.AF_UNIX) as connection:
        _connect(connection, address)
        socket.send_fds(connection, [bytes([rank])], [device])
        connection.recv(1)  # arrives when all ranks have joined
    os.close(device)


def _ip(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def _connect(connection: socket.socket, address: str) -> None:
    """Connect as soon as the process listens."""
    for _ in range(200):
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            connection.connect(address)
            return
        time.sleep(0.05)
    raise TimeoutError(f"nobody listens at {address}")


def _admit(address: str, num_ranks: int) -> dict[int, int]:
    """Return the device of each rank, once all have joined."""
    devices: dict[int, int] = {}
    connections = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(num_ranks)
        while len(devices) < num_ranks:
            connection, _ = listener.accept()
            message, (device,), _, _ = socket.recv_fds(connection, 1, 1)
            devices[message[0]] = device
            connections.append(connection)
    for connection in connections:
        connection.sendall(b"!")
        connection.close()
    return devices


def _pass_on(devices: dict[int, int], seconds: float, bandwidth: float) -> None:
    """Forward packets forever, each `seconds` after the link to its rank had time for it."""
    held: dict[int, deque[tuple[float, bytes]]] = {device: deque() for device in devices.values()}
    free = dict.fromkeys(held, 0.0)  # time at which a link will have sent its queue
    while True:
        due = min((queue[0][0] for queue in held.values() if queue), default=None)
        wait = None if due is None else max(0.0, due - time.monotonic())
        for device in select.select(list(held), [], [], wait)[0]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet = os.read(device, LARGEST)
                    target = devices.get(packet[19] - 1)
                    if packet[0] >> 4 == IP_VERSION_4 and target is not None:
                        free[target] = max(free[target], time.monotonic()) + len(packet) / bandwidth
                        held[target].append((free[target] + seconds, packet))
        for target, queue in held.items():
            while queue and queue[0][0] <= time.monotonic():
                os.write(target, queue.popleft()[1])


def main() -> None:
    """Serve the links."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--bandwidth", type=float, default=math.inf)
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # end with the parent process
    with contextlib.suppress(PermissionError):  # forward packets before ranks that compute
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    _pass_on(_admit(options.address, options.ranks), options.seconds, options.bandwidth)


if __name__ == "__main__":
    main()
