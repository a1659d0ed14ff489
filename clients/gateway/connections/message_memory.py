"""Counts the memory of a WebSocket's messages towards the share of its user (``memory.py``).

The messages of a WebSocket arrive before ``bodies.py`` sees a body. They are also in memory while
they are incomplete, while the application has not received them, and while it handles them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .memory import ByteShares, Held

SMALL_BYTES = 4 * 1024
"""Number of bytes of a WebSocket's messages up to which they are not counted, and up to which they
are read before the user is known. A user may have thousands of WebSockets."""
BYTE_COST = 5
"""Number of bytes in memory for each byte of a message: the byte and its part of the text. A text
with an emoji takes 4 bytes for each character."""


class MessageMemory:
    """The memory of one WebSocket's messages. The WebSocket's protocol calls ``hold``, ``arrived``
    and ``lost``. The application finds the object in the ASGI scope and calls the other methods."""

    SCOPE_KEY = "tokenbus.messages"

    def __init__(self, begun: Callable[[], None]) -> None:
        """``begun`` is called when the user is known."""
        self._begun = begun
        self._held: Held | None = None
        """The bytes that the user's share includes; None before the user is known."""
        self._incomplete = 0
        """Number of bytes of the incomplete message."""
        self._arrived: deque[int] = deque()
        """Sizes of the complete messages that the application has not handled, in bytes, oldest
        first."""

    @property
    def waits(self) -> bool:
        """Whether further bytes must not be read before the user is known."""
        return self._held is None and self._bytes > SMALL_BYTES

    def begin(self, shares: ByteShares, user: str) -> None:
        """Sets the user of the WebSocket; raises UnavailableError if the messages that have arrived
        do not fit."""
        self._held = Held(shares, user)
        self._count()
        self._begun()

    def hold(self, incomplete: int) -> None:
        """Sets the number of bytes of the incomplete message; raises UnavailableError if the
        messages do not fit the user's share."""
        self._incomplete = incomplete
        self._count()

    def arrived(self, size: int) -> None:
        """Called when a message of ``size`` bytes is complete, before ``hold``."""
        self._arrived.append(size)

    def handled(self) -> None:
        """Called when the application has handled a message. Messages are handled in the order of
        their arrival."""
        if self._arrived:
            self._arrived.popleft()
        self._give_back()

    def ended(self) -> None:
        """Called when the application handles no more messages."""
        self._arrived.clear()
        self._give_back()

    def lost(self) -> None:
        """Called when the connection has ended, or when the incomplete message was dropped."""
        self._incomplete = 0
        self._give_back()

    @property
    def _bytes(self) -> int:
        return self._incomplete + sum(self._arrived)

    @property
    def _size(self) -> int:
        """Number of bytes to count."""
        return BYTE_COST * self._bytes if self._bytes > SMALL_BYTES else 0

    def _count(self) -> None:
        if self._held is not None:
            self._held.resize(self._size)

    def _give_back(self) -> None:
        # An application may handle a message although a later message did not fit.
        if self._held is not None and self._size < self._held.size:
            self._held.resize(self._size)
