"""How large a body may be, checked before it is decoded.

To decode a text costs its receiver some 0.5 ns for each byte. To decode numbers, short strings or
maps costs up to 40 ns for each byte, as each of them becomes an object. So only texts may fill a
large body; everything else in it has a smaller bound.
"""

from __future__ import annotations

from msgspec import Raw, Struct

from .bodies import decode_as
from .errors import Code, RequestError
from .messages import MAX_BODY_BYTES

WITH_TEXT = frozenset({b"GENERATE", b"SCORE", b"BUFFER", b"UPLOAD"})
"""The types of messages that have texts or data of any size in their bodies."""
MAX_PLAIN_BODY_BYTES = 64 * 1024
"""Largest body of any other message."""
MAX_STRUCTURE_BYTES = 1024 * 1024
"""Largest body without the texts in it: token ids, for example. More ids are sent as an
attachment."""
_STRINGS = frozenset((*b'"', *range(0xA0, 0xC0), *range(0xC4, 0xC7), *range(0xD9, 0xDC)))
"""The first bytes of strings: in JSON, and of strings and binary data in msgpack."""


class _Texts(Struct):
    """The fields that may be texts, undecoded."""

    prompt: Raw = Raw()
    scored: Raw = Raw()
    text: Raw = Raw()
    data: Raw = Raw()
    controller_arg: Raw = Raw()


def max_body_bytes(message_type: bytes) -> int:
    """The largest body of a client's message of this type."""
    return MAX_BODY_BYTES if message_type in WITH_TEXT else MAX_PLAIN_BODY_BYTES


def check_body(message_type: bytes, body: bytes) -> None:
    """Raises RequestError if the body of a client's message is too large for its type."""
    if len(body) <= MAX_PLAIN_BODY_BYTES:
        return
    most = max_body_bytes(message_type)
    if len(body) > most:
        shown = message_type[:40].decode("ascii", "backslashreplace")
        raise RequestError(
            Code.TOO_LARGE,
            f"this body has {len(body)} bytes; {most} are allowed in a message of type {shown!r}",
        )
    if len(body) <= MAX_STRUCTURE_BYTES:
        return
    texts: _Texts = decode_as(_Texts, body)
    raw = (texts.prompt, texts.scored, texts.text, texts.data, texts.controller_arg)
    views = (memoryview(each) for each in raw)
    size = len(body) - sum(len(view) for view in views if len(view) and view[0] in _STRINGS)
    if size > MAX_STRUCTURE_BYTES:
        raise RequestError(
            Code.TOO_LARGE,
            f"this body has {size} bytes that are not text, as numbers and names; "
            f"{MAX_STRUCTURE_BYTES} are allowed; send token ids as an attachment, u32 each",
        )
