"""Encodes tokens in columns. This is a form of ``TOKEN`` for clients that have the capability
``columns``.

Most entries of a stream only have a token. In a list of entries, each entry is a map that repeats
the names of its fields. In columns, each field is one array with a value for each token. So neither
side encodes or decodes tokens one by one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from msgspec import UNSET, Struct, UnsetType

from .errors import Code, RequestError
from .messages import MAX_STREAM_ID, Token

_NAMES = {
    "streams": "s",
    "tokens": "t",
    "logprobs": "l",
    "positions": "p",
    "seqs": "q",
    "texts": "x",
    "processed": "d",
    "kept": "k",
    "entries": "e",
}
"""The names of the fields on the wire. The names are short, because the broker stores the bodies. A
body with one row and four columns has 41 bytes."""


class TokenColumns(Struct, kw_only=True, omit_defaults=True, rename=_NAMES):
    """The body of ``TOKEN`` in columns. Each row has a token of a stream. Entries that do not fit
    into a row are in ``entries``.

    The columns are little-endian. A row represents an entry with the fields ``token``,
    ``stream_id``, ``logprob``, ``pos`` and ``seq``, and possibly ``text``, ``processed`` and
    ``kept``. The entry's ``top_logprobs`` has only the entry's token. The entry has no other
    fields. In one body, either all entries of a stream are rows, or all are in ``entries``.
    """

    streams: bytes = b""
    """Stream ids, u64 each."""
    tokens: bytes = b""
    """Token ids, u32 each."""
    logprobs: bytes = b""
    """Log-probabilities, f64 each. Entries also have 64-bit floats, so a stream has the same
    log-probabilities in columns and in entries."""
    positions: bytes = b""
    """``pos`` of each row, u32 each."""
    seqs: bytes = b""
    """``seq`` of each row, u32 each; empty if all of them are 0."""
    texts: list[str | None] = []
    """``text`` of each row, or None if the row's entry has no text. The list is empty if no row has
    text. Sent only to clients that have the capability ``text_columns``."""
    processed: bytes = b""
    """``processed`` of each row, f64 each; NaN if the row's request did not ask for the field.
    Empty if no row has the field."""
    kept: list[int | bytes | None] = []
    """``kept`` of each row: ids as u32 each, or a number, or None if the row's request did not ask
    for the field. Empty if no row has the field."""
    entries: list[Token] = []
    """Entries that are not rows. If one entry of a stream cannot be a row (``is_plain``), all
    entries of the stream in this body are here."""


TokenBody = list[Token] | TokenColumns
"""The forms of a body of ``TOKEN``: a list of entries, or columns. In msgpack, the list is an array
and the columns are a map."""


Kept = int | bytes
"""``Token.kept`` in the form of a column: the number of candidates, or their ids as u32 each."""
Row = tuple[int, int, float, int, int, str | None, float | None, Kept | None]
"""A row of columns: stream id, token, logprob, pos, seq, text, processed, kept."""


class Rows(NamedTuple):
    """The unpacked columns of a body. All columns have the same length."""

    streams: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    positions: tuple[int, ...]
    seqs: tuple[int, ...]
    texts: Sequence[str | None]
    processed: Sequence[float | None]
    kept: Sequence[Kept | None]


_NEW: Callable[[type[Rows], tuple[Sequence[Any], ...]], Rows] = tuple.__new__
_T = TypeVar("_T")
_Unpack = Callable[[bytes], tuple[Any, ...]]


@lru_cache(maxsize=1024)
def _column(kind: str, rows: int) -> struct.Struct:
    return struct.Struct(f"<{rows}{kind}")


@lru_cache(maxsize=1024)
def _unpackers(rows: int) -> tuple[_Unpack, _Unpack, _Unpack]:
    """Functions that unpack columns of u64, u32 and f64; each raises struct.error if a column does
    not have ``rows`` values."""
    return _column("Q", rows).unpack, _column("I", rows).unpack, _column("d", rows).unpack


def unpack_columns(body: TokenColumns, like: Rows | None = None) -> Rows:
    """The rows of a body; raises RequestError if its columns differ in length, or a stream id is
    not valid.

    ``like``: the rows of an earlier body with the same ``streams`` and ``seqs``. These two columns
    are then not unpacked again.
    """
    rows = len(body.streams) // 8
    u64, u32, f64 = _unpackers(rows)
    try:
        if like is not None:
            streams, seqs = like.streams, like.seqs
        else:
            streams = u64(body.streams)
            seqs = u32(body.seqs) if body.seqs else (0,) * rows
        tokens, logprobs, positions = u32(body.tokens), f64(body.logprobs), u32(body.positions)
        processed = _values(f64(body.processed)) if body.processed else (None,) * rows
    except struct.error:
        columns = [body.streams, body.tokens, body.logprobs, body.positions]
        columns += [body.seqs, body.processed]
        raise RequestError(
            Code.BAD_MESSAGE,
            f"the columns of a TOKEN with {rows} rows have {tuple(map(len, columns))} bytes; "
            f"expected {(8 * rows, 4 * rows, 8 * rows, 4 * rows)}, then {4 * rows} or 0, then "
            f"{8 * rows} or 0",
        ) from None
    if like is None and rows and max(streams) > MAX_STREAM_ID:
        raise RequestError(
            Code.BAD_MESSAGE,
            f"a row of a TOKEN has the stream id {max(streams)}; stream ids are at most "
            f"{MAX_STREAM_ID}",
        )
    texts = _listed("texts", body.texts, rows)
    kept = _listed("kept", body.kept, rows)
    # The constructor of a named tuple would take as long as unpacking three columns.
    return _NEW(Rows, (streams, tokens, logprobs, positions, seqs, texts, processed, kept))


def _listed(name: str, values: Sequence[_T | None], rows: int) -> Sequence[_T | None]:
    """Returns the ``rows`` values of a column that is a list. An empty list stands for the value
    None in each row. Raises RequestError if the list has another length."""
    if values and len(values) != rows:
        raise RequestError(
            Code.BAD_MESSAGE,
            f"the columns of a TOKEN have {len(values)} {name}; expected {rows}, one for each row, "
            "or none",
        )
    return values or (None,) * rows


def _values(column: Iterable[float]) -> tuple[float | None, ...]:
    """The values of a column in which NaN means that a row has no value."""
    return tuple(None if value != value else value for value in column)


def row_columns(streams: Sequence[int], seqs: Sequence[int]) -> TokenColumns:
    """A body whose rows have these stream ids and sequence numbers; the other columns are empty."""
    rows = len(streams)
    packed = _column("I", rows).pack(*seqs) if any(seqs) else b""
    return TokenColumns(streams=_column("Q", rows).pack(*streams), seqs=packed)


def pack_columns(entries: Iterable[Token], texts: bool = False) -> TokenColumns:
    """Encodes entries as columns. If all entries of a stream are plain (``is_plain``), they become
    rows. If one of them is not plain, all entries of the stream stay entries. The order within each
    stream does not change. ``texts``: whether rows may have text."""
    entries = list(entries)
    others = {entry.stream_id for entry in entries if not is_plain(entry, texts)}
    plain = [entry for entry in entries if entry.stream_id not in others]
    u32 = _column("I", len(plain))
    body = row_columns([entry.stream_id for entry in plain], [entry.seq for entry in plain])
    body.tokens = u32.pack(*(entry.token for entry in plain))
    body.logprobs = _column("d", len(plain)).pack(*(entry.logprob for entry in plain))
    body.positions = u32.pack(*(entry.pos for entry in plain))
    body.texts = _texts(plain)
    if any(entry.processed is not UNSET for entry in plain):
        values = (math.nan if e.processed is UNSET else e.processed for e in plain)
        body.processed = _column("d", len(plain)).pack(*values)
    if any(entry.kept is not UNSET for entry in plain):
        body.kept = [packed_kept(entry.kept) for entry in plain]
    body.entries = [entry for entry in entries if entry.stream_id in others]
    return body


def _texts(entries: list[Token]) -> list[str | None]:
    found = [None if entry.text is UNSET else entry.text for entry in entries]
    return found if any(text is not None for text in found) else []


def column_entries(body: TokenColumns) -> list[Token]:
    """The entries of a body: first the rows, then ``entries``. Raises RequestError as
    ``unpack_columns`` does."""
    return [*map(plain_entry, *unpack_columns(body)), *body.entries]


def packed_kept(kept: int | list[int] | UnsetType) -> Kept | None:
    """Converts a ``Token.kept`` to a value of the column ``kept``."""
    if isinstance(kept, list):
        return _column("I", len(kept)).pack(*kept)
    return None if kept is UNSET else kept


def kept_of(kept: Kept) -> int | list[int]:
    """Converts a value of the column ``kept`` to ``Token.kept``. Raises RequestError if the value
    has bytes that are not a list of u32."""
    if isinstance(kept, int):
        return kept
    if len(kept) % 4:
        raise RequestError(
            Code.BAD_MESSAGE, f"kept of a row has {len(kept)} bytes; expected a multiple of 4"
        )
    return list(_column("I", len(kept) // 4).unpack(kept))


def plain_entry(
    stream_id: int,
    token: int,
    logprob: float,
    pos: int,
    seq: int,
    text: str | None = None,
    processed: float | None = None,
    kept: Kept | None = None,
) -> Token:
    """The entry that a row represents."""
    entry = Token(
        token=token,
        stream_id=stream_id,
        logprob=logprob,
        finish_reason=None,
        top_logprobs={token: logprob},
        pos=pos,
        seq=seq,
    )
    if text is not None:
        entry.text = text
    if processed is not None:
        entry.processed = processed
    if kept is not None:
        entry.kept = kept_of(kept)
    return entry


class PlainToken(Struct, omit_defaults=True, gc=False):
    """The entry that a row represents, for a message that is only encoded. The fields are those of
    ``Token`` that a row has, in the same order. A ``Token`` has three times as many fields, and
    making and encoding one takes 16 times as long."""

    token: int
    stream_id: int
    logprob: float
    finish_reason: None
    top_logprobs: dict[int, float]
    processed: float | UnsetType = UNSET
    kept: int | list[int] | UnsetType = UNSET
    pos: int = 0
    seq: int = 0
    text: str | UnsetType = UNSET


def encodable_entry(
    stream_id: int,
    token: int,
    logprob: float,
    pos: int,
    seq: int,
    text: str | None = None,
    processed: float | None = None,
    kept: Kept | None = None,
) -> PlainToken:
    """Makes the entry that a row represents as a ``PlainToken``. The arguments are those of
    ``plain_entry``."""
    return PlainToken(
        token,
        stream_id,
        logprob,
        None,
        {token: logprob},
        UNSET if processed is None else processed,
        UNSET if kept is None else kept_of(kept),
        pos,
        seq,
        UNSET if text is None else text,
    )


def is_plain(entry: Token, texts: bool = False) -> bool:
    """Whether a row can represent an entry: the entry has a token, each of its fields has a column,
    and each value fits into its column. ``texts``: whether rows may have text."""
    token, logprob = entry.token, entry.logprob
    if token is None or logprob is None or entry.top_logprobs is UNSET:
        return False
    numbers = (token, entry.pos, entry.seq)
    if min(numbers) < 0 or max(numbers) >= 2**32:
        return False
    if isinstance(entry.kept, list) and not all(0 <= one < 2**32 for one in entry.kept):
        return False
    text = entry.text if texts and entry.text is not UNSET else None
    processed = None if entry.processed is UNSET else entry.processed
    if processed is not None and math.isnan(processed):
        return False
    row = (*numbers, text, processed, packed_kept(entry.kept))
    return entry == plain_entry(entry.stream_id, row[0], logprob, *row[1:])
