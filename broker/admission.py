"""Admission: reads the routing fields of a client's request, and accepts or refuses the request."""

from __future__ import annotations

from ..protocol.bodies import decode_as
from ..protocol.errors import Code, RequestError, TokenbusError, UnavailableError
from ..protocol.messages import ModelInfoRequest, Msg, module_too_large
from .buffers import Buffers
from .dispatch import Dispatcher
from .ends import Ends
from .request import ROLES, STREAMS, Request, RoutingFields, Steering
from .session import Session
from .state import BrokerState

MAX_TOKENIZERS = 4
"""Maximum number of unanswered TOKENIZER requests of one session. The number is small because a
tokenizer has up to about 20 MB."""
MAX_TOKENIZERS_OF_KEY = 16
"""Maximum number of unanswered TOKENIZER requests of all sessions of one key. A worker copies each
answer between two steps, which delays the worker's streams."""


class Admission:
    """Turns clients' messages into requests, or refuses them."""

    def __init__(
        self,
        state: BrokerState,
        dispatcher: Dispatcher,
        buffers: Buffers,
        ends: Ends,
    ) -> None:
        self._state = state
        self._settings = state.settings
        self._dispatcher = dispatcher
        self._buffers = buffers
        self._quotas = state.quotas
        self._ends = ends
        self._leaving: TokenbusError | None = None

    def on_model_info(self, session: Session, frames: list[bytes]) -> None:
        """Handles a client's MODEL_INFO. If a worker has the model loaded, the broker answers;
        otherwise the request goes to a worker."""
        message: ModelInfoRequest = decode_as(ModelInfoRequest, frames[1])
        pools = self._state.pools
        name = message.model or pools.default_model
        for worker in pools.serving("gpu", name).workers.values():
            if name in worker.models:
                answer = Msg(stream_id=message.stream_id, model_info=worker.models[name])
                self._state.out.to_session(session, b"MSG", answer)
                return
        self.submit(session, frames)

    def submit(self, session: Session, frames: list[bytes]) -> None:
        """Accepts a request and passes it to the dispatcher; raises an error if the request is
        refused."""
        message_type, now = frames[0], self._state.now
        fields: RoutingFields = decode_as(RoutingFields, frames[1])
        if self._state.closing is not None:
            raise self._state.closing
        if self._leaving is not None and not session.recovers:
            raise self._leaving
        buffers = self._buffers.named(session, fields.buffers) if message_type in STREAMS else []
        size = sum(map(len, frames[2:]))
        if message_type == b"UPLOAD" and (too_large := module_too_large(size)) is not None:
            raise too_large
        controller = fields.steered_by(message_type)
        is_stored = ROLES[message_type] == "controller"
        tenant = [self._quotas.tenant(session.key).encode()] if is_stored else []
        request = Request(
            id=next(self._state.ids),
            session=session,
            type=message_type,
            fields=fields,
            frames=[*frames[1:], *buffers, *tenant],
            arrived=now,
            deadline=now + fields.timeout_s if fields.timeout_s is not None else None,
            steering=Steering(controller) if controller else None,
        )
        self._check_priority(request)
        self._check_streams(request, now)
        self._quotas.check(session, bool(controller), now)
        if message_type == b"TOKENIZER":
            self._check_unread(session)
        # A client that reuses the ``stream_id`` of an ended stream will not attach to the ended
        # stream any more. So the stored end of this stream is dropped.
        self._ends.drop(session, request.stream_id)
        self._state.counters.requests += 1
        try:
            self._dispatcher.submit(request)
        except Exception:
            self._dispatcher.abandon(request)
            raise

    def close(self, error: TokenbusError) -> None:
        """Refuses new requests from now on; requests that wait for a worker end with ``error``."""
        self._state.closing = error
        for session in self._state.sessions:
            for request in list(session.streams.values()):
                if request.worker is None:
                    self._dispatcher.abandon(request, error)

    def leave(self, error: TokenbusError) -> None:
        """Refuses new requests of clients that cannot continue their streams at the broker that
        replaces this one."""
        self._leaving = error

    def _check_unread(self, session: Session) -> None:
        """Raises UnavailableError if too many TOKENIZER requests of a session or a key are
        unanswered, or SlowClientError if too many bytes of answers are unread."""
        waiting = [r for r in session.streams.values() if r.type == b"TOKENIZER"]
        if len(waiting) >= MAX_TOKENIZERS:
            raise UnavailableError(
                Code.CLIENT_LIMIT,
                f"this session waits for {len(waiting)} tokenizers; {MAX_TOKENIZERS} are "
                "allowed; wait for one of them",
                retry_after_s=1.0,
            )
        of_key = self._state.tokenizers[session.key] if session.key else 0
        if of_key >= MAX_TOKENIZERS_OF_KEY:
            raise UnavailableError(
                Code.CLIENT_LIMIT,
                f"the sessions of this key wait for {of_key} tokenizers; {MAX_TOKENIZERS_OF_KEY} "
                "are allowed; try again when one has arrived",
                retry_after_s=1.0,
            )
        self._state.sessions.unread.check(
            session.peer,
            self._settings.max_pending_bytes,
            "a tokenizer",
            "store the tokenizer of each model",
        )

    def _check_priority(self, request: Request) -> None:
        """Raises RequestError if a request has a higher priority than its client may use."""
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
        live = request.session.num_live
        if live >= self._settings.max_streams:
            raise UnavailableError(
                Code.CLIENT_LIMIT,
                f"this session has {live} live streams, which is the maximum; wait until one ends",
                retry_after_s=request.session.pace.retry_after_s(now),
            )
