"""The frame codec. A message is a ZeroMQ multipart ``[TYPE][header?][body][attachment…]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .bodies import Encoding, body_type, decode_as, encode_body
from .errors import Code, RequestError
from .header import Header, decode_header, encode_header

Frames = list[bytes]
"""The frames of one message."""


class Message(NamedTuple):
    """A decoded message. This module encodes messages as frames; ``lines.py`` encodes them as
    lines."""

    type: bytes
    body: Any
    attachments: tuple[bytes, ...] = ()


def encode_frames(message: Message, encoding: Encoding, header: Header | None = None) -> Frames:
    """The frames of a message. A message between the broker and a worker has a header. A message
    between the broker and a client has none."""
    head = [message.type] if header is None else [message.type, encode_header(*header)]
    return [*head, encode_body(message.body, encoding), *message.attachments]


def decode_frames(frames: Sequence[bytes], table: Mapping[bytes, Any]) -> Message:
    """Decodes the frames of a message between a client and the broker. Raises RequestError if the
    message is invalid."""
    if len(frames) < 2:
        raise RequestError(
            Code.BAD_MESSAGE,
            f"the message has {len(frames)} frames; it must have a type and a body",
        )
    message_type, body = frames[0], frames[1]
    return Message(message_type, decode_as(body_type(table, message_type), body), tuple(frames[2:]))


def decode_worker_frames(
    frames: Sequence[bytes], table: Mapping[bytes, Any]
) -> tuple[Header, Message]:
    """Decodes the frames of a message between the broker and a worker, except ``TOKEN``. Returns
    the header and the message."""
    if len(frames) < 3:
        raise RequestError(
            Code.BAD_MESSAGE,
            f"the message has {len(frames)} frames; it must have a type, a header and a body",
        )
    header = decode_header(frames[1])
    return header, decode_frames([frames[0], *frames[2:]], table)
