"""Encodes transcripts. A transcript has the entries of a stream that the broker has routed to the
client. Another worker continues the stream after these entries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Raw, Struct

from .bodies import decode_as, encode_body
from .columns import TokenBody, TokenColumns, column_entries, pack_columns
from .header import Flag, Header
from .messages import Token


class Transcript(Struct, kw_only=True, omit_defaults=True):
    """The transcript of a stream that moves to another worker. The last attachment of a request
    with ``Flag.MOVED`` is a ``Transcript`` in msgpack.

    The new worker continues the stream after these entries, so the client receives each entry once.
    """

    sent: TokenBody
    """All TOKEN entries of the stream that were routed to its client, in order."""
    left: str = ""
    """The name of the worker that ran the stream before the move."""
    why: str = ""
    """The reason for the move."""
    pause_s: float = 0.0
    """Seconds since the stream lost its worker."""
    moves: int = 1
    """How often the stream has moved, including this move (``Journal.moves``)."""

    @property
    def entries(self) -> list[Token]:
        """The sent tokens as entries; raises RequestError if their columns are malformed."""
        return column_entries(self.sent) if isinstance(self.sent, TokenColumns) else self.sent


def encode_transcript(
    entries: Iterable[Token], left: str = "", why: str = "", pause_s: float = 0.0, moves: int = 1
) -> bytes:
    """Encodes the ``Transcript`` of a stream with these entries."""
    sent = pack_columns(entries, texts=True)
    transcript = Transcript(sent=sent, left=left, why=why, pause_s=pause_s, moves=moves)
    return encode_body(transcript, "msgpack")


class _Encoded(Struct, kw_only=True, omit_defaults=True):
    """A ``Transcript`` whose entries are already encoded."""

    sent: Raw
    left: str = ""
    why: str = ""
    pause_s: float = 0.0
    moves: int = 1


def transcript_of(sent: bytes, left: str, why: str, pause_s: float, moves: int) -> bytes:
    """Encodes a ``Transcript`` from entries that are already encoded. ``sent``: the stream's
    entries, as a body of TOKEN in msgpack; empty if the stream has no entries."""
    entries = Raw(sent or b"\x90")
    encoded = _Encoded(sent=entries, left=left, why=why, pause_s=pause_s, moves=moves)
    return encode_body(encoded, "msgpack")


def decode_transcript(attachment: bytes) -> Transcript:
    """Decodes an attachment; raises RequestError if it is malformed."""
    transcript: Transcript = decode_as(Transcript, attachment, "msgpack")
    return transcript


def moves_of(header: Header, attachments: Sequence[bytes]) -> int:
    """Returns how often a request has moved to another worker. ``header`` and ``attachments``:
    those of the message for the new worker. Raises RequestError if the transcript is malformed."""
    if not header.flags & Flag.MOVED or not attachments:
        return 0
    return decode_transcript(attachments[-1]).moves
