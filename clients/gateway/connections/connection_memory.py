"""Counts the memory of one connection: the head of its request, and its unparsed and unread data.

Before the API key is checked, the bytes count towards the client's address, and all such bytes of a
process have a bound of their own. Afterwards they count towards the user's share.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto

from ....protocol.errors import UnavailableError
from .memory import ByteShares, Held

ORDINARY_BYTES = 8 * 1024
"""Number of bytes of each connection that are not counted. Most connections have fewer."""
MAX_EARLY_BYTES = 128 * 1024 * 1024
"""Maximum number of counted bytes of all connections of a process whose user is not known. One
address may have half of them. In one pass of the event loop, a proxy may send 256 KB on each of
some 250 connections."""


class Part(Enum):
    """A part of a connection's memory."""

    HEAD = auto()
    """The first line and the headers of the last request."""
    UNPARSED = auto()
    """Received data that is not parsed, because the connection is paused."""
    UNREAD = auto()
    """Sent data that the client does not read."""


def early_shares(max_bytes: int = MAX_EARLY_BYTES) -> ByteShares:
    """The shares of addresses in the memory of connections whose user is not known."""
    return ByteShares(max_bytes, "the large heads and unparsed data of your connections")


class ConnectionMemory:
    """The memory of one connection beyond ``ORDINARY_BYTES``. ``CountConnections`` finds the object
    in the ASGI scope, and calls ``known``. The protocol calls the other methods."""

    SCOPE_KEY = "tokenbus.memory"

    def __init__(self, early: ByteShares, address: str) -> None:
        """``early``: the shares before the user is known. ``address``: the client's address."""
        self._early = early
        self._address = address
        self._held = Held(early, address)
        self._sizes = dict.fromkeys(Part, 0)

    def resize(self, part: Part, size: int) -> None:
        """Sets the number of bytes of a part. Raises UnavailableError, and changes nothing, if the
        bytes do not fit."""
        if size == self._sizes[part]:
            return
        total = sum(self._sizes.values()) - self._sizes[part] + size
        self._held.resize(max(total - ORDINARY_BYTES, 0))
        self._sizes[part] = size

    def count_unread(self, transport: asyncio.Transport) -> None:
        """Counts the sent bytes that the client has not read. If they do not fit, aborts the
        connection, because further bytes cannot be sent."""
        try:
            self.resize(Part.UNREAD, transport.get_write_buffer_size())
        except UnavailableError:
            transport.abort()

    def begin(self) -> None:
        """Called when a request begins. The user of the request is not known yet. Raises
        UnavailableError if the bytes do not fit the share of the address."""
        self.resize(Part.HEAD, 0)
        self._held.move(self._early, self._address)

    def known(self, shares: ByteShares, user: str) -> None:
        """Called when the user of the request is known. Raises UnavailableError if the bytes do not
        fit the user's share."""
        self._held.move(shares, user)

    def lost(self) -> None:
        """Called when the connection has ended."""
        self._sizes = dict.fromkeys(Part, 0)
        self._held.resize(0)
