"""What each user of a gateway has open, and how much that may be.

All requests over HTTP share one session at the broker. Users, told apart by API key or else by
address, share its streams and the memory for bodies: none can take all, and who has too much is
refused with a 429 while others are served. Beyond what there is for all, requests get a 503.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Unpack

from ...protocol.errors import Code, UnavailableError
from ...protocol.keys import OwnKey
from ...protocol.pace import Pace
from ...protocol.shares import fits_share
from .. import AsyncClient, AsyncStream, GenerateOptions, ScoreOptions, Scores
from ..recording import Recorder
from ..request_options import Prompt
from .errors import UserLimitError
from .turns import current_user

MAX_BODIES_BYTES = 512 * 1024 * 1024
"""The bodies of all requests together that one gateway process keeps."""

MAX_NAME = 256
"""The characters of a user's name that the broker takes."""


@dataclass(slots=True)
class _User:
    """What a user has open."""

    streams: int = 0
    body_bytes: int = 0
    pace: Pace = field(default_factory=Pace)
    """At which the user's streams end."""


class UserShares:
    """The users of one gateway process, which has ``max_streams`` streams at the broker."""

    def __init__(self, max_streams: int, max_body_bytes: int = MAX_BODIES_BYTES) -> None:
        self._most = max_streams
        self._most_bytes = max_body_bytes
        self._streams = 0
        self._body_bytes = 0
        self._pace = Pace()
        self._users: dict[str, _User] = {}
        """Those that have anything open."""
        self._held: ContextVar[list[tuple[str, int, int]] | None] = ContextVar("held", default=None)
        """What the request of the current task has: user, streams and bytes."""

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around a request: what it took is given back at its end."""
        held: list[tuple[str, int, int]] = []
        token = self._held.set(held)
        try:
            yield
        finally:
            self._held.reset(token)
            for name, streams, size in held:
                self._give_back(name, streams, size)

    def take_stream(self) -> None:
        """A request is about to begin a stream; raises UnavailableError."""
        name = current_user.get()
        user = self._users.get(name) or _User()
        if self._streams >= self._most:
            raise UnavailableError(
                Code.QUEUE_FULL,
                f"this gateway has {self._streams} streams open, which is the most; try again "
                "later",
                retry_after_s=self._pace.retry_after_s(time.monotonic()),
            )
        if not fits_share(user.streams, self._streams, self._most):
            raise UserLimitError(
                Code.CLIENT_LIMIT,
                f"you have {user.streams} streams open, and others have "
                f"{self._streams - user.streams} of the {self._most} that this gateway has; wait "
                "until one of yours ends",
                retry_after_s=user.pace.retry_after_s(time.monotonic()),
            )
        self._take(name, user, 1, 0)

    def take_bytes(self, size: int) -> None:
        """A part of a request's body has arrived; raises UnavailableError."""
        if not size:
            # The end of a body may be an empty part.
            return
        name = current_user.get()
        user = self._users.get(name) or _User()
        if fits_share(user.body_bytes, self._body_bytes, self._most_bytes, size):
            self._take(name, user, 0, size)
            return
        kind = UserLimitError if user.body_bytes else UnavailableError
        raise kind(
            Code.CLIENT_LIMIT if user.body_bytes else Code.QUEUE_FULL,
            f"the bodies of your open requests would have {user.body_bytes + size} bytes, those of "
            f"all {self._body_bytes + size}, of {self._most_bytes} for which this gateway has "
            "room; try again later",
            retry_after_s=self._pace.retry_after_s(time.monotonic()),
        )

    def _take(self, name: str, user: _User, streams: int, size: int) -> None:
        held = self._held.get()
        if held is None:
            return
        held.append((name, streams, size))
        self._users[name] = user
        user.streams += streams
        user.body_bytes += size
        self._streams += streams
        self._body_bytes += size

    def _give_back(self, name: str, streams: int, size: int) -> None:
        user = self._users[name]
        user.streams -= streams
        user.body_bytes -= size
        self._streams -= streams
        self._body_bytes -= size
        if streams:
            now = time.monotonic()
            user.pace.note(now)
            self._pace.note(now)
        if not (user.streams or user.body_bytes):
            del self._users[name]


class SharedClient(AsyncClient):
    """The client of the bus that all requests over HTTP share: what they begin counts towards the
    shares of their users, and takes turns with that of others at the broker."""

    def __init__(
        self, front: str, shares: UserShares, max_unread: int, key: OwnKey | None = None
    ) -> None:
        super().__init__(front, max_unread=max_unread, wait_for_room=False, key=key)
        self._connection.carry_users()
        self._shares = shares

    def generate(
        self,
        prompt: Prompt,
        *,
        record: str | Path | Recorder | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """As ``AsyncClient.generate``; raises UnavailableError where the share is used up."""
        self._shares.take_stream()
        options.setdefault("by", current_user.get()[:MAX_NAME])
        return super().generate(prompt, record=record, **options)

    async def score(
        self, prompt: Prompt, scored: Prompt, **options: Unpack[ScoreOptions]
    ) -> Scores:
        """As ``AsyncClient.score``; raises UnavailableError where the share is used up."""
        self._shares.take_stream()
        options.setdefault("by", current_user.get()[:MAX_NAME])
        return await super().score(prompt, scored, **options)
