"""Encodes buffers. A buffer is a part of a prompt that the broker stores for a session and forwards
to workers. Several prompts may contain the same buffer.

The first byte of a stored buffer is ``t`` or ``s``. After ``t``, the buffer has token ids (u32
little-endian each). After ``s``, it has text (UTF-8). If a ``GENERATE`` or ``SCORE`` names buffers,
the broker adds the buffers to the message for the worker, as its last attachments. If another
worker ran the request before, a ``Transcript`` follows the buffers.
"""

from __future__ import annotations

from .bodies import pack_tokens, unpack_tokens
from .errors import Code, RequestError
from .messages import Buffer


def buffer_bytes(message: Buffer, attachments: tuple[bytes, ...]) -> bytes | None:
    """The bytes to store for a ``BUFFER``; None if the message deletes the buffer."""
    given = [message.tokens is not None, message.text is not None, bool(attachments)]
    if sum(given) > 1:
        raise RequestError(
            Code.INVALID_FIELD,
            "the BUFFER has more than one of tokens, text and an attachment; give only one",
            path="$.tokens",
        )
    if message.tokens is not None:
        return b"t" + pack_tokens(message.tokens)
    if message.text is not None:
        return b"s" + message.text.encode()
    if attachments:
        unpack_tokens(attachments[0])
        return b"t" + attachments[0]
    return None


def buffer_part(stored: bytes) -> list[int] | str:
    """The token ids or the text in a buffer's bytes."""
    return unpack_tokens(stored[1:]) if stored[:1] == b"t" else stored[1:].decode()
