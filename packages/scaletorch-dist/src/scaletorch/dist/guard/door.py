"""Where ranks come in: a listener that is open until all are here, and strangers before it.

Whoever reaches its port may connect. Until the token is shown a connection may say little, has a
few seconds, and makes room for newer ones: nothing that is said there is more than refused.
"""

from __future__ import annotations

import hmac
import selectors
import socket
import time
from typing import Any

from .wire import Line

HELLO = 4096  # bytes of a greeting
WAIT = 5.0  # s to show the token
STRANGERS = 64  # connections that may be without it at one time, beyond one of every rank


class Door:
    """Lets ranks in.

    Args:
        listener: where they connect.
        token: what they must know.
        size: how many there are.
        selector: that is told of every new connection, and of closed ones.
    """

    def __init__(
        self, listener: socket.socket, token: str, size: int, selector: selectors.BaseSelector
    ) -> None:
        self._listener, self._token, self._size = listener, token.encode(), size
        self._selector = selector
        self._strangers: dict[Line, float] = {}  # connection → since when
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, None)

    def accept(self) -> None:
        """Take a connection in."""
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError:  # no descriptor is left
            self._dismiss_oldest()
            time.sleep(0.01)
            return
        line = Line(sock, longest=HELLO)
        self._strangers[line] = time.monotonic()
        self._selector.register(line, selectors.EVENT_READ, line)
        if len(self._strangers) > self._size + STRANGERS:
            self._dismiss_oldest()

    def hear(self, line: Line) -> dict[str, Any] | None:
        """Return the greeting of who has shown the token; whoever shows another is dismissed."""
        for message in line.receive():
            token = str(message.get("token", "")).encode(errors="replace")
            if hmac.compare_digest(token, self._token):
                del self._strangers[line]
                return message
            line.open = False
        if not line.open:
            self._dismiss(line)
        return None

    def look(self, now: float) -> None:
        """Dismiss who takes too long."""
        for line in [line for line, since in self._strangers.items() if now - since > WAIT]:
            self._dismiss(line)

    def close(self) -> None:
        """Let nobody in any more."""
        for line in list(self._strangers):
            self._dismiss(line)
        if self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
            self._listener.close()

    def _dismiss_oldest(self) -> None:
        if self._strangers:
            self._dismiss(next(iter(self._strangers)))

    def _dismiss(self, line: Line) -> None:
        del self._strangers[line]
        self._selector.unregister(line)
        line.close()
