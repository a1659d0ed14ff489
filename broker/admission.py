"""Admission: what the broker reads of a client's request, and which requests it accepts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta, Struct

from ..protocol.bodies import decode_as
from ..protocol.errors import Code, RequestError, SlowClientError, TokenbusError, UnavailableError
from ..protocol.messages import (
    GroupName,
    Name,
    RequestId,
    StreamId,
    Timeout,
    TraceParent,
    UserName,
    controller_of,
    module_too_large,
)
from .buffers import Buffers
from .dispatch import Dispatcher
from .quotas import Quotas
from .settings import BrokerSettings
from .status import Counters
from .tables import Request, Session, SessionTable
from .unread import UNREAD_FACTOR


class RoutingFields(Struct, kw_only=True):
    """The fields of a request's body that the broker decodes, once; it reads no other field."""

    stream_id: StreamId
    model: str = ""
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    buffers: list[Name] = []
    timeout_s: Timeout | None = None
    controller: str | None = None
    heal_prompt: bool = False
    by: UserName = ""
    group: GroupName = ""
    trace: TraceParent = ""
    request_id: RequestId = ""

    def steered_by(self, message_type: bytes) -> str:
        """The name of the controller of a request; empty if the request has none."""
        if message_type != b"GENERATE":
            return ""
        return controller_of(self.controller, self.heal_prompt)


ROLES = {
    b"GENERATE": "gpu",
    b"SCORE": "gpu",
    b"MODEL_INFO": "gpu",
    b"TOKENIZER": "gpu",
    b"UPLOAD": "controller",
    b"TAG": "controller",
    b"TAGS": "controller",
    b"DELETE": "controller",
}
"""Requests that a worker answers, and the role of that worker."""


MAX_TOKENIZERS = 4
"""Tokenizers that one session may have requested at a time; a tokenizer has up to about 20 MB."""
MAX_TOKENIZERS_OF_KEY = 16
"""Tokenizers that all sessions of one key may have requested at a time. A worker copies each answer
between two steps."""


class Admission:
    """Turns clients' messages into requests, or refuses them."""

    def __init__(
        self,
        settings: BrokerSettings,
        sessions: SessionTable,
        dispatcher: Dispatcher,
        buffers: Buffers,
        ids: Iterator[int],
        counters: Counters,
        quotas: Quotas,
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._dispatcher = dispatcher
        self._buffers = buffers
        self._ids = ids
        self._counters = counters
        self._quotas = quotas
        self._closed: TokenbusError | None = None
        self._leaving: TokenbusError | None = None

    def submit(
        self, session: Session, message_type: bytes, frames: list[bytes], now: float
    ) -> None:
        """Accepts a request and hands it to the dispatcher, or raises why it is refused."""
        fields: RoutingFields = decode_as(RoutingFields, frames[1])
        if self._closed is not None:
            raise self._closed
        if self._leaving is not None and not session.recovers:
            raise self._leaving
        buffers = self._buffers.named(session, fields.buffers)
        if message_type == b"UPLOAD":
            too_large = module_too_large(sum(map(len, frames[2:])))
            if too_large is not None:
                raise too_large
        controller = fields.steered_by(message_type)
        role = ROLES[message_type]
        tenant = [self._quotas.tenant(session.key).encode()] if role == "controller" else []
        request = Request(
            id=next(self._ids),
            session=session,
            stream_id=fields.stream_id,
            type=message_type,
            role=role,
            model=fields.model,
            priority=fields.priority,
            deadline=now + fields.timeout_s if fields.timeout_s is not None else None,
            controller=controller,
            frames=[*frames[1:], *buffers, *tenant],
            arrived=now,
            by=fields.by,
            group=fields.group,
            trace=fields.trace,
            request_id=fields.request_id,
        )
        self._check_priority(request)
        self._check_streams(request, now)
        self._quotas.check(session, bool(controller), now)
        if message_type == b"TOKENIZER":
            self._check_unread(session)
        # A client that uses the number of an ended stream again does not attach to that stream.
        self._dispatcher.ends.drop(session, request.stream_id)
        self._counters.requests += 1
        try:
            self._dispatcher.submit(request)
        except Exception:
            self._dispatcher.abandon(request)
            raise

    def close(self, error: TokenbusError) -> None:
        """Refuses new requests from now on; requests that wait for a worker end with ``error``."""
        self._closed = self._dispatcher.closing = error
        for session in self._sessions:
            for request in list(session.streams.values()):
                if request.worker is None:
                    self._dispatcher.abandon(request, error)

    def leave(self, error: TokenbusError) -> None:
        """Refuses new requests of clients that cannot come back to this broker's successor."""
        self._leaving = error

    def _check_unread(self, session: Session) -> None:
        """Raises UnavailableError or SlowClientError if a client asks for more tokenizers than it
        reads."""
        waiting = [r for r in session.streams.values() if r.type == b"TOKENIZER"]
        if len(waiting) >= MAX_TOKENIZERS:
            raise UnavailableError(
                Code.CLIENT_LIMIT,
                f"this session waits for {len(waiting)} tokenizers; {MAX_TOKENIZERS} are "
                "allowed; wait for one of them",
                retry_after_s=1.0,
            )
        of_key = self._dispatcher.tokenizers[session.key] if session.key else 0
        if of_key >= MAX_TOKENIZERS_OF_KEY:
            raise UnavailableError(
                Code.CLIENT_LIMIT,
                f"the sessions of this key wait for {of_key} tokenizers; {MAX_TOKENIZERS_OF_KEY} "
                "are allowed; try again when one has arrived",
                retry_after_s=1.0,
            )
        most = UNREAD_FACTOR * self._settings.max_pending_bytes
        unread = self._sessions.unread.bytes_of(session.peer)
        if unread >= most:
            raise SlowClientError(
                Code.SLOW_CLIENT,
                f"up to {unread} bytes of answers to this connection are unread; a tokenizer is "
                f"sent if they are less than {most}; store the tokenizer of each model, or use a "
                "new connection",
            )

    def _check_priority(self, request: Request) -> None:
        """Raises if a request has a higher priority than its client may use."""
        most = self._quotas.max_priority(request.session.key)
        what = "the max_priority of this key"
        if most is None:
            most, what = self._settings.max_priority, "the setting max_priority"
        if request.priority > most:
            raise RequestError(
                Code.NOT_ALLOWED,
                f"the priority {request.priority} is above {what}, which is {most}; give at most "
                f"{most}, or ask the operator for more",
                path="$.priority",
            )

    def _check_streams(self, request: Request, now: float) -> None:
        streams = request.session.streams
        if request.stream_id in streams:
            raise RequestError(
                Code.DUPLICATE_STREAM,
                f"stream {request.stream_id} is still running; give each live stream its own id",
                path="$.stream_id",
            )
        if len(streams) >= self._settings.max_streams:
            raise UnavailableError(
                Code.CLIENT_LIMIT,
                f"this session has {len(streams)} live streams, which is the maximum; wait "
                "until one ends",
                retry_after_s=request.session.pace.retry_after_s(now),
            )
