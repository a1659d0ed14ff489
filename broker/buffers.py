"""Stores buffers. A buffer is a part of prompts that a session stores under a name, so that the
session's requests can refer to it."""

from __future__ import annotations

from collections.abc import Sequence

from ..protocol.bodies import decode_as
from ..protocol.buffers import buffer_bytes
from ..protocol.errors import Code, RequestError, TokenbusError, UnavailableError
from ..protocol.header import decode_header
from ..protocol.messages import MAX_BODY_BYTES, Buffer
from ..protocol.shares import fits_share
from .dispatch import Dispatcher
from .session import Session
from .state import BrokerState
from .worker import RETRY_AFTER_S, Worker

MAX_NAMED = 1_024
"""Maximum number of buffers that a request names."""
MAX_NAMED_BYTES = MAX_BODY_BYTES
"""Maximum number of bytes of the buffers that a request names. A buffer counts each time it is
named. A prompt in the body of a request has the same bound."""


class Buffers:
    """Stores the buffers of all sessions, within the bounds of the settings."""

    def __init__(self, state: BrokerState, dispatcher: Dispatcher) -> None:
        self._state = state
        self._settings = state.settings
        self._dispatcher = dispatcher
        self._bytes = 0
        """Bytes of the buffers of all sessions together."""

    def on_buffer(self, session: Session, frames: list[bytes]) -> None:
        """Handles a client's ``BUFFER``: stores a buffer, or removes it."""
        message: Buffer = decode_as(Buffer, frames[1])
        kept = buffer_bytes(message, tuple(frames[2:]))
        if kept is None:
            self._add(session, -len(session.buffers.pop(message.name, b"")))
        else:
            self.keep(session, message.name, kept)

    def on_save(self, worker: Worker, frames: list[bytes]) -> None:
        """Handles a worker's BUFFER: stores the tokens of a stream that is about to end. The name
        of the buffer is the request's field ``save``."""
        message: Buffer = decode_as(Buffer, frames[2], "msgpack")
        header = decode_header(frames[1])
        session = self._state.sessions.by_id.get(header.address)
        if session is None:
            return
        try:
            self.keep(session, message.name, frames[3])
        except TokenbusError as error:
            request = self._state.requests.get(header.request)
            if request is not None:
                error.path = "$.save"
                self._dispatcher.abandon(request, error)

    def keep(self, session: Session, name: str, kept: bytes) -> None:
        """Stores a buffer for a session. Raises ``too_large``, ``queue_full`` or ``client_limit``
        if a bound would be exceeded."""
        settings = self._settings
        added = len(kept) - len(session.buffers.get(name, b""))
        total = session.buffer_bytes + added
        if total > settings.max_buffer_bytes:
            raise RequestError(
                Code.TOO_LARGE,
                f"with the buffer {name!r} this session's buffers would have {total} bytes; "
                f"{settings.max_buffer_bytes} are allowed",
            )
        if name not in session.buffers and len(session.buffers) >= settings.max_buffers:
            raise RequestError(
                Code.TOO_LARGE,
                f"with the buffer {name!r} this session would have {len(session.buffers) + 1} "
                f"buffers; {settings.max_buffers} are allowed",
            )
        if self._bytes + added > settings.max_total_buffer_bytes:
            raise UnavailableError(
                Code.QUEUE_FULL,
                f"with the buffer {name!r} the buffers of all sessions would have "
                f"{self._bytes + added} bytes; {settings.max_total_buffer_bytes} are allowed",
                retry_after_s=RETRY_AFTER_S,
            )
        self._check_share(session, name, added)
        session.buffers[name] = kept
        self._add(session, added)

    def _check_share(self, session: Session, name: str, added: int) -> None:
        """Raises ``client_limit`` if the buffers of a session's key would exceed the share of the
        key."""
        own, most = session.use.buffer_bytes, self._settings.max_total_buffer_bytes
        if not session.key or added <= 0 or fits_share(own, self._bytes, most, added):
            return
        raise UnavailableError(
            Code.CLIENT_LIMIT,
            f"with the buffer {name!r} the buffers of this key would have {own + added} bytes, and "
            f"the buffers of all keys {self._bytes + added} of {most} bytes; one key may use at "
            "most half of the bytes that other keys leave free; delete other buffers first",
            retry_after_s=RETRY_AFTER_S,
        )

    def drop_all(self, session: Session) -> None:
        """Removes all buffers of a session that has ended."""
        session.buffers.clear()
        self._add(session, -session.buffer_bytes)

    def named(self, session: Session, names: Sequence[str]) -> list[bytes]:
        """The buffers that a request names, in the order of the request. A buffer that is named
        twice is returned twice. Raises ``unknown_buffer``, or ``too_large`` if the buffers are too
        many or too large."""
        if len(names) > MAX_NAMED:
            raise RequestError(
                Code.TOO_LARGE,
                f"this request names {len(names)} buffers; at most {MAX_NAMED} are allowed; store "
                "several parts as one buffer",
                path="$.buffers",
            )
        size = 0
        for index, name in enumerate(names):
            if name not in session.buffers:
                raise RequestError(
                    Code.UNKNOWN_BUFFER,
                    f"this session has no buffer {name!r}; send it with BUFFER first",
                    path=f"$.buffers[{index}]",
                )
            size += len(session.buffers[name])
        if size > MAX_NAMED_BYTES:
            raise RequestError(
                Code.TOO_LARGE,
                f"the buffers that this request names have {size} bytes; at most {MAX_NAMED_BYTES} "
                "are allowed",
                path="$.buffers",
            )
        return [session.buffers[name] for name in names]

    def _add(self, session: Session, added: int) -> None:
        session.buffer_bytes += added
        session.use.buffer_bytes += added
        self._bytes += added
