"""LMQL's form of LMTP, for a WebSocket whose client has not sent ``HELLO``.

LMQL's client (``lmql.models.lmtp.lmtp_client``, 0.7.3) accepts two messages. ``TOKEN`` is a list of
entries, and an entry with ``error`` ends its stream. ``MSG`` is a list of answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from ....protocol.bodies import decode_as, encode_body
from ....protocol.errors import RequestError
from ....protocol.frames import Frames
from ....protocol.lines import frames_line
from ....protocol.messages import Error, StreamId, Token

ASKED = frozenset(
    {
        b"MODEL_INFO",
        b"STATUS",
        b"TOKENIZER",
        b"EMBED",
        b"UPLOAD",
        b"TAG",
        b"TAGS",
        b"DELETE",
        b"ATTACH",
    }
)
"""Requests whose answer is a ``MSG``."""


class _Named(Struct):
    stream_id: StreamId


class _FailedAnswer(Struct):
    """An element of ``MSG`` for a refused request, as in LMQL's own server."""

    stream_id: int
    error: str
    code: str


class PlainLmtp:
    """Converts the broker's messages to LMQL's form."""

    def __init__(self) -> None:
        self._awaited: set[int] = set()
        """The stream ids of unanswered requests whose answer is a ``MSG``."""

    def sent(self, frames: Frames) -> None:
        """Handles a message from the client to the broker."""
        if frames[0] in ASKED:
            stream_id = _stream_id(frames[1])
            if stream_id is not None:
                self._awaited.add(stream_id)

    def line(self, frames: Sequence[bytes]) -> str | None:
        """Converts a message from the broker to a line. Returns None for a SYSTEM, because LMQL's
        client does not use this message.

        An ERROR without a stream id is sent unchanged: LMQL's client shows it in a warning.
        """
        match frames[0]:
            case b"MSG":
                self._awaited.discard(_stream_id(frames[1]) or 0)
                return frames_line([b"MSG", b"[%b]" % frames[1]])
            case b"SYSTEM":
                return None
            case b"ERROR":
                error: Error = decode_as(Error, frames[1], "json")
                if error.stream_id is not None:
                    return self._failed(error, error.stream_id)
        return frames_line(frames)

    def _failed(self, error: Error, stream_id: int) -> str:
        if stream_id in self._awaited:
            self._awaited.discard(stream_id)
            answer = _FailedAnswer(stream_id, error.message, error.code)
            return frames_line([b"MSG", encode_body([answer], "json")])
        entry = Token(
            token=None,
            stream_id=stream_id,
            logprob=None,
            finish_reason="error",
            error=error.message,
            code=error.code,
        )
        return frames_line([b"TOKEN", encode_body([entry], "json")])


def _stream_id(body: bytes) -> int | None:
    """The stream id in a body; None if the body has no stream id or is not valid."""
    try:
        named: _Named = decode_as(_Named, body, "json")
    except RequestError:
        return None
    return named.stream_id
