"""The line codec. Each message is one line, ``<TYPE> <JSON>``, as in LMTP.

Clients over WebSocket, over standard input and output, and in one process use lines. A line does
not have attachments. Fields of the body replace them: token ids are a list, a module is base64.
``line_frames`` and ``frames_line`` convert between lines and frames, and decode only the bodies of
``HELLO`` and ``UPLOAD``. A WebSocket can also carry binary messages. For a client that requests
tokens in columns, ``frames_binary`` encodes the broker's messages as binary messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .bodies import body_type, decode_as, encode_body, encoding_of, error_body
from .body_bounds import check_body
from .errors import Code, RequestError, TokenbusError
from .frames import Frames, Message
from .messages import Hello, Upload


def encode_line(message: Message) -> str:
    """The line of a message, without the line end."""
    if message.attachments:
        raise ValueError(
            f"the message has {len(message.attachments)} attachments; a line cannot have any: use "
            "the fields of the body"
        )
    return f"{message.type.decode()} {encode_body(message.body, 'json').decode()}"


def decode_line(line: str, table: Mapping[bytes, Any]) -> Message:
    """The message in a line; raises RequestError if the line is not valid."""
    type_word, encoded = split_line(line)
    return Message(type_word, decode_as(body_type(table, type_word), encoded, "json"))


def split_line(line: str) -> tuple[bytes, bytes]:
    """The type and the undecoded body of a line; raises RequestError if the line has no type."""
    message_type, _, body = line.strip().partition(" ")
    if not message_type:
        raise RequestError(Code.BAD_MESSAGE, "the line is empty; it must be '<TYPE> <JSON>'")
    try:
        return message_type.encode("ascii"), body.encode()
    except UnicodeEncodeError as error:
        raise RequestError(Code.BAD_MESSAGE, f"the line is not valid text: {error}") from None


def line_frames(line: str, binary: bool = False) -> Frames:
    """Converts a client's line to frames. The broker will decode and check the body.

    Answers to lines are text, so the frames of a ``HELLO`` name JSON as the only encoding. If
    ``binary`` is true, a ``HELLO`` with the capability ``columns`` keeps its encodings. The module
    in an ``UPLOAD`` becomes an attachment. Raises RequestError if the line does not have a type, if
    its body is not JSON, or if a ``HELLO`` is not valid or does not accept JSON.
    """
    message_type, body = split_line(line)
    if message_type == b"HELLO":
        return [message_type, _hello(body, binary)]
    if message_type == b"UPLOAD":
        return [message_type, *_attached_module(body)]
    if encoding_of(body) != "json":
        raise RequestError(
            Code.BAD_MESSAGE, f"the body begins with {body[:8]!r}; in a line it must be JSON"
        )
    return [message_type, body]


def frames_line(frames: Sequence[bytes]) -> str:
    """The line of a message from the broker to a client whose encoding is JSON."""
    return b" ".join(frames[:2]).decode()


def frames_binary(frames: Sequence[bytes]) -> bytes:
    """Encodes the broker's message to a client with msgpack as one binary message: the type, a
    space, and the bodies. The bodies need no separator, because a decoder of msgpack finds the end
    of each body."""
    return b"%b %b" % (frames[0], b"".join(frames[1:]))


def error_line(error: TokenbusError, line: str) -> str:
    """The line of an ``ERROR`` that answers ``line``, a client's line that was refused before it
    was sent to the broker."""
    message_type = line.strip().partition(" ")[0].encode("utf-8", "replace")
    return encode_line(Message(b"ERROR", error_body(error, None, message_type)))


def _hello(body: bytes, binary: bool) -> bytes:
    check_body(b"HELLO", body)
    hello: Hello = decode_as(Hello, body, "json")
    if binary and "columns" in hello.capabilities:
        return body
    if "json" not in hello.encodings:
        raise RequestError(
            Code.UNSUPPORTED,
            f"a line must be JSON, and the encodings {list(hello.encodings)} do not include json",
            path="$.encodings",
        )
    hello.encodings = ("json",)
    return encode_body(hello, "json")


def _attached_module(body: bytes) -> list[bytes]:
    try:
        upload: Upload = decode_as(Upload, body, "json")
    except RequestError:
        # The body is not valid. It is passed on unchanged, so that the broker answers with the
        # error.
        return [body]
    if upload.data is None:
        return [body]
    module, upload.data = upload.data, None
    return [encode_body(upload, "json"), module]
