"""Requests with an idempotency key. A client that repeats such a request receives the same stream
from its beginning.

A request with the header ``Idempotency-Key`` is a *named* request
(draft-ietf-httpapi-idempotency-key-header). It has its own session at the broker. The session's
token is computed from the key, the user and a secret of the gateways. The ids of the session's
streams are computed from the path and the body.

When a client repeats the request, the gateway that receives it takes the session over and attaches
to the stream. This gateway needs no state of the first gateway. If another user sends the same key,
the gateway computes a different token.

If the broker does not have the stream any more, the request runs again. It then needs the same
seed. So if a request has no seed, its seed is computed from the same values as the session's token.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import cached_property
from typing import Self

from ....protocol.keys import OwnKey, own_key
from ....protocol.messages import Token
from ....protocol.settings import Settings
from ....protocol.shares import Shares
from ... import AsyncClient, AsyncStream
from ...calls import Call
from ..errors import ApiError
from .turns import current_user

log = logging.getLogger(__name__)

HEADER, LAST_EVENT = "idempotency-key", "last-event-id"
KEY = re.compile(r'"?[!#-~]{1,256}"?')
"""Matches a valid key: visible characters, with or without the quotes that the draft requires."""
EVENT_ID = re.compile(r"[0-9]{1,15}")
MAX_NAMED = 256
"""Maximum number of named requests of a gateway that have their own session and thread. Each user
may have a share of this number (``fits_share``). Further named requests use the shared session. If
a client repeats such a request, it runs again."""
STREAM_BITS, TRY_BITS = 12, 8
"""A stream id has three fields. The lowest ``TRY_BITS`` bits count how often the gateway has sent
the stream's request again (``Call.base``). The next ``STREAM_BITS`` bits are the number of the
stream within the HTTP request. The next 32 bits are a digest of the path and the body."""


class NamedRequest:
    """A request over HTTP with an idempotency key."""

    def __init__(self, key: str, last_event: int, rooms: NamedRequests) -> None:
        self.last_event = last_event
        """The number of the last event that the client has received. Only later events are sent."""
        self._key = key
        self._rooms = rooms
        self._user = ""
        self._digest = b""
        self._streams = 0
        self._ids = 0
        self._client: NamedClient | None = None

    @property
    def token(self) -> str:
        """The token of the request's session. It is computed with the secret of the gateways."""
        return self._derived("session").hex()[:32]

    @property
    def base(self) -> int:
        """The first stream id of the request."""
        return int.from_bytes(self._digest[:4], "big") << (STREAM_BITS + TRY_BITS)

    def read(self, path: str, body: bytes) -> None:
        """Stores the current task's user, and a digest of the path and the body. The session's
        token is computed from the user, and the stream ids are computed from the digest."""
        self._user = current_user.get()
        self._digest = hashlib.sha256(path.encode() + b"\0" + body).digest()

    def new_id(self, prefix: str) -> str:
        """An id for the answer or for a part of it. A repeated request has the same ids."""
        self._ids += 1
        return prefix + self._derived(f"id {self._ids}").hex()[:24]

    def begin(self, call: Call, seed: int | None) -> int:
        """Sets the stream ids of a call. Returns ``seed``; if it is None, returns a seed that is
        computed from the key."""
        call.base = self.base + (self._streams << TRY_BITS)
        call.repeated = self.last_event > 0
        self._streams += 1
        if seed is not None:
            return seed
        return int.from_bytes(self._derived(f"seed {call.base}")[:7], "big")

    def number_from(self, number: int) -> None:
        """Sets the number of the next stream. A repeated request may skip the streams of earlier
        turns. Its later streams must still have the numbers that they had in the first request."""
        self._streams = number

    def client(self, make: Callable[[str], NamedClient]) -> NamedClient | None:
        """The bus client of the request's session. At the first call, ``make`` creates it from the
        token. None if this gateway or the user already has the maximum number of such clients.

        Raises ApiError 409 if this gateway already serves a request with the same key and another
        path or body.
        """
        if self._client is None and self._rooms.enter(self.token, self.base, self._user):
            try:
                self._client = make(self.token)
            except Exception:
                # The process may have reached its limit of open files.
                self._rooms.leave(self.token, self._user)
                raise
        return self._client

    async def close(self, leave: bool) -> None:
        """Ends the request's session. Called when the answer was sent, or when the client has
        disconnected. If ``leave`` is true, the session stays at the broker for some time, so that
        its streams continue for a repeated request."""
        client, self._client = self._client, None
        if client is not None:
            self._rooms.leave(self.token, self._user)
            await asyncio.to_thread(client.end, leave)

    def _derived(self, purpose: str) -> bytes:
        parts = "\0".join((self._user, self._key, purpose))
        return hmac.digest(self._rooms.secret, parts.encode(), "sha256")


current_named: ContextVar[NamedRequest | None] = ContextVar("tokenbus_named", default=None)
"""The named request that the current task serves."""


class NamedRequests:
    """The named requests of one gateway process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._open: dict[str, tuple[int, int]] = {}
        """By session token: the first stream id of the named request, and the number of HTTP
        requests with this token that this process serves at present."""
        self._shares = Shares(MAX_NAMED)
        """The named requests of each user."""

    @cached_property
    def secret(self) -> bytes:
        """The secret that the gateways of a system share. If it cannot be read, this process uses a
        random secret."""
        try:
            return _secret(self._settings)
        except OSError as error:
            log.warning(
                "idempotency keys work only within this gateway; no shared secret: %s", error
            )
            return secrets.token_bytes(32)

    def of(self, key: str | None, last_event: str | None) -> NamedRequest | None:
        """The named request of an HTTP request whose headers have these values; None if ``key`` is
        None. Raises ApiError 400 if a value is not valid."""
        if key is None:
            if last_event is not None:
                raise _fault(f"{LAST_EVENT} is given without {HEADER}; send both")
            return None
        if not KEY.fullmatch(key):
            raise _fault(f"{HEADER} must have 1 to 256 visible ASCII characters")
        if last_event is not None and not EVENT_ID.fullmatch(last_event):
            raise _fault(f"{LAST_EVENT} is {last_event[:40]!r}; it must be the id of an event")
        return NamedRequest(key.strip('"'), int(last_event or 0), self)

    def of_background(self, id: str, last_event: int) -> NamedRequest:
        """Makes a named request for a background response (``stored/background.py``), so that
        another gateway can continue the response's stream. ``id``: the response's id.
        ``last_event``: the number of the response's stored events."""
        return NamedRequest(f"background {id}", last_event, self)

    def enter(self, token: str, base: int, user: str) -> bool:
        """Adds a request of ``user`` that has its own session. If too many such requests are open,
        returns False, and the request must use the shared session. Raises ApiError 409 if the key
        is in use for another path or body."""
        other, count = self._open.get(token, (base, 0))
        if other != base:
            raise reused()
        if not self._shares.fits(user):
            return False
        self._open[token] = base, count + 1
        self._shares.take(user)
        return True

    def leave(self, token: str, user: str) -> None:
        """Removes an ended request for which ``enter`` returned True."""
        base, count = self._open.pop(token)
        if count > 1:
            self._open[token] = base, count - 1
        self._shares.give_back(user)


class NamedStream(AsyncStream):
    """A stream that is read entry by entry. Each entry becomes its own event, even if several
    entries arrive together. A repeated answer therefore has the same events."""

    async def arrived(self) -> list[Token]:
        """Waits for the next entry; returns a list with this entry, or ``[]`` after the last."""
        try:
            return [await anext(self)]
        except StopAsyncIteration:
            return []

    def close(self) -> None:
        """Cancels the request. But if ``leaves`` of the client returns True, the stream continues
        at the broker for a repeated request."""
        client = self._client
        if isinstance(client, NamedClient) and client.leaves() and not self._finished:
            self._finished = self._closed = True
            self._wake()
        else:
            super().close()


class NamedClient(AsyncClient):
    """The bus client of one named request, with the session of this request. Its calls
    have the stream ids of the request, or attach to existing streams."""

    _stream_type = NamedStream

    def __init__(
        self,
        front: str,
        max_unread: int,
        key: OwnKey | None,
        session: str,
        leaves: Callable[[], bool],
    ) -> None:
        """``session``: the session's token. ``leaves``: returns whether a closed stream continues
        at the broker."""
        super().__init__(
            front, max_unread=max_unread, wait_for_room=False, key=key, session=session
        )
        self._connection.carry_users()
        self.leaves = leaves

    def end(self, leave: bool) -> None:
        """Ends the session. If ``leave`` is True, ends only its connection. Blocks the thread."""
        self._connection.close(keep=leave)


class NumberedEvents:
    """Adds ``id:`` to the events of a stream, and leaves out events that the client has already
    received.

    Pings have no number, and an error that ends a stream has none. In a repeated answer, these
    events may be different.
    """

    def __init__(self, last_event: int) -> None:
        self._last = last_event
        self._count = 0

    @classmethod
    def of_task(cls) -> Self | None:
        """The numbering for the current task's named request; None if the task has no such
        request."""
        named = current_named.get()
        return cls(named.last_event) if named is not None else None

    def write(self, part: bytes) -> bytes:
        """Numbers the events in ``part``. Returns the events that the client has not received."""
        return b"".join(map(self._event, part.split(b"\n\n")[:-1]))

    def _event(self, event: bytes) -> bytes:
        if event.startswith((b"event: ping", b"event: error", b'data: {"error"')):
            return event + b"\n\n"
        self._count += 1
        if self._count <= self._last:
            return b""
        return b"id: %d\n%b\n\n" % (self._count, event)


def reused() -> ApiError:
    """The error for a key that was used for another path or body."""
    return ApiError(
        409,
        f"this {HEADER} was already used for a request with another path or body; use a new key "
        "for each request, and repeat a request unchanged",
        code="idempotency_key_reused",
        headers={"x-should-retry": "false"},
    )


def _fault(what: str) -> ApiError:
    return ApiError(400, what, code="invalid_header")


def _secret(settings: Settings) -> bytes:
    """The secret that the gateways of a system share. It is computed from their CURVE key. If they
    have no key, it is read from a file in the run directory."""
    own = own_key(settings, "client")
    if own is not None:
        return hashlib.sha256(b"gateway " + bytes.fromhex(own.secret)).digest()
    path = settings.run_folder / "gateway-secret"
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(32))
    # Only the first gateway can create the link. All gateways then read the secret from this file.
    with suppress(FileExistsError):
        path.hardlink_to(made)
    made.unlink()
    return path.read_bytes()
