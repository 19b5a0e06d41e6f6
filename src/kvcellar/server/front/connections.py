"""Connections that ask for nothing: how many there may be, and for how long."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvcellar.server.config import ServerConfig

_MOST_REFUSED = 64
"""Connections that wait to be told that there are too many; more are closed without a word."""

_REFUSED_S = 2.0


class Connections:
    """The open connections of one server. On one event loop.

    Invariant: there are at most ``most`` of them, and at most ``most_of_one`` of one address,
    beside a few that are being refused.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Create limits of connections, of which none is open."""
        self.most = config.most_connections
        self.most_of_one = config.most_of_one_address
        self.head_s = config.head_timeout_s
        self.send_s = config.send_timeout_s
        self.n_refused = 0
        self._of: dict[str, set[Connection]] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return sum(map(len, self._of.values()))

    def admit(self, connection: Connection) -> bool:
        """Take in a connection, in place of the one that has asked for nothing for longest.

        That one is closed where there are too many. Returns false, and takes nothing in, where all
        of them are being answered.
        """
        own = self._of.setdefault(connection.address, set())
        while len(own) >= self.most_of_one or len(self) >= self.most:
            some = own if len(own) >= self.most_of_one else set().union(*self._of.values())
            idle = [other for other in some if other.is_waiting]
            if not idle:
                return False
            oldest = min(idle, key=lambda other: other.waiting_since)
            self.leave(oldest)
            oldest.transport.abort()
            own = self._of.setdefault(connection.address, set())
        own.add(connection)
        return True

    def leave(self, connection: Connection) -> None:
        """Forget a connection; a no-op where it was not taken in, or has left."""
        own = self._of.get(connection.address, set())
        own.discard(connection)
        if not own:
            self._of.pop(connection.address, None)


class ConnectionsConfig(uvicorn.Config):
    """uvicorn's configuration, and the connections that all protocols of a server share."""

    def __init__(self, app: ASGIApp, connections: Connections, **settings: Any) -> None:
        """Take the settings of ``uvicorn.Config``, without ``http``."""
        super().__init__(app, http=Connection, **settings)
        self.connections = connections


class Connection(H11Protocol):
    """uvicorn's, with an end to what it would wait for without one.

    That is a request that does not come whole, and a client that does not read its answer. An idle
    connection between two requests is uvicorn's to close, a slow body the guard's.

    Attributes:
        address: of the other end, without its port.
        waiting_since: when it last began to wait for a request, by the loop's clock.
    """

    def __init__(self, config: ConnectionsConfig, *args: Any, **kwargs: Any) -> None:
        """Create a connection, as uvicorn does."""
        super().__init__(config, *args, **kwargs)
        self._all = config.connections
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._has_begun = False
        self._is_refused = False
        self.address = ""
        self.waiting_since = 0.0

    @property
    def is_waiting(self) -> bool:
        """True where no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    # What uvicorn and the transport call --------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection in, or refuse it."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self.waiting_since = self.loop.time()
        if self._all.admit(self):
            self._expect_head()
        elif self._all.n_refused < _MOST_REFUSED:
            # Once the request is there: closing with bytes unread would lose what it is told.
            self._all.n_refused += 1
            self._is_refused = True
            self._head_timer = self.loop.call_later(_REFUSED_S, self._refuse)
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take bytes in."""
        if self._is_refused:
            self._refuse()
            return
        self._has_begun = True
        super().data_received(data)
        self._expect_head()

    def on_response_complete(self) -> None:
        """Wait for the next request, of which some may be there."""
        self.waiting_since = self.loop.time()
        self._has_begun = False
        super().on_response_complete()
        if self.transport.is_closing():
            self._expect_reading()
        elif self.conn.trailing_data[0] or self.timeout_keep_alive_task is None:
            self._unset_keepalive_if_required()
            self._has_begun = True
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of everything."""
        for timer in (self._head_timer, self._send_timer):
            if timer is not None:
                timer.cancel()
        if self._is_refused:
            self._all.n_refused -= 1
        self._all.leave(self)
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # an answer that is not read would keep it open
        else:
            super().timeout_keep_alive_handler()

    def pause_writing(self) -> None:
        """Wait for the client to read what was sent."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        """Go on sending."""
        if self._send_timer is not None and not self.transport.is_closing():
            self._send_timer.cancel()
            self._send_timer = None
        super().resume_writing()

    # Time limits -------------------------------------------------------------------------------

    def _expect_head(self) -> None:
        """Have a timer run while, and only while, a request is not there as a whole."""
        if not self.is_waiting:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._all.head_s, self._close_slow)

    def _close_slow(self) -> None:
        if self._has_begun and not self.transport.is_closing():
            said = (
                f"the request did not come as a whole within {self._all.head_s:g} s; send it again"
            )
            self.transport.write(_answer("408 Request Timeout", said, "request_too_slow"))
        self._close()

    def _refuse(self) -> None:
        most = min(self._all.most_of_one, self._all.most)
        said = (
            f"{most} requests of this address are being answered, and it may have no more "
            f"connections; wait for one of them, or start the server with more --max-requests"
        )
        if not self.transport.is_closing():
            more = f"Retry-After: {round(_REFUSED_S)}\r\n"
            answer = _answer("503 Service Unavailable", said, "too_many_connections", more)
            self.transport.write(answer)
        self._close()

    def _close(self) -> None:
        if self.transport.get_write_buffer_size():
            self._expect_reading()
        self.transport.close()

    def _expect_reading(self) -> None:
        if self._send_timer is None:
            size = self.transport.get_write_buffer_size()
            self._send_timer = self.loop.call_later(self._all.send_s, self._check_reading, size)

    def _check_reading(self, before: int) -> None:
        """Give the connection up where nothing was read since."""
        self._send_timer = None
        if self.transport.get_write_buffer_size() < before:
            self._expect_reading()
        else:
            self.transport.abort()


def _answer(status: str, message: str, code: str, more: str = "") -> bytes:
    """Write a whole answer to a request that no route has seen."""
    error = {"message": message, "type": "server_error", "param": None, "code": code}
    body = json.dumps({"error": error})
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"{more}Connection: close\r\n\r\n{body}"
    ).encode()
