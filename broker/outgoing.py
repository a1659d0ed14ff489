"""The outgoing messages that the broker's core returns for each event, and that the sockets
send."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from msgspec import Struct

from ..protocol.bodies import Encoding, encode_body, error_body
from ..protocol.errors import TokenbusError
from ..protocol.header import encode_header
from ..protocol.messages import Msg, Token
from ..protocol.metrics import Tally
from .session import Session
from .worker import Worker


class Side(Enum):
    """The two sockets of the broker: FRONT for clients, BACK for workers."""

    FRONT = "front"
    BACK = "back"


_FRONT = Side.FRONT
MAX_JOINED = 32
"""Maximum number of bodies in one TOKEN message."""
MAX_JOINED_BYTES = 2**10
"""Maximum bytes of a body that is added to an earlier TOKEN message. ZeroMQ's queue for a client is
bounded in messages, so its messages should be small."""


class Outgoing(Struct, frozen=True, gc=False):
    """Frames for a peer. If ``must`` is true, the message may exceed the bound of its peer's queue
    (``Outbox``)."""

    side: Side
    peer: bytes
    frames: Sequence[bytes]
    must: bool = False


class Outgoings(list[Outgoing]):
    """The outgoing messages of one event, in order. ``errors`` counts the ERRORs that the broker
    itself makes."""

    def __init__(self, errors: Tally) -> None:
        super().__init__()
        self._errors = errors
        self._open: dict[bytes, list[bytes]] = {}
        """For each connection whose last message is a TOKEN: the frames of this TOKEN, to which
        further bodies may be added."""

    def append(self, message: Outgoing) -> None:
        """Adds a message. No further bodies are then added to the TOKEN before this message,
        because they would overtake the message."""
        self._open.clear()
        super().append(message)

    def tokens(self, session: Session, body: bytes) -> None:
        """Adds a body of TOKEN from a worker; drops it while the client has no connection.

        If the client accepts several bodies in a message, and the last message to the client is a
        TOKEN, the body is added to that message.
        """
        peer = session.peer
        if peer is None:
            return
        if not session.bodies:
            super().append(Outgoing(_FRONT, peer, (b"TOKEN", body)))
            return
        frames = self._open.get(peer)
        if frames is not None and len(frames) <= MAX_JOINED and len(body) <= MAX_JOINED_BYTES:
            frames.append(body)
            return
        frames = self._open[peer] = [b"TOKEN", body]
        super().append(Outgoing(_FRONT, peer, frames))

    def take(self) -> list[Outgoing]:
        """Removes and returns all messages."""
        taken = self[:]
        self.clear()
        self._open.clear()
        return taken

    def to_peer(self, peer: bytes, message_type: bytes, body: Any, encoding: Encoding) -> None:
        """Adds a message to a client's connection."""
        self.append(Outgoing(Side.FRONT, peer, (message_type, encode_body(body, encoding)), True))

    def to_session(self, session: Session, message_type: bytes, body: Any) -> None:
        """Adds a message to a client, in the session's encoding; drops it while the client has no
        connection."""
        if session.peer is not None:
            self.to_peer(session.peer, message_type, body, session.encoding)

    def to_worker(
        self,
        worker: Worker | bytes,
        message_type: bytes,
        body: Any,
        request: int = 0,
        flags: int = 0,
        address: int = 0,
    ) -> None:
        """Adds a message from the broker itself to a worker, or to a peer that is not
        registered."""
        peer = worker if isinstance(worker, bytes) else worker.peer
        header = encode_header(request, address, flags)
        frames = (message_type, header, encode_body(body, "msgpack"))
        self.append(Outgoing(Side.BACK, peer, frames, True))

    def count_error(self, error: TokenbusError) -> None:
        """Counts an ERROR that the broker itself makes."""
        self._errors.add(error.code)

    def attached(
        self, session: Session, stream_id: int, moves: int, entries: list[Token], first: int
    ) -> None:
        """Adds the answer to an ATTACH: a MSG, and then ``entries``, which are the entries of the
        stream from the number ``first`` on."""
        answer = Msg(stream_id=stream_id, attached=first, moves=moves)
        self.to_session(session, b"MSG", answer)
        if entries:
            self.to_session(session, b"TOKEN", entries)

    def refuse(
        self,
        peer: bytes,
        error: TokenbusError,
        stream_id: int | None,
        message_type: bytes,
        encoding: Encoding,
    ) -> None:
        """Adds the ERROR that refuses a client's message."""
        self._errors.add(error.code)
        self.to_peer(peer, b"ERROR", error_body(error, stream_id, message_type), encoding)
