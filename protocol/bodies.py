"""Encodes structs as bodies in JSON or msgpack, and decodes bodies. Errors name the faulty
field."""

from __future__ import annotations

import array
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, Protocol

import msgspec

from .decoders import json_decoder, msgpack_decoder
from .errors import Code, RequestError, TokenbusError
from .expected_values import MAX_REPEATED_BYTES, named_values, out_of_bounds, parted, plain
from .messages import Error

Encoding = Literal["json", "msgpack"]


class _Decoder(Protocol):
    def decode(self, body: bytes, /) -> Any: ...


_encoders: dict[str, Any] = {
    "json": msgspec.json.Encoder().encode,
    "msgpack": msgspec.msgpack.Encoder().encode,
}


def encode_body(body: Any, encoding: Encoding) -> bytes:
    """Encodes a struct as the body of a message."""
    encoded: bytes = _encoders[encoding](body)
    return encoded


def encode_bodies(bodies: Iterable[Any], encoding: Encoding) -> list[bytes]:
    """Encodes several structs, each as the body of a message."""
    return list(map(_encoders[encoding], bodies))


def encoding_of(body: bytes) -> Encoding:
    """The encoding of a body, as its first byte shows.

    A body is a map or a list, so its first byte is 0x80 or more in msgpack, and an ASCII character
    in JSON. An empty body, which stands for a message without fields, counts as JSON.
    """
    return "json" if not body or body[0] < 0x80 else "msgpack"


@cache
def _decoder(kind: Any, encoding: Encoding) -> _Decoder:
    return json_decoder(kind) if encoding == "json" else msgpack_decoder(kind)


def decode_as(kind: Any, body: bytes, encoding: Encoding | None = None) -> Any:
    """Decodes ``body`` as a value of type ``kind``. If ``encoding`` is None, the body's first byte
    determines the encoding (``encoding_of``).

    Raises RequestError. The code is ``bad_message`` if the body is not valid JSON or msgpack. It is
    ``invalid_field``, with the path of the field, if a value has the wrong type or is out of range.
    """
    encoding = encoding or encoding_of(body)
    try:
        return _decoder(kind, encoding).decode(body or b"{}")
    except msgspec.ValidationError as error:
        shown, path = parted(error)
        what = named_values(shown, kind, path) or plain(shown)
        beginning = body[:MAX_REPEATED_BYTES]
        what += out_of_bounds(shown, path, lambda: _decoder(Any, encoding).decode(beginning))
        raise RequestError(Code.INVALID_FIELD, f"{what} at {path}", path=path) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(Code.BAD_MESSAGE, f"the body is not valid {encoding}: {error}") from None
    except RecursionError:
        raise RequestError(Code.BAD_MESSAGE, "the body is nested too deeply") from None


def body_type(table: Mapping[bytes, Any], message_type: bytes) -> Any:
    """Looks up the type of the body for the message type ``message_type`` in ``table``. Raises
    RequestError with the code ``unknown_type`` if the table does not have the message type."""
    kind = table.get(message_type)
    if kind is None:
        shown = message_type[:40].decode("ascii", "backslashreplace")
        known = ", ".join(sorted(name.decode() for name in table))
        raise RequestError(
            Code.UNKNOWN_TYPE, f"unknown message type {shown!r}; the types are {known}"
        )
    return kind


def error_body(
    error: TokenbusError, stream_id: int | None = None, message_type: bytes | None = None
) -> Error:
    """The body of the ``ERROR`` that reports ``error``.

    ``stream_id``: the stream that the error ends. ``message_type``: the type of the message that
    was refused.
    """
    shown = (
        message_type[:40].decode("ascii", "backslashreplace") if message_type is not None else None
    )
    return Error(
        code=error.code,
        message=error.message,
        stream_id=stream_id,
        path=error.path,
        retry_after_s=error.retry_after_s,
        type=shown,
    )


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Encodes token ids as an attachment: each id is a little-endian u32."""
    packed = array.array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(attachment: bytes) -> list[int]:
    """The token ids of an attachment; raises RequestError if its size is not a multiple of 4."""
    if len(attachment) % 4:
        raise RequestError(
            Code.BAD_MESSAGE,
            f"the attachment has {len(attachment)} bytes; token ids have 4 bytes each",
        )
    unpacked = array.array("I", attachment)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked.tolist()
