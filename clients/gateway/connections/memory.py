"""Counts the bytes that clients occupy in the memory of one gateway process, by user and owner.

The owner is a connection, the messages of a WebSocket, or a request. All kinds of memory that a
client can fill are counted here: the heads of requests, unparsed data, unread answers, messages,
and the bodies of requests with their decoded values.
"""

from __future__ import annotations

from collections.abc import Callable

from ....protocol.errors import Code, UnavailableError
from ....protocol.shares import Shares
from ..errors import UserLimitError


class ByteShares:
    """The bytes that users occupy. All users together may occupy ``max_bytes``."""

    def __init__(
        self,
        max_bytes: int,
        what: str,
        retry_after_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """``what``: the name of the counted memory in errors. ``retry_after_s``: returns the number
        of seconds after which a refused client should try again."""
        self._what = what
        self._retry_after_s = retry_after_s
        self._shares = Shares(max_bytes)

    @property
    def free(self) -> int:
        """Number of bytes that are not occupied."""
        return self._shares.free

    def take(self, user: str, size: int) -> None:
        """Counts ``size`` more bytes of a user. Raises UnavailableError, and counts nothing, if
        they do not fit."""
        if not self._shares.fits(user, size):
            own = self._shares.of(user)
            kind = UserLimitError if own else UnavailableError
            raise kind(
                Code.CLIENT_LIMIT if own else Code.QUEUE_FULL,
                f"{self._what} would have {own + size} bytes, and those of all users "
                f"{self._shares.total + size} of at most {self._shares.capacity}; try again later, "
                "or send less",
                retry_after_s=self._retry_after_s(),
            )
        self._shares.take(user, size)

    def give_back(self, user: str, size: int) -> None:
        """Stops counting ``size`` bytes of a user."""
        self._shares.give_back(user, size)


class Held:
    """The bytes of one owner, which count towards the share of a user."""

    __slots__ = ("_shares", "_user", "size")

    def __init__(self, shares: ByteShares, user: str) -> None:
        self._shares = shares
        self._user = user
        self.size = 0
        """Number of counted bytes."""

    def resize(self, size: int) -> None:
        """Counts ``size`` bytes instead of the earlier number. Raises UnavailableError, and changes
        nothing, if they do not fit."""
        if size > self.size:
            self._shares.take(self._user, size - self.size)
        elif size < self.size:
            self._shares.give_back(self._user, self.size - size)
        self.size = size

    def move(self, shares: ByteShares, user: str) -> None:
        """Counts the bytes towards the share of another user. Raises UnavailableError, and changes
        nothing, if they do not fit."""
        if shares is self._shares and user == self._user:
            return
        size = self.size
        if size:
            shares.take(user, size)
            self._shares.give_back(self._user, size)
        self._shares, self._user = shares, user
