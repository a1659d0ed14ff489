"""Which requests of a WebSocket are not answered yet: while there are any, a gateway that is asked
to end keeps it open."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Struct

from ...protocol.bodies import decode_as
from ...protocol.columns import TokenBody, TokenColumns
from ...protocol.errors import RequestError
from ...protocol.messages import CLIENT_MESSAGES, StreamId

ANSWERED = CLIENT_MESSAGES.keys() - {b"HELLO", b"CANCEL", b"BUFFER", b"PING", b"BYE"}
"""Messages of a client after which an answer comes for their ``stream_id``."""


_ENDS = re.compile(rb'finish_reason(?:":"|[\xa0-\xbf])')
"""A finish reason that is a text, in JSON or msgpack."""


class _About(Struct):
    stream_id: StreamId | None = None
    attached: Any = UNSET


class OpenStreams:
    """The requests of one WebSocket, by ``stream_id``."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._open)

    def sent(self, frames: Sequence[bytes]) -> None:
        """A message of the client goes to the broker."""
        if frames[0] in ANSWERED:
            about = _about(frames[1])
            if about is not None and about.stream_id is not None:
                self._open.add(about.stream_id)

    def received(self, frames: Sequence[bytes]) -> None:
        """A message of the broker goes to the client. Tokens are decoded only where one ends a
        sequence."""
        match frames[0]:
            case b"TOKEN":
                for body in frames[1:]:
                    if _ENDS.search(body):
                        self._ended(body)
            case b"MSG" | b"ERROR":
                about = _about(frames[1])
                if about is not None and about.stream_id is not None and about.attached is UNSET:
                    self._open.discard(about.stream_id)

    def _ended(self, body: bytes) -> None:
        tokens: TokenBody = decode_as(TokenBody, body)
        # No stream ends with a row of columns.
        entries = tokens.entries if isinstance(tokens, TokenColumns) else tokens
        ended = (e for e in entries if e.finish_reason is not None and e.live == 0)
        self._open.difference_update(entry.stream_id for entry in ended)


def _about(body: bytes) -> _About | None:
    try:
        about: _About = decode_as(_About, body)
    except RequestError:
        return None
    return about
