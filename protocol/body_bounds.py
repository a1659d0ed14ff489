"""Checks bounds on a body's size before the body is decoded.

Decoding a long text takes about 0.5 ns for each byte. Decoding numbers, short strings and maps
takes up to 40 ns for each byte, because each of them becomes an object. So the texts of a body may
be large, but the rest of the body has a smaller bound.
"""

from __future__ import annotations

from msgspec import Raw, Struct

from .bodies import decode_as
from .errors import Code, RequestError
from .messages import MAX_BODY_BYTES

TEXT_FIELDS: dict[bytes, tuple[str, ...]] = {
    b"GENERATE": ("prompt", "controller_arg"),
    b"SCORE": ("prompt", "scored"),
    b"BUFFER": ("text",),
    b"UPLOAD": ("data",),
}
"""By message type: the fields of the body that may contain large texts or data."""
MAX_PLAIN_BODY_BYTES = 64 * 1024
"""Maximum number of bytes of a body, for message types that are not in ``TEXT_FIELDS``."""
MAX_STRUCTURE_BYTES = 1024 * 1024
"""Maximum number of bytes of a body without its texts. A list of token ids counts, so a client
sends a long list as an attachment."""
_STRINGS = frozenset((*b'"', *range(0xA0, 0xC0), *range(0xC4, 0xC7), *range(0xD9, 0xDC)))
"""The first byte of a JSON string, and the first bytes of msgpack strings and binary data."""


class _Texts(Struct):
    """The fields of a body that may contain texts. Their values are not decoded."""

    prompt: Raw = Raw()
    scored: Raw = Raw()
    text: Raw = Raw()
    data: Raw = Raw()
    controller_arg: Raw = Raw()


def max_body_bytes(message_type: bytes) -> int:
    """Maximum number of bytes of the body of a client's message of this type."""
    return MAX_BODY_BYTES if message_type in TEXT_FIELDS else MAX_PLAIN_BODY_BYTES


def check_body(message_type: bytes, body: bytes) -> None:
    """Raises RequestError if the body of a client's message is too large for its type, or if the
    body without its texts has more than ``MAX_STRUCTURE_BYTES``."""
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
    views = (memoryview(getattr(texts, name)) for name in TEXT_FIELDS[message_type])
    size = len(body) - sum(len(view) for view in views if len(view) and view[0] in _STRINGS)
    if size > MAX_STRUCTURE_BYTES:
        raise RequestError(
            Code.TOO_LARGE,
            f"this body has {size} bytes that are not text (numbers, names); "
            f"{MAX_STRUCTURE_BYTES} are allowed; send token ids as an attachment of u32",
        )
