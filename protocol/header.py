"""The fixed binary header between broker and workers, and the manifest of a step's tokens.

The broker routes messages of workers by their headers. Layout of the header, little-endian:
``request`` u64, ``address`` u64, ``flags`` u32. In a worker's ``TOKEN``, a manifest follows the
header in the same frame, and the broker routes the ``TOKEN`` by its manifest. The manifest lists
the session of each body, the requests that end, and the request of each further frame
(``Manifest.deltas``).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntFlag
from typing import NamedTuple

from .errors import Code, RequestError

_HEADER = struct.Struct("<QQI")
_COUNTS = struct.Struct("<III")
_MANIFEST = struct.Struct("<QQIIII")

HEADER_SIZE = _HEADER.size
"""Number of bytes of a header."""


class Flag(IntFlag):
    """Bits of ``Header.flags``."""

    MSGPACK = 1
    """The client's session uses msgpack, so the bodies of its messages and of the answers are
    msgpack. Without this flag, they are JSON."""
    FINAL = 2
    """This is the last message of the request, so the broker removes the request."""
    COLUMNS = 4
    """The client also accepts bodies of TOKEN in columns (``columns.py``)."""
    MOVED = 8
    """The request was at another worker before. Its last attachment is a ``Transcript``."""
    TEXTS = 16
    """The client also accepts columns with texts. Set only together with ``COLUMNS``."""


FORM = Flag.MSGPACK | Flag.COLUMNS | Flag.TEXTS
"""The flags that say how the bodies of TOKEN are encoded for a client."""
WAITED_SHIFT = 8
"""From the bit with this number on, ``Header.flags`` contains the time that the request has waited
at the broker, in milliseconds."""
MAX_WAITED_MS = (1 << 24) - 1


class Header(NamedTuple):
    """The header of a message between the broker and a worker.

    ``request`` is the id that the broker assigned to the request; 0 if the message is not about a
    request. ``address`` is the client session of the request. In a message from one worker to
    another, the sender writes the receiver's id into ``address``. The broker replaces it by the
    sender's id when it forwards the message.
    """

    request: int = 0
    address: int = 0
    flags: int = 0

    @property
    def waited_s(self) -> float:
        """The time that the request waited at the broker before it was sent to the worker, in
        seconds."""
        return (self.flags >> WAITED_SHIFT) / 1000


class Manifest(NamedTuple):
    """The contents of a worker's ``TOKEN``, in the order of its frames.

    ``sessions``: the session of each body. ``finished``: requests that end with this message.
    ``deltas``: the requests of the frames that follow the bodies, one frame for each request.
    Workers of this release do not send such frames.
    """

    sessions: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()
    deltas: tuple[int, ...] = ()


def encode_header(request: int = 0, address: int = 0, flags: int = 0) -> bytes:
    """The 20 bytes of a header."""
    return _HEADER.pack(request, address, flags)


def waited_flags(waited_s: float) -> int:
    """Encodes the time that a request waited at the broker as bits of the flags."""
    return min(MAX_WAITED_MS, max(0, int(waited_s * 1000))) << WAITED_SHIFT


def decode_header(frame: bytes) -> Header:
    """The header in a frame; raises RequestError if the frame is too short."""
    if len(frame) < HEADER_SIZE:
        raise RequestError(
            Code.BAD_MESSAGE,
            f"the frame has {len(frame)} bytes; a header has {HEADER_SIZE} bytes",
        )
    return Header._make(_HEADER.unpack_from(frame))


def encode_token_header(
    sessions: Sequence[int], finished: Sequence[int] = (), deltas: Sequence[int] = ()
) -> bytes:
    """The header frame of a worker's ``TOKEN``: a header and the manifest."""
    n, f, d = len(sessions), len(finished), len(deltas)
    ids = struct.pack(f"<{n + f + d}Q", *sessions, *finished, *deltas)
    return _HEADER.pack(0, 0, 0) + _COUNTS.pack(n, f, d) + ids


def decode_manifest(frame: bytes) -> Manifest:
    """The manifest in the header frame of a worker's ``TOKEN``; raises RequestError if the frame is
    not valid."""
    if len(frame) < _MANIFEST.size:
        raise RequestError(
            Code.BAD_MESSAGE,
            f"the header frame of a TOKEN has {len(frame)} bytes; it must have a manifest",
        )
    _, _, _, n, f, d = _MANIFEST.unpack_from(frame)
    size = _MANIFEST.size + 8 * (n + f + d)
    if len(frame) != size:
        raise RequestError(
            Code.BAD_MESSAGE,
            f"the manifest frame has {len(frame)} bytes; expected {size} for {n}+{f}+{d} ids",
        )
    ids = struct.unpack_from(f"<{n + f + d}Q", frame, _MANIFEST.size)
    return Manifest(ids[:n], ids[n : n + f], ids[n + f :])
