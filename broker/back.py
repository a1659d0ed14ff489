"""Handles the messages of workers: passes tokens and answers to clients, and all other messages to
their handlers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct

from ..protocol.bodies import decode_as
from ..protocol.errors import Code, RequestError, ServiceError, TokenbusError
from ..protocol.header import Flag, decode_header, decode_manifest
from ..protocol.packing import pack
from .dispatch import Dispatcher
from .ends import Ends
from .leases import Leases
from .outgoing import Outgoing, Side
from .state import BrokerState
from .worker import UnreadableError, Worker

log = logging.getLogger(__name__)

_FRONT = Side.FRONT

Handler = Callable[[Worker, list[bytes]], None]
"""Handles the frames of a worker's message; raises TokenbusError if the message is malformed."""


class Back:
    """Handles the messages of workers."""

    def __init__(
        self,
        state: BrokerState,
        leases: Leases,
        dispatcher: Dispatcher,
        ends: Ends,
        handlers: Mapping[bytes, Handler],
    ) -> None:
        """``handlers``: the handler of each message type except REGISTER, TOKEN, ERROR, MSG and
        SYSTEM."""
        self._state = state
        self._sessions = state.sessions
        self._requests = state.requests
        self._counters = state.counters
        self._out = state.out
        self._keeps = state.recent.enabled
        self._keep = state.recent.pending.append
        self._leases = leases
        self._by_peer = leases.by_peer
        self._dispatcher = dispatcher
        self._ends = ends
        self._handlers = handlers

    def on_frames(self, peer: bytes, frames: list[bytes], now: float) -> None:
        """Handles one message of a worker."""
        worker = self._by_peer.get(peer)
        if worker is not None:
            worker.last_seen = now
        try:
            if len(frames) < 3:
                raise RequestError(
                    Code.BAD_MESSAGE,
                    f"this message has {len(frames)} frames; a worker's message has a type, a "
                    "header and a body",
                )
            message_type, head = frames[0], frames[1]
            if message_type == b"REGISTER":
                self._leases.on_register(peer, frames, now)
            elif worker is None:
                self._state.recovery.follow()
                self._leases.ask(peer, "this connection has no registered worker", now)
            elif worker.fences and worker.fences.is_void(decode_header(head).request):
                pass
            elif message_type in (b"ERROR", b"MSG", b"SYSTEM"):
                self._pass_on(worker, message_type, head, frames)
            else:
                self._on_worker_message(worker, frames)
        except UnreadableError as error:
            assert worker is not None
            self._leases.lose_unread(worker, error)
        except Exception as error:
            self._on_failure(worker, peer, frames, error)

    def on_tokens(
        self, peer: bytes, frames: list[bytes], now: float, received: list[bytes]
    ) -> None:
        """Routes the tokens of a step: one body for each session. The bodies are not decoded.
        ``received``: ``frames`` in their packed form.

        This method runs more often than any other code of the broker, so it must be fast.
        """
        worker = self._by_peer.get(peer)
        if worker is None:
            self.on_frames(peer, frames, now)
            return
        worker.last_seen = now
        try:
            head = frames[1]
            if worker.manifest[0] != head:
                self._read_manifest(worker, head)
            _, (sessions, finished, deltas), found = worker.manifest
            expected = 2 + len(sessions) + len(deltas)
            if len(frames) != expected:
                raise _wrong_number(len(frames), expected)
            if worker.fences.by_session:
                frames = worker.fences.without_fenced(frames, sessions)
                received = pack(frames)
        except (TokenbusError, IndexError) as error:
            self._counters.bad_worker_messages += 1
            self._leases.lose_unread(worker, error)
            return
        known = self._sessions.by_id
        out = self._out
        for i, session in enumerate(found, 2):
            if session is None or not session.alive:
                session = known.get(sessions[i - 2])
            body = frames[i]
            if session is not None and body:
                out.tokens(session, body)
        if sessions and self._keeps:
            if len(received) == 1:
                self._keep(received[0])
            else:
                self._state.recent.keep(sessions, frames[2:])
        self._counters.token_bodies += len(sessions)
        if finished:
            self._on_finished(worker, finished, frames)

    def _read_manifest(self, worker: Worker, head: bytes) -> None:
        """Decodes the manifest of a TOKEN, and finds its sessions."""
        manifest = decode_manifest(head)
        found = list(map(self._sessions.by_id.get, manifest.sessions))
        worker.manifest = (head, manifest, found)

    def _on_finished(self, worker: Worker, finished: Iterable[int], frames: list[bytes]) -> None:
        """Ends the requests that the manifest of a TOKEN names as ended."""
        for number in finished:
            try:
                request = self._requests.get(number)
                if request is None or request.worker is not worker:
                    continue
                if not worker.fences.is_void(number):
                    self._dispatcher.on_finished(request)
            except Exception as error:
                self._on_failure(worker, worker.peer, frames, error)

    def on_unreadable(self, peer: bytes, error: TokenbusError) -> None:
        """Handles a message whose frames cannot be unpacked, or that is in another version of the
        protocol."""
        self._counters.bad_worker_messages += 1
        worker = self._by_peer.get(peer)
        if worker is None:
            self._leases.refuse(peer, peer.hex(), error)
        else:
            self._leases.lose_unread(worker, error)

    def _on_failure(
        self, worker: Worker | None, peer: bytes, frames: list[bytes], error: Exception
    ) -> None:
        """Handles a message that caused an error. If the message belongs to a request, the request
        ends."""
        name = worker.name if worker is not None else peer.hex()
        if isinstance(error, TokenbusError | IndexError):
            self._counters.bad_worker_messages += 1
            log.warning("a message of worker %s was dropped: %s", name, error)
        else:
            self._dispatcher.on_defect(f"a message of {name}", error)
        try:
            header = decode_header(frames[1])
        except (TokenbusError, IndexError):
            return
        request = self._requests.get(header.request)
        if request is None or worker is None or worker not in (request.worker, request.steered_by):
            return
        failure = ServiceError(
            Code.INTERNAL,
            f"a message of the worker {name} about this stream could not be handled; the broker's "
            "log says why",
        )
        self._dispatcher.abandon(request, failure)
        if header.flags & Flag.FINAL:
            self._dispatcher.forget(request)

    def _pass_on(
        self, worker: Worker, message_type: bytes, head: bytes, frames: list[bytes]
    ) -> None:
        header = decode_header(head)
        request = self._requests.get(header.request)
        if request is not None and worker not in (request.worker, request.steered_by):
            return
        if header.request and (request is None or not request.open):
            if request is not None and header.flags & Flag.FINAL:
                self._dispatcher.forget(request)
            return
        if request is not None and request.attaching and message_type == b"MSG":
            # After this answer to an ATTACH, the worker sends entries again that it has already
            # sent.
            answer: _Attached = decode_as(_Attached, frames[2])
            received = request.attaching.pop(0)
            if answer.attached is not None:
                # A client may name a number above the number of the stream's entries.
                received = min(received, answer.attached)
            request.session.log.repeats(request.id, received)
        if request is not None and header.flags & Flag.FINAL:
            self._ends.answered(request, (message_type, *frames[2:]))
            self._dispatcher.forget(request)
            return
        session = self._sessions.by_id.get(header.address)
        if session is not None and session.peer is not None:
            self._sessions.unread.add(session.peer, sum(map(len, frames[2:])))
            self._out.append(Outgoing(_FRONT, session.peer, (message_type, *frames[2:]), True))

    def _on_worker_message(self, worker: Worker, frames: list[bytes]) -> None:
        handler = self._handlers.get(frames[0])
        if handler is None:
            shown = frames[0][:40].decode("ascii", "backslashreplace")
            raise RequestError(Code.UNKNOWN_TYPE, f"{shown!r} is not a message type of workers")
        handler(worker, frames)


class _Attached(Struct):
    """The field of a MSG that shows whether the message answers an ATTACH."""

    attached: int | None = None
    """``Msg.attached``."""


def _wrong_number(frames: int, expected: int) -> RequestError:
    return RequestError(
        Code.BAD_MESSAGE,
        f"a TOKEN has {frames} frames; expected {expected}, as its manifest says",
    )
