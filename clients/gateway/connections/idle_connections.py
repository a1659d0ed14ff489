"""The connections of one gateway process that have no request in progress.

A client needs no API key to open connections and to send parts of a request. So if a process has
its maximum number of connections, a new connection replaces the oldest one without a request.
"""

from __future__ import annotations

from typing import Protocol


class Abortable(Protocol):
    """A connection that can be closed at once."""

    def abort(self) -> None:
        """Closes the connection without waiting for the client to read the buffered data."""


class IdleConnections:
    """Connections whose next request has no complete head. Such a connection is new, or its last
    answer is complete."""

    def __init__(self) -> None:
        self._idle: dict[Abortable, None] = {}
        """The connections in the order in which they became idle."""
        self._aborted: set[Abortable] = set()

    @property
    def aborted(self) -> int:
        """Number of connections that were aborted and have not been removed yet."""
        return len(self._aborted)

    def add(self, connection: Abortable) -> None:
        """Called when a connection was opened, and when its last answer is complete."""
        if connection not in self._aborted:
            self._idle.pop(connection, None)
            self._idle[connection] = None

    def busy(self, connection: Abortable) -> None:
        """Called when the head of a request is complete."""
        self._idle.pop(connection, None)

    def remove(self, connection: Abortable) -> None:
        """Called when a connection has ended."""
        self._idle.pop(connection, None)
        self._aborted.discard(connection)

    def abort_oldest(self) -> bool:
        """Aborts the connection that has been idle for the longest time. Returns False if no
        connection is idle."""
        oldest = next(iter(self._idle), None)
        if oldest is None:
            return False
        del self._idle[oldest]
        self._aborted.add(oldest)
        oldest.abort()
        return True
