"""Lines of JSON over a socket: what the monitor and the watchers say to one another."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

LONGEST = 1 << 22  # bytes of a line
_SEND_LIMIT = 2.0  # s for what is sent to be taken, before the other side counts as gone


class Line:
    """One connection.

    Attributes:
        sock: the socket; read when it is ready.
        open: whether the other side may still say something.
        rank: who is there; None until it has said so.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(_SEND_LIMIT)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.open = True
        self.rank: int | None = None
        self._buffer = b""

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self.sock.fileno()

    def send(self, message: dict[str, Any]) -> bool:
        """Send a message; False where the other side is gone."""
        try:
            self.sock.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have come, after the socket has become ready to be read."""
        try:
            data = self.sock.recv(1 << 16)
        except (TimeoutError, InterruptedError):
            return []
        except OSError:
            data = b""
        if not data or len(self._buffer) > LONGEST:
            self.open = False
            return []
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        try:
            return [message for message in map(json.loads, lines) if isinstance(message, dict)]
        except ValueError:
            self.open = False
            return []

    def close(self) -> None:
        """Close it."""
        self.open = False
        with contextlib.suppress(OSError):
            self.sock.close()
