"""The entries of a stream that has ended, divided into pieces, so that a large stream can be
decoded piece by piece."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice

import msgspec

from ..protocol.bodies import decode_as
from ..protocol.columns import TokenColumns, plain_entry, unpack_columns
from ..protocol.messages import Token

PIECE_BYTES = 128 * 1024
"""A piece that has reached this size gets no further entries."""
ROWS_AT_ONCE = 2048
"""Number of rows of columns that ``split`` adds between two yields."""
_encode_into = msgspec.msgpack.Encoder().encode_into


class _Piece(msgspec.Struct):
    """Consecutive entries in msgpack, concatenated."""

    first: int
    """The number of the piece's first entry, in the stream."""
    count: int = 0
    body: bytearray = msgspec.field(default_factory=bytearray)

    def entries(self) -> list[Token]:
        # In msgpack, an array is a header with its length and then the objects.
        header = b"\xdd" + self.count.to_bytes(4, "big")
        entries: list[Token] = decode_as(list[Token], b"".join([header, self.body]), "msgpack")
        return entries


class Pieces:
    """The entries of one stream, in order."""

    __slots__ = ("_pieces", "count", "size")

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self.count = 0
        """Number of entries."""
        self.size = 0
        """Bytes of all entries."""

    def add(self, entry: Token | msgspec.Raw) -> None:
        """Adds an entry, which may be encoded in msgpack already."""
        if not self._pieces or len(self._pieces[-1].body) >= PIECE_BYTES:
            self._pieces.append(_Piece(self.count))
        piece = self._pieces[-1]
        before = len(piece.body)
        _encode_into(entry, piece.body, -1)
        piece.count += 1
        self.count += 1
        self.size += len(piece.body) - before

    def split(self, sent: bytes) -> Iterator[int]:
        """Adds the entries of a body of TOKEN in msgpack. Yields the bytes of each part that was
        added, so that the caller can continue later. Raises RequestError if the body is malformed.
        """
        others: list[msgspec.Raw]
        if sent[0] & 0xF0 == 0x80 or sent[0] in (0xDE, 0xDF):
            fields = decode_as(dict[str, msgspec.Raw], sent, "msgpack")
            encoded = bytes(fields.pop("e", b"\x90"))
            columns = decode_as(TokenColumns, msgspec.msgpack.encode(fields), "msgpack")
            rows = zip(*unpack_columns(columns), strict=True)
            while part := list(islice(rows, ROWS_AT_ONCE)):
                before = self.size
                for row in part:
                    self.add(plain_entry(*row))
                yield self.size - before
            others = decode_as(list[msgspec.Raw], encoded, "msgpack")
        else:
            others = decode_as(list[msgspec.Raw], sent, "msgpack")
        paused_at = self.size
        for entry in others:
            self.add(entry)
            if self.size - paused_at >= PIECE_BYTES:
                yield self.size - paused_at
                paused_at = self.size

    def part(self, number: int, most: int) -> tuple[list[Token], int]:
        """Decodes pieces from the entry ``number`` on, until ``most`` bytes or all pieces are
        decoded. Returns the entries from ``number`` on, and the number of decoded bytes. Raises
        RequestError if an entry is malformed."""
        found: list[Token] = []
        if number >= self.count:
            return found, 0
        decoded = 0
        at = bisect_right(self._pieces, number, key=lambda piece: piece.first) - 1
        for piece in islice(self._pieces, at, None):
            found += piece.entries()[max(0, number - piece.first) :]
            decoded += len(piece.body)
            if decoded >= most:
                break
        return found, decoded
