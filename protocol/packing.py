"""Packs the small frames of a message between the broker and a worker into one ZeroMQ frame.

Receiving a frame from a socket takes longer than the broker's other work for the frame. So the
frames ``[TYPE][header][body][attachment…]`` of a message are sent in this form::

    [version u8, 0 u8, count u16, (count - 1) sizes u32, the frames][large frame…]

Numbers are little-endian. The packed frame contains the first ``count`` frames of the message, at
least one, directly after each other. The size of the last of these frames is left out, because this
frame ends where the packed frame ends. The first large frame of the message and all frames after it
are sent separately, and are not copied.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

from .errors import Code, RequestError
from .frames import Frames

PACKING_VERSION = 2
"""The version of this layout. In version 1, frames were not packed, and a message began with the
first letter of its type."""
MAX_PACKED_BYTES = 2**16
"""Maximum number of bytes of a packed frame. The first frame with more bytes and all frames after
it are sent separately. The type is always packed."""
MAX_PACKED = 2**16 - 1
"""Maximum number of a message's frames that are packed into one frame."""

_THREE = struct.Struct("<BBHII")
_PACK, _UNPACK = _THREE.pack, _THREE.unpack_from
_THREE_SIZE = _THREE.size


@lru_cache(maxsize=1024)
def _sizes(count: int) -> struct.Struct:
    return struct.Struct(f"<BBH{count - 1}I")


def pack(frames: Sequence[bytes]) -> Frames:
    """The frames to send for a message, which has at least one frame."""
    if len(frames) == 3:
        # The most frequent form: type, header and body.
        kind, header, body = frames
        if len(header) <= MAX_PACKED_BYTES >= len(body):
            return [_PACK(PACKING_VERSION, 0, 3, len(kind), len(header)) + kind + header + body]
    sizes = [len(frame) for frame in frames]
    count = min(len(frames), MAX_PACKED)
    if max(sizes) > MAX_PACKED_BYTES:
        large = (i for i, size in enumerate(sizes) if i and size > MAX_PACKED_BYTES)
        count = min(next(large, count), count)
    start = _sizes(count).pack(PACKING_VERSION, 0, count, *sizes[: count - 1])
    return [b"".join((start, *frames[:count])), *frames[count:]]


_CLIENT_FRAMES = 2
"""Number of frames of a message between a broker and its clients: the type and the body."""


def unpack(received: Frames) -> Frames:
    """The frames of a message. ``received``: the frames from the socket, at least one.

    Raises RequestError. The code is ``unsupported_version`` for another version of the layout. It
    is ``bad_message`` if the sizes do not match the frame, or if the message is one between a
    broker and its clients.
    """
    packed = received[0]
    if len(packed) >= _THREE_SIZE and len(received) == 1:
        version, _, count, kind_size, header_size = _UNPACK(packed)
        if version == PACKING_VERSION and count == 3:
            header = _THREE_SIZE + kind_size
            body = header + header_size
            if body <= len(packed):
                return [packed[_THREE_SIZE:header], packed[header:body], packed[body:]]
    return _unpack_any(received)


def _unpack_any(received: Frames) -> Frames:
    packed = received[0]
    if packed[:1] != bytes((PACKING_VERSION,)):
        if len(received) == _CLIENT_FRAMES and packed.isalpha():
            raise RequestError(
                Code.BAD_MESSAGE,
                f"{packed.decode()} is a message between a broker and its clients; a worker needs "
                "the broker's address for workers (the setting back), not its address for clients",
            )
        raise _another_version(packed)
    count = int.from_bytes(packed[2:4], "little")
    at = 4 * count
    if not 4 <= at <= len(packed):
        raise RequestError(
            Code.BAD_MESSAGE,
            f"a packed frame of {len(packed)} bytes has a count of {count}; expected a count of at "
            "least 1, and at least 4 bytes for each counted frame",
        )
    frames = []
    for size in _sizes(count).unpack_from(packed)[3:]:
        frames.append(packed[at : at + size])
        at += size
    if at > len(packed):
        raise RequestError(
            Code.BAD_MESSAGE,
            f"a packed frame of {len(packed)} bytes has sizes that add up to {at}; expected at "
            "most the size of the frame",
        )
    return [*frames, packed[at:], *received[1:]]


def _another_version(packed: bytes) -> RequestError:
    version = int.from_bytes(packed[:1], "little")
    shown = 1 if version >= ord("A") else version
    return RequestError(
        Code.UNSUPPORTED_VERSION,
        f"this message is in version {shown} of the protocol between broker and workers, and "
        f"version {PACKING_VERSION} is required; run broker and workers of one release",
    )
