"""The journal of a session: the TOKEN bodies that were routed for it, stored without decoding them.

Another worker can continue a stream from its request and these bodies. The broker decodes the
bodies only if it needs their entries: for a move, for an ATTACH, or to judge a suspect
(``quarantine.py``).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import msgspec

from ..protocol.bodies import Encoding, decode_as, encode_body
from ..protocol.columns import TokenBody, TokenColumns, plain_entry, unpack_columns
from ..protocol.errors import Code, RequestError
from ..protocol.messages import Token
from .recent import BODIES_AT_ONCE, Recent

CHUNK_BYTES = 64 * 1024
"""A chunk that has reached this size gets no further bodies."""
PART_BYTES = 4096
"""A part of a chunk that has reached this size gets no further bodies."""
AGAIN_BYTES = 100
"""Bytes that are counted for each element of ``_Place.again``."""
NUMBER_BYTES = 8
"""Bytes of the number of a body."""
LARGE_BYTES = 512
"""Bodies whose average size is more than this number of bytes are not joined."""
_MSGPACK = b"\x80"
"""The first byte of a body in msgpack is at least this byte. The first byte of a body in JSON is
smaller."""
_LISTS = b"\xdc\xdd"
"""The first bytes of lists of at least 16 elements, in msgpack."""
_BODIES = msgspec.msgpack.Decoder(list[TokenBody])
_LINES = msgspec.json.Decoder(list[Token])


@dataclass(slots=True)
class _Chunk:
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
        # In msgpack, an array is a header with its length and then the objects.
        header = b"\xdd" + len(self.numbers).to_bytes(4, "big")
        return _BODIES.decode(b"".join([header, *self.parts]))


@dataclass(slots=True)
class _Place:
    """The place in a session's journal at which the entries of a request begin."""

    stream_id: int
    size: int
    """Bytes that count for the request in addition to its bodies, such as its frames, as long as
    the request is in the journal."""
    first: int
    """Number of the first message that may have entries of the request."""
    segment: int
    """The segment of ``Recent`` in which the request began."""
    again: list[tuple[int, int]] | None = None
    """After an ATTACH, the worker sends entries again. For each ATTACH: the number of the first
    message after the worker's answer, and the number of the first entry that is sent again."""


class Journal:
    """The bodies of one session, as long as a request that the journal stores may have entries in
    them.

    Routed messages are first stored in ``recent``, which later adds to ``tail`` the bodies that
    this journal needs. ``pack`` moves the bodies from ``tail`` into chunks, which have no overhead
    per body.
    """

    __slots__ = ("_begun", "_chunks", "_recent", "first", "numbers", "session", "size", "tail")

    def __init__(self, recent: Recent, session: int) -> None:
        self._recent = recent
        self.session = session
        self.tail: list[bytes] = []
        """Bodies that are not packed yet. Empty except while ``recent`` distributes bodies."""
        self.numbers: list[int] = []
        """The number of the message of each body in ``tail``."""
        self._chunks: deque[_Chunk] = deque()
        self._begun: dict[int, _Place] = {}
        """The place of each request that is in this journal, in the order of the places."""
        self.first = 0
        """Number of the first message that the requests of this journal need."""
        self.size = 0
        """Bytes that the journal stores, including the frames of its requests but not the bodies in
        ``recent``."""

    @property
    def oldest(self) -> int | None:
        """The id of the request that began first; None if the journal has no requests."""
        return next(iter(self._begun), None)

    def begin(self, request: int, stream_id: int, size: int, sent: bytes = b"") -> None:
        """Adds a request that is sent to a worker, or an end that is stored. ``size``: bytes of the
        request's frames, or of the end, which count as long as the request is in this journal.

        ``sent``: the entries of a moved request that were routed so far, as a body of TOKEN.
        """
        self.end(request)
        first = self._recent.next
        if not self._begun:
            self.first = first
        self._begun[request] = _Place(stream_id, size, first, self._recent.begin(self))
        self._grow(size)
        if sent:
            for body in _divided(sent):
                self.append(body)

    def append(self, body: bytes) -> None:
        """Adds a body that the broker itself has made and routed."""
        self._recent.keep((self.session,), (body,))

    def repeats(self, request: int, received: int) -> None:
        """Notes that the worker of a request sends entries of the request again, from the number
        ``received`` on."""
        place = self._begun.get(request)
        if place is not None:
            place.again = [*(place.again or ()), (self._recent.next, received)]
            place.size += AGAIN_BYTES
            self._grow(AGAIN_BYTES)

    def has(self, request: int) -> bool:
        """Whether the entries of a request are in this journal."""
        return request in self._begun

    def stream_of(self, request: int) -> int:
        """The stream of a request that is in this journal."""
        return self._begun[request].stream_id

    def finish(self, request: int, size: int) -> None:
        """Handles the end of a request whose entries stay until ``end`` is called. From now on,
        ``size`` bytes count instead of the request's frames."""
        place = self._begun[request]
        self._grow(size - place.size)
        place.size = size

    def end(self, request: int) -> None:
        """Removes a request that has ended, or cannot move any more. Drops bodies that no other
        request needs."""
        place = self._begun.pop(request, None)
        if place is None:
            return
        self._grow(-place.size)
        if place.first == self.first:
            oldest = next(iter(self._begun.values()), None)
            self.first = oldest.first if oldest is not None else self._recent.next
            while self._chunks and self._chunks[0].numbers[-1] < self.first:
                self._grow(-self._chunks.popleft().size)
        self._recent.end(self, place.segment)

    def _grow(self, by: int) -> None:
        self.size += by
        self._recent.grew(self, by)

    def pack(self) -> None:
        """Moves the bodies in ``tail`` into chunks."""
        bodies, numbers = self.tail, self.numbers
        self.tail, self.numbers = [], []
        if min(bodies) >= _MSGPACK and sum(map(len, bodies)) < CHUNK_BYTES:
            self._pack(bodies, numbers, "msgpack")
            return
        first = size = 0
        for end, body in enumerate(bodies, 1):
            size += len(body)
            encoding = _encoding_of(body)
            if size >= CHUNK_BYTES or end == len(bodies) or _encoding_of(bodies[end]) != encoding:
                self._pack(bodies[first:end], numbers[first:end], encoding)
                first, size = end, 0

    def _pack(self, bodies: list[bytes], numbers: list[int], encoding: Encoding) -> None:
        """Adds bodies to the last chunk, or to a new chunk."""
        chunk = self._chunks[-1] if self._chunks else None
        if chunk is None or chunk.encoding != encoding or chunk.size >= CHUNK_BYTES:
            chunk = _Chunk(encoding)
            self._chunks.append(chunk)
        before = chunk.size
        chunk.add(bodies, numbers)
        self._grow(chunk.size - before)

    def entries(self, requests: Iterable[int]) -> dict[int, list[Token]]:
        """The entries that were routed for each of these requests, in order.

        Raises RequestError if a body cannot be decoded.
        """
        found: dict[int, list[Token]] = {request: [] for request in requests}
        for _, entries in self.read(found):
            for request, entry in entries:
                found[request].append(entry)
        return found

    def read(self, requests: Iterable[int]) -> Iterator[tuple[int, list[tuple[int, Token]]]]:
        """Reads the entries of requests in parts, so that the caller can continue later. Yields for
        each part the number of bytes that were read, and the entries, each with its request.

        The caller must read only requests that have ended, unless it reads all parts at once: a
        live request may get entries between two parts. Raises RequestError if a body cannot be
        decoded.
        """
        end = self._recent.next
        while self._recent.distributed < end:
            before = self._recent.size
            self._recent.distribute(BODIES_AT_ONCE)
            yield before - self._recent.size, []
        wanted = set(requests)
        routed = {
            place.stream_id: _Routed(request, place)
            for request, place in self._begun.items()
            if request in wanted
        }
        first = min((each.first for each in routed.values()), default=end)
        for chunk in list(self._chunks):
            if chunk.numbers[-1] >= first:
                yield chunk.size, _read(chunk, routed)


class _Routed:
    """Selects the entries of a request while bodies are read."""

    def __init__(self, request: int, place: _Place) -> None:
        self._request = request
        self.first = place.first
        self._again = [*(place.again or ()), (1 << 62, 1 << 62)]
        """``_Place.again``, and a last pair that no body reaches."""
        limits = accumulate((received for _, received in reversed(self._again)), min)
        self._limits = list(limits)[::-1]
        """For each pair in ``_again``: the smallest entry number of this pair and all later ones.
        Entries from this number on are sent again later."""
        self._at = 0
        self._length = 0
        """Number of entries that the client has before it receives the next one."""

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


def _divided(sent: bytes) -> Iterator[bytes]:
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


def _encoding_of(body: bytes) -> Encoding:
    return "json" if body[:1] < _MSGPACK else "msgpack"


def _read(chunk: _Chunk, routed: dict[int, _Routed]) -> list[tuple[int, Token]]:
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
