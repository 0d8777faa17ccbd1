"""Lines of JSON over a socket: what the monitor and the watchers say to one another."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

LONGEST = 1 << 22  # bytes of a line
_CHUNK = 1 << 16


class Line:
    """One connection.

    Args:
        sock: the socket; read when it is ready.
        longest: bytes of a line that are taken.
        patience: seconds for what is sent to be taken, before the other side counts as gone.

    Attributes:
        open: whether the other side may still say something.
        broken: whether it has said what is no message.
        rank: who is there; None until it has said so.
    """

    def __init__(
        self, sock: socket.socket, *, longest: int = LONGEST, patience: float = 2.0
    ) -> None:
        sock.settimeout(patience)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.longest = longest
        self.open = True
        self.broken = False
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
            data = self.sock.recv(_CHUNK)
        except (TimeoutError, InterruptedError):
            return []
        except OSError:
            data = b""
        if not data:
            self.open = False
            return []
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if max(map(len, (*lines, self._buffer))) > self.longest:
            return self._refuse()
        try:
            return [message for message in map(json.loads, lines) if isinstance(message, dict)]
        except (ValueError, RecursionError):
            return self._refuse()

    def _refuse(self) -> list[dict[str, Any]]:
        self.open, self.broken = False, True
        return []

    def close(self) -> None:
        """Close it."""
        self.open = False
        with contextlib.suppress(OSError):
            self.sock.close()
