"""Tracks the unanswered requests of a WebSocket. Before a gateway ends, it closes the WebSocket
when all requests are answered."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Struct

from ....protocol.bodies import decode_as
from ....protocol.columns import TokenBody, TokenColumns
from ....protocol.errors import Code, RequestError
from ....protocol.messages import CLIENT_MESSAGES, StreamId

ANSWERED = CLIENT_MESSAGES.keys() - {b"HELLO", b"CANCEL", b"INPUT", b"BUFFER", b"PING", b"BYE"}
"""Types of client messages that are answered under their ``stream_id``, with a stream or with one
message."""

_ENDS = re.compile(rb'finish_reason(?:":"|[\xa0-\xbf])')
"""Matches a finish reason that is not null, in JSON or msgpack."""


class NamedStream(Struct):
    """The stream id of a client's message. The other fields are not checked."""

    stream_id: StreamId | None = None


class _About(Struct):
    """The fields of a MSG or ERROR that show whether the message ends its stream."""

    stream_id: StreamId | None = None
    attached: Any = UNSET
    input: Any = UNSET
    code: str = ""
    type: str | None = None
    """The type of the message that an ERROR refuses."""

    @property
    def is_end(self) -> bool:
        """Whether the message ends the stream with its ``stream_id``. A MSG that only confirms an
        ATTACH or an input does not end the stream. An ERROR that only refuses a further message of
        the stream, such as an input, does not end it either."""
        if self.type is None:
            return self.attached is UNSET and self.input is UNSET
        if self.type == "ATTACH":
            return self.code == Code.UNKNOWN_STREAM
        return self.type.encode() in ANSWERED


class OpenStreams:
    """The requests of one WebSocket, by ``stream_id``."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, stream: object) -> bool:
        return stream in self._open

    @staticmethod
    def named(body: bytes) -> int | None:
        """The stream id in the body of a client's message; None if the body has no stream id or is
        not valid."""
        try:
            named: NamedStream = decode_as(NamedStream, body)
        except RequestError:
            return None
        return named.stream_id

    def sent(self, kind: bytes, stream: int | None) -> None:
        """Handles a message of the type ``kind`` from the client to the broker."""
        if kind in ANSWERED and stream is not None:
            self._open.add(stream)

    def received(self, frames: Sequence[bytes]) -> None:
        """Handles a message from the broker to the client. The bodies of a TOKEN message are
        decoded only if they contain a finish reason."""
        match frames[0]:
            case b"TOKEN":
                for body in frames[1:]:
                    if _ENDS.search(body):
                        self._ended(body)
            case b"MSG" | b"ERROR":
                about = _about(frames[1])
                if about is not None and about.stream_id is not None and about.is_end:
                    self._open.discard(about.stream_id)

    def _ended(self, body: bytes) -> None:
        tokens: TokenBody = decode_as(TokenBody, body)
        # The rows of columns have no ``finish_reason``, so only ``entries`` can end a stream.
        entries = tokens.entries if isinstance(tokens, TokenColumns) else tokens
        ended = (e for e in entries if e.finish_reason is not None and e.live == 0)
        self._open.difference_update(entry.stream_id for entry in ended)


def _about(body: bytes) -> _About | None:
    try:
        about: _About = decode_as(_About, body)
    except RequestError:
        return None
    return about
