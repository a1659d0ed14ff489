"""Counts and bounds the open requests of each user of a gateway.

The HTTP requests of a tenant share a session at the broker, except requests with an idempotency
key. Each WebSocket has its own session.

The user of a request is identified by the name of its API key. If the request has no key, the user
is identified by the client's address. All users share a maximum number of streams and a maximum
amount of memory for bodies. If a user has too many open requests, this user receives a 429, and
other users are served. If the maximum number of streams is reached, each request for a further
stream receives a 503.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Unpack

from ....protocol.errors import Code, RequestError, UnavailableError
from ....protocol.keys import OwnKey
from ....protocol.messages import Embed, Embedded, Generate, Score
from ....protocol.pace import Pace
from ....protocol.shares import fits_share
from ... import AsyncClient, AsyncStream, GenerateOptions, ScoreOptions, Scores
from ...calls import Call
from ...recording import Recorder
from ...request_options import EmbedOptions, OnSystem, Prompt, generate_call
from ..connections.memory import ByteShares, Held
from ..errors import UserLimitError
from .idempotency import NamedClient, current_named
from .open_programs import OpenPrograms
from .turns import current_user

MAX_BODIES_BYTES = 512 * 1024 * 1024
"""Maximum number of bytes of a gateway process for three purposes together: the bodies of requests,
the vectors of answers, and the large messages of WebSockets."""

MAX_NAME = 256
"""Maximum number of characters of a user's name at the broker."""


@dataclass(slots=True)
class _User:
    """The open requests of a user."""

    streams: int = 0
    pace: Pace = field(default_factory=Pace)
    """The rate at which the user's streams end."""


@dataclass(slots=True)
class _Request:
    """The counts of one request."""

    streams: list[str] = field(default_factory=list)
    """The user of each counted stream."""
    bytes: dict[str, Held] = field(default_factory=dict)
    """The counted bytes by user. The user changes when the API key has been checked."""
    ended: bool = False


class UserShares:
    """Counts the open requests of each user of one gateway process. All users together may have
    ``max_streams`` streams at the broker."""

    def __init__(self, max_streams: int, max_body_bytes: int = MAX_BODIES_BYTES) -> None:
        self.group = secrets.token_hex(16)
        """The field ``group`` of all requests of this process. In the broker's queue, these
        requests take turns with those of other clients as if they belonged to one session."""
        self.programs = OpenPrograms()
        """The programs that run for requests over HTTP."""
        self.leaving = False
        """Whether the process is about to end. If so, streams with an idempotency key continue at
        the broker for the successor. ``server.py`` sets this flag."""
        self.memory = ByteShares(
            max_body_bytes,
            "the bodies, messages and vectors of your open requests",
            lambda: self._pace.retry_after_s(time.monotonic()),
        )
        """The bytes of bodies, answers, messages, and connections whose user is known."""
        self._max_streams = max_streams
        self._streams = 0
        self._pace = Pace()
        self._users: dict[str, _User] = {}
        """The users with open requests."""
        self._request: ContextVar[_Request | None] = ContextVar("request", default=None)
        """The counts of the current task's request."""

    @contextmanager
    def request(self) -> Iterator[None]:
        """Wraps a request. At the end of the block, the request's streams and bytes no longer count
        towards its user's share."""
        request = _Request()
        token = self._request.set(request)
        try:
            yield
        finally:
            self._request.reset(token)
            # A task of the request may continue, and must not give back the same streams again.
            while request.streams:
                self._give_back(request.streams.pop(), 1)
            request.ended = True
            for held in request.bytes.values():
                held.resize(0)

    def take_stream(self) -> None:
        """Counts a stream that a request is about to begin; raises UnavailableError."""
        name = current_user.get()
        user = self._fitting(name)
        request = self._request.get()
        if request is not None:
            request.streams.append(name)
            self._count(name, user)

    def give_back_stream(self) -> None:
        """Stops counting one stream of the current request. Called when a stream has ended before
        its request. Has no effect if no stream of the request is counted."""
        request = self._request.get()
        if request is not None and request.streams:
            self._give_back(request.streams.pop(), 1)

    def take_of_socket(self, name: str) -> None:
        """Counts a request that a WebSocket of the user ``name`` is about to send; raises
        UnavailableError."""
        self._count(name, self._fitting(name))

    def give_back_of_socket(self, name: str, count: int) -> None:
        """Stops counting ``count`` ended requests of a WebSocket of the user ``name``."""
        if count:
            self._give_back(name, count)

    def _fitting(self, name: str) -> _User:
        """The counts of the user ``name``. Raises UnavailableError if the user may not begin
        another stream."""
        user = self._users.get(name) or _User()
        if self._streams >= self._max_streams:
            raise UnavailableError(
                Code.QUEUE_FULL,
                f"this gateway has its maximum of {self._streams} open streams; try again later",
                retry_after_s=self._pace.retry_after_s(time.monotonic()),
            )
        if not fits_share(user.streams, self._streams, self._max_streams):
            raise UserLimitError(
                Code.CLIENT_LIMIT,
                f"you have {user.streams} open streams, and other users have "
                f"{self._streams - user.streams} of the maximum of {self._max_streams}; wait until "
                "one of your streams ends",
                retry_after_s=user.pace.retry_after_s(time.monotonic()),
            )
        return user

    def take_bytes(self, size: int) -> None:
        """Counts ``size`` bytes of a request's body or answer until the request ends; raises
        UnavailableError."""
        self.holder()(size)

    def holder(self) -> Callable[[int], None]:
        """A function that counts bytes as ``take_bytes`` does, for the current request and user.
        Any task may call the function. It counts nothing after the end of the request."""
        request, user = self._request.get(), current_user.get()

        def hold(size: int) -> None:
            if request is not None and not request.ended:
                held = request.bytes.setdefault(user, Held(self.memory, user))
                held.resize(held.size + size)

        return hold

    def _count(self, name: str, user: _User) -> None:
        self._users[name] = user
        user.streams += 1
        self._streams += 1

    def _give_back(self, name: str, count: int) -> None:
        user = self._users[name]
        user.streams -= count
        self._streams -= count
        now = time.monotonic()
        user.pace.note(now)
        self._pace.note(now)
        if not user.streams:
            del self._users[name]


class SharedClient(AsyncClient):
    """A bus client that HTTP requests of many users share. Each call counts towards the share of
    its user, and users take turns at the broker."""

    def __init__(
        self, front: str, shares: UserShares, max_unread: int, key: OwnKey | None = None
    ) -> None:
        super().__init__(front, max_unread=max_unread, wait_for_room=False, key=key)
        self._connection.carry_users()
        self._shares = shares
        self._make_named = partial(self._named, max_unread, key)
        self._ranks = key is not None
        """Whether the client has a tenant's CURVE key. If it does, the broker checks the priorities
        of requests by this key. If it does not, this class checks them."""

    def generate(
        self,
        prompt: Prompt,
        *,
        record: str | Path | Recorder | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """Begins a stream, as ``AsyncClient.generate``. Raises UnavailableError if the user's share
        is used up. Raises RequestError if the request raises the priority, and the client has no
        tenant's key."""
        if not self._ranks:
            check_priority(options.get("priority", 0))
        self._shares.take_stream()
        options.setdefault("by", current_user.get()[:MAX_NAME])
        stream = self._begun(prompt, record, options)
        stream.hold = self._shares.holder()
        if options.get("controller"):
            self._shares.programs.add(stream)
        return stream

    def _begun(
        self, prompt: Prompt, record: str | Path | Recorder | None, options: GenerateOptions
    ) -> AsyncStream:
        named = current_named.get()
        if named is None:
            return super().generate(prompt, record=record, **options)
        call = generate_call(prompt, options)
        assert isinstance(call.message, Generate)
        call.message.seed = named.begin(call, options.get("seed"))
        call.message.group = self._shares.group
        own = named.client(self._make_named)
        if own is not None:
            return own.begin(call)
        call.base = None
        return self._stream(call, None)

    def _named(self, max_unread: int, key: OwnKey | None, session: str) -> NamedClient:
        return NamedClient(self.front, max_unread, key, session, lambda: self._shares.leaving)

    async def score(
        self, prompt: Prompt, scored: Prompt, **options: Unpack[ScoreOptions]
    ) -> Scores:
        """Scores a text, as ``AsyncClient.score``. Raises UnavailableError if the user's share is
        used up."""
        self._shares.take_stream()
        options.setdefault("by", current_user.get()[:MAX_NAME])
        return await super().score(prompt, scored, **options)

    async def embed(
        self, inputs: Sequence[Sequence[int]], **options: Unpack[EmbedOptions]
    ) -> Embedded:
        """Embeds token ids, as ``AsyncClient.embed``. Raises UnavailableError if the user's share
        is used up."""
        self._shares.take_stream()
        options.setdefault("by", current_user.get()[:MAX_NAME])
        return await super().embed(inputs, **options)

    def _stream(
        self, call: Call, on_system: OnSystem | None, recorder: Recorder | None = None
    ) -> AsyncStream:
        if isinstance(call.message, Generate | Score | Embed):
            call.message.group = self._shares.group
        return super()._stream(call, on_system, recorder)


def check_priority(priority: int) -> None:
    """Raises RequestError if the priority is above the default."""
    if priority > 0:
        raise RequestError(
            Code.NOT_ALLOWED,
            "only an API key with its own tenant may raise the priority above the default; leave "
            "priority out",
            path="$.priority",
        )
