"""The line codec: LMTP's own form, ``<TYPE> <JSON>``, one message a line.

For WebSocket and line-oriented stdio. It has no attachments; what they carry has a place in each
body too (token ids as a list, a module as base64).
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
        raise ValueError("the line form carries no attachments; put them into the body")
    return f"{message.type.decode()} {encode_body(message.body, 'json').decode()}"


def decode_line(line: str, table: Mapping[bytes, Any]) -> Message:
    """The message in a line; raises RequestError on a bad one."""
    word, _, body = line.strip().partition(" ")
    if not word:
        raise RequestError(Code.BAD_MESSAGE, "the line is empty; it should be '<TYPE> <JSON>'")
    try:
        type_word, encoded = word.encode("ascii"), body.encode()
    except UnicodeEncodeError as error:
        raise RequestError(Code.BAD_MESSAGE, f"the line is not valid text: {error}") from None
    return Message(type_word, decode_as(body_type(table, type_word), encoded, "json"))
