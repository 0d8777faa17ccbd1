"""The door of the monitor: it is open until all ranks are here, and strangers knock at it too.

Anybody who reaches the port may connect. Until a connection shows the token it may say little, has
a few seconds, and makes room for newer ones: anything else that it says closes it, and no more.
"""

from __future__ import annotations

import hmac
import selectors
import socket
import time

from .messages import Connection, Hello

HELLO = 4096  # bytes of a greeting
WAIT = 5.0  # s to show the token
STRANGERS = 64  # connections that may be without it at one time, beyond one of every rank


class Door:
    """Lets ranks in.

    Args:
        listener: The socket that they connect to.
        token: The secret that they must show.
        size: How many ranks there are.
        selector: Is told of every new connection, and of closed ones.
    """

    def __init__(
        self, listener: socket.socket, token: str, size: int, selector: selectors.BaseSelector
    ) -> None:
        self._listener, self._token, self._size = listener, token.encode(), size
        self._selector = selector
        self._strangers: dict[Connection, float] = {}  # since when they are connected
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, None)

    def accept(self) -> None:
        """Accept a connection."""
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError:  # no descriptor is left
            self._dismiss_oldest()
            time.sleep(0.01)
            return
        stranger = Connection(sock, longest=HELLO)
        self._strangers[stranger] = time.monotonic()
        self._selector.register(stranger, selectors.EVENT_READ, stranger)
        if len(self._strangers) > self._size + STRANGERS:
            self._dismiss_oldest()

    def hear(self, stranger: Connection) -> Hello | None:
        """Return the greeting of a stranger who shows the token; dismiss one who does not."""
        for message in stranger.receive():
            token = "".join(map(str, message[:1])).encode(errors="replace")
            if isinstance(message, Hello) and hmac.compare_digest(token, self._token):
                del self._strangers[stranger]
                return message
            stranger.open = False
        if not stranger.open:
            self._dismiss(stranger)
        return None

    def look(self, now: float) -> None:
        """Dismiss strangers that take too long."""
        for late in [each for each, since in self._strangers.items() if now - since > WAIT]:
            self._dismiss(late)

    def close(self) -> None:
        """Let nobody in any more."""
        for stranger in list(self._strangers):
            self._dismiss(stranger)
        if self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
            self._listener.close()

    def _dismiss_oldest(self) -> None:
        if self._strangers:
            self._dismiss(next(iter(self._strangers)))

    def _dismiss(self, stranger: Connection) -> None:
        del self._strangers[stranger]
        self._selector.unregister(stranger)
        stranger.close()
