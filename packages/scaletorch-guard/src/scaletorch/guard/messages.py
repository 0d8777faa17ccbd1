"""Messages between the monitor and the ranks, and the connection that carries them.

Every message is a line of JSON with its name and its fields; nothing is pickled.
"""
# ruff: noqa: UP014 - a table

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any, NamedTuple

from .facts import Fault

LONGEST = 1 << 22  # bytes of a line
_CHUNK = 1 << 16

Tail = list[list[Any]]  # the values of the last entries
Counts = dict[str, int]
Marks = dict[str, list[tuple[str, int, int, int]]]

# From a rank: it connects; its news (see `Report`); its answer to a question; it ends with an
# exception (Raised) or finishes (Bye); a fault of the guard itself (Off).
Hello = NamedTuple("Hello", [("token", str), ("rank", int), ("pid", int), ("label", str)])
News = NamedTuple("News", [
    ("channels", dict[str, list[Any]]), ("counts", Counts), ("marks", Marks), ("step", int | None),
    ("waits", list[list[Any]]), ("free", int), ("foreign", bool), ("last", list[Any]),
])  # fmt: skip
Answer = NamedTuple("Answer", [("asked", float), ("tail", Tail), ("stack", str)])
Raised = NamedTuple("Raised", [("what", str), ("headline", str), ("tail", Tail)])
Bye = NamedTuple("Bye", [("tail", Tail)])
Off = NamedTuple("Off", [("why", str)])

# From the monitor, which also forwards `Off` and sends a `Fault`: all ranks are connected; a
# question; log a warning; all ranks have finished.
Welcome = NamedTuple("Welcome", [])
Ask = NamedTuple("Ask", [("now", float)])
Warn = NamedTuple("Warn", [("text", str)])
End = NamedTuple("End", [])

Message = Hello | News | Answer | Raised | Bye | Off | Welcome | Ask | Warn | Fault | End
_KINDS = {kind.__name__: kind for kind in Message.__args__}


class Connection:
    """One end of a socket that carries messages, in lines of at most `longest` bytes.

    A peer that does not read for `patience` seconds counts as gone.
    """

    def __init__(
        self, sock: socket.socket, *, longest: int = LONGEST, patience: float = 2.0
    ) -> None:
        sock.settimeout(patience)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.longest = longest
        self.open = True  # whether the peer may still send messages
        self.broken = False  # whether it has sent an invalid one
        self.rank: int | None = None  # the peer's rank, once it is known
        self._buffer = b""

    def fileno(self) -> int:
        """Return the file descriptor, for selectors."""
        return self.sock.fileno()

    def send(self, *messages: Message) -> bool:
        """Send messages; return False if the peer is gone."""
        lines = [
            json.dumps([type(message).__name__, *message], separators=(",", ":")) + "\n"
            for message in messages
        ]
        try:
            self.sock.sendall("".join(lines).encode())
        except OSError:
            return False
        return True

    def receive(self) -> list[Message]:
        """Return the messages that have arrived; call this when the socket is ready."""
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
            lines = [b"a line too long"]
        try:
            # The values of the fields are not checked.
            return [_KINDS[name](*fields) for name, *fields in map(json.loads, lines)]
        except (TypeError, ValueError, KeyError, RecursionError):
            self.open, self.broken = False, True
            return []

    def close(self) -> None:
        """Close the socket."""
        self.open = False
        with contextlib.suppress(OSError):
            self.sock.close()
