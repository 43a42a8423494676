"""Closes stalled connections: without a request, with half a request, or with an unread response."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from anybatch_guide.limits import Limits


class Transport(Protocol):
    """The transport of a connection in asyncio."""

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that the client has not received yet."""

    def abort(self) -> None:
        """Close the socket and drop these bytes."""


class Exchange(Protocol):
    """A request whose headers are complete, with its response."""

    @property
    def response_complete(self) -> bool:
        """Whether the application has sent all of the response."""


class Connection(Protocol):
    """A connection in uvicorn."""

    @property
    def transport(self) -> Transport:
        """The socket."""

    @property
    def cycle(self) -> Exchange | None:
        """The latest request; None before the first."""


@dataclass(frozen=True, slots=True)
class _Progress:
    """The progress of a connection: it stalls while this does not change."""

    exchange: Exchange | None  # the latest request; None before the first
    is_idle: bool  # whether the connection waits for a complete request
    unread_bytes: int  # bytes of the response that the client has not received


class StalledConnections:
    """Closes stalled connections each time it is called.

    A connection stalls while it waits for the headers of a request, or while its response is not read. A request that
    the server is still processing does not stall. uvicorn limits neither, so silent clients could use all connections.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._since: dict[Connection, tuple[_Progress, float]] = {}

    def close(self, connections: Collection[Connection]) -> None:
        """Close the connections that have stalled for too long, and the oldest idle ones if there are too many."""
        now = self._clock()
        before, self._since = self._since, {}
        idle: list[Connection] = []
        for connection in tuple(connections):
            progress = _progress(connection)
            former = before.get(connection)
            since = former[1] if former is not None and former[0] == progress else now
            self._since[connection] = progress, since
            limit = self._limits.head_seconds if progress.is_idle else self._limits.unread_seconds
            if (progress.is_idle or progress.unread_bytes) and now - since >= limit:
                connection.transport.abort()
            elif progress.is_idle:
                idle.append(connection)
        # A client that opens connections faster than they time out must not use all of them either.
        idle.sort(key=lambda connection: self._since[connection][1])
        for connection in idle[: max(0, len(idle) - self._limits.num_connections // 2)]:
            connection.transport.abort()


def _progress(connection: Connection) -> _Progress:
    exchange, unread_bytes = connection.cycle, connection.transport.get_write_buffer_size()
    is_idle = (exchange is None or exchange.response_complete) and not unread_bytes
    return _Progress(exchange, is_idle, unread_bytes)
