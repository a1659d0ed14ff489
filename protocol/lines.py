"""The line codec: the form of LMTP, ``<TYPE> <JSON>``, one message per line.

For WebSocket and line-oriented stdio. A line has no attachments; bodies have fields for their
contents (token ids as a list, a module as base64).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .bodies import body_type, decode_as, encode_body
from .errors import Code, RequestError
from .frames import Message


def encode_line(message: Message) -> str:
    """The line of a message, without the line end."""
    if message.attachments:
        raise ValueError(
            f"the message has {len(message.attachments)} attachments, and a line has none; use the "
            "fields of the body"
        )
    return f"{message.type.decode()} {encode_body(message.body, 'json').decode()}"


def decode_line(line: str, table: Mapping[bytes, Any]) -> Message:
    """The message in a line; raises RequestError if invalid."""
    word, _, body = line.strip().partition(" ")
    if not word:
        raise RequestError(Code.BAD_MESSAGE, "the line is empty; it must be '<TYPE> <JSON>'")
    try:
        type_word, encoded = word.encode("ascii"), body.encode()
    except UnicodeEncodeError as error:
        raise RequestError(Code.BAD_MESSAGE, f"the line is not valid text: {error}") from None
    return Message(type_word, decode_as(body_type(table, type_word), encoded, "json"))
