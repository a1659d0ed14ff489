"""Stores the TOKEN bodies of a session in chunks, and reads entries from the chunks. A chunk has no
overhead for each body."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import msgspec

from ..protocol.bodies import Encoding, decode_as, encode_body
from ..protocol.columns import TokenBody, TokenColumns, plain_entry, unpack_columns
from ..protocol.decoders import json_decoder, msgpack_decoder
from ..protocol.errors import Code, RequestError
from ..protocol.messages import Token

CHUNK_BYTES = 64 * 1024
"""A chunk that has reached this size gets no further bodies."""
PART_BYTES = 4096
"""If an element of ``Chunk.parts`` has reached this size, no further bodies are joined to it."""
NUMBER_BYTES = 8
"""Size of an element of ``Chunk.numbers``, in bytes."""
LARGE_BYTES = 512
"""Bodies whose average size is more than this number of bytes are not joined."""
MSGPACK = b"\x80"
"""The first byte of a body in msgpack is at least this byte. The first byte of a body in JSON is
smaller."""
_LISTS = b"\xdc\xdd"
"""The first bytes of lists of at least 16 elements, in msgpack."""
_BODIES = msgpack_decoder(list[TokenBody])
_LINES = json_decoder(list[Token])


@dataclass(slots=True)
class Chunk:
    """Bodies in one encoding, concatenated. In JSON, each body is a line."""

    encoding: Encoding
    numbers: array[int] = field(default_factory=partial(array, "Q"))
    """The number of the message of each body (``recent.py``)."""
    size: int = 0
    """Bytes of all bodies and numbers."""
    parts: list[bytes] = field(default_factory=list)

    def add(self, bodies: list[bytes], numbers: list[int]) -> None:
        """Adds bodies. Small bodies are joined, because each Python object has an overhead of 41
        bytes. Large bodies are not copied, because a copy takes longer than the rest of the
        routing."""
        size = sum(map(len, bodies))
        if self.encoding == "json":
            self.parts.append(b"\n".join([*bodies, b""]))
            size += len(bodies)
        elif size > LARGE_BYTES * len(bodies):
            self.parts += bodies
        elif self.parts and len(self.parts[-1]) < PART_BYTES:
            self.parts[-1] = b"".join([self.parts[-1], *bodies])
        else:
            self.parts.append(b"".join(bodies))
        self.numbers.extend(numbers)
        self.size += size + NUMBER_BYTES * len(bodies)

    def bodies(self) -> Iterable[TokenBody]:
        if self.encoding == "json":
            lines: list[Any] = _LINES.decode_lines(b"".join(self.parts))
            return lines
        # An array in msgpack is a header with the number of elements, and then the elements.
        header = b"\xdd" + len(self.numbers).to_bytes(4, "big")
        return _BODIES.decode(b"".join([header, *self.parts]))


@dataclass(slots=True)
class Place:
    """The place in a session's log at which the entries of a request begin."""

    stream_id: int
    size: int
    """Bytes that the request adds to the log's size in addition to its bodies, for example its
    frames."""
    first: int
    """Number of the first message that may have entries of the request."""
    segment: int
    """The segment of ``Recent`` in which the request began."""
    again: list[tuple[int, int]] | None = None
    """After an ATTACH, the worker sends some entries again. The list has a pair for each ATTACH:
    the number of the first message after the worker's answer, and the number of the first repeated
    entry. A pair is removed if a later ATTACH repeats all of its entries, so both numbers
    ascend."""


class Routed:
    """Selects the entries of a request while bodies are read."""

    def __init__(self, request: int, place: Place) -> None:
        self._request = request
        self.first = place.first
        self._again = [*(place.again or ()), (1 << 62, 1 << 62)]
        """``Place.again``, followed by a sentinel with a message number that no body has."""
        limits = accumulate((received for _, received in reversed(self._again)), min)
        self._limits = list(limits)[::-1]
        """For each pair in ``_again``: the smallest entry number of this pair and all later pairs.
        Entries from this number on are repeated in later bodies."""
        self._at = 0
        self._length = 0
        """The entry number of the next entry that is read."""

    def add(self, number: int, entry: Token, found: list[tuple[int, Token]]) -> None:
        """Adds an entry of the body with this number to ``found``, unless the entry is sent again
        in a later body."""
        if number < self.first:
            return
        while self._again[self._at][0] <= number:
            self._length = min(self._length, self._again[self._at][1])
            self._at += 1
        if self._length < self._limits[self._at]:
            found.append((self._request, entry))
        self._length += 1


def divided(sent: bytes) -> Iterator[bytes]:
    """Divides a large list of entries in msgpack, so that it can be read in parts. Columns are not
    divided."""
    if len(sent) <= CHUNK_BYTES or sent[0] not in _LISTS:
        yield sent
        return
    entries = decode_as(list[msgspec.Raw], sent, "msgpack")
    first = size = 0
    for end, entry in enumerate(entries, 1):
        size += len(entry)
        if size >= CHUNK_BYTES or end == len(entries):
            yield encode_body(entries[first:end], "msgpack")
            first, size = end, 0


def chunk_encoding(body: bytes) -> Encoding:
    return "json" if body[:1] < MSGPACK else "msgpack"


def read(chunk: Chunk, routed: dict[int, Routed]) -> list[tuple[int, Token]]:
    """The entries of a chunk, each with its request. ``routed``: the requests by stream."""
    try:
        bodies = list(chunk.bodies())
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(
            Code.BAD_MESSAGE, f"a TOKEN body that was routed cannot be decoded: {error}"
        ) from None
    found: list[tuple[int, Token]] = []
    for number, body in zip(chunk.numbers, bodies, strict=False):
        for entry in _entries_of(body, routed):
            routed[entry.stream_id].add(number, entry, found)
    return found


def _entries_of(body: TokenBody, streams: Iterable[int]) -> Iterator[Token]:
    """The entries of a body that belong to these streams."""
    if isinstance(body, TokenColumns):
        for row in zip(*unpack_columns(body), strict=True):
            if row[0] in streams:
                yield plain_entry(*row)
        body = body.entries
    for entry in body:
        if entry.stream_id in streams:
            yield entry
