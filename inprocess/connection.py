"""A client's connection to a broker in this process. It sends and receives lines of LMTP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Self

from ..protocol.errors import Code, ConnectionLostError, RequestError
from ..protocol.lines import error_line, frames_line, line_frames
from ..transport.memory import Link
from ..transport.waiting import get_within


class Connection:
    """Sends and receives lines of the form ``<TYPE> <JSON>``. One thread may send while another
    thread receives.

    If the client does not read from a connection for a long time, the broker ends the connection's
    streams with ``slow_client``, as on any transport. Raises AddressError if no broker of this
    process listens at ``address``.
    """

    def __init__(self, address: str) -> None:
        self._arrivals: SimpleQueue[None] = SimpleQueue()
        """Wakes ``receive``. The queue gets an item for each message of the broker, for each
        refused message of the client, and for the end of the link."""
        self._refusals: SimpleQueue[str] = SimpleQueue()
        self._link = Link(address, lambda: self._arrivals.put(None))

    def send(self, line: str) -> None:
        """Sends a message. An invalid message is answered with an ``ERROR``.

        Raises ConnectionLostError if ``close`` or the end of the system has closed the connection.
        """
        if self._link.broken:
            raise ConnectionLostError(Code.CONNECTION_LOST, "the connection is closed")
        try:
            self._link.send(line_frames(line))
        except RequestError as error:
            self._refusals.put(error_line(error, line))
            self._arrivals.put(None)

    def receive(self, timeout_s: float | None = None) -> str | None:
        """The next message; None if the connection is closed.

        Raises TimeoutError if a message does not arrive within ``timeout_s`` seconds.
        """
        while True:
            if taken := self._link.take(1):
                return frames_line(taken[0])
            with contextlib.suppress(Empty):
                return self._refusals.get_nowait()
            if self._link.broken:
                return None
            try:
                get_within(self._arrivals, timeout_s)
            except Empty:
                raise TimeoutError(f"no message arrived within {timeout_s} s") from None

    def close(self) -> None:
        """Closes the connection. If the connection's session began with HELLO, another connection
        can take over the session for ``session_grace_s``."""
        self._link.close()
        self._arrivals.put(None)

    def __iter__(self) -> Iterator[str]:
        while (line := self.receive()) is not None:
            yield line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
