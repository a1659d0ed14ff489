"""The clients that receive the rows of a batch, computed once per batch instead of once per
step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from ....protocol.bodies import encode_body
from ....protocol.columns import TokenColumns as ColumnsBody
from ....protocol.columns import plain_entry
from ....protocol.header import encode_token_header
from ....protocol.messages import Token
from ..engine.sequence import Sequence, TokenColumns
from .streams import BySession, Form, Frames, Stream, entry_bodies


@dataclass(slots=True)
class _Part:
    """The consecutive rows of one session: ``first`` to ``end``.

    Rows from ``entries`` on have text, which the client accepts only in entries.
    """

    link: int
    session: int
    form: Form
    first: int
    entries: int
    end: int
    streams: bytes
    seqs: bytes
    texts: bool
    """Whether any row before ``entries`` has text."""


@dataclass(slots=True)
class Columns:
    """The rows of a step that have recipients, ordered by session, as they are sent and stored."""

    recipients: Recipients
    tokens: np.ndarray
    """u32."""
    logprobs: np.ndarray
    """float64."""
    positions: np.ndarray
    """u32."""
    texts: list[str | None] | None
    """The text of each row; None if no row has text."""


class Recipients:
    """The streams of a batch's rows. Row i of a step belongs to ``sequences[i]``. A row without a
    stream has no recipient.

    The tokens of all streams are counted together. ``settle`` adds them to the counters of each
    stream; call it before reading these counters.
    """

    def __init__(self, sequences: list[Sequence], streams: Iterable[Stream | None]) -> None:
        self.sequences: list[Sequence] | None = sequences
        """The sequences of the rows; None if the recipients are used for one step only."""
        by_session: dict[tuple[int, int, Form], list[tuple[int, Stream]]] = {}
        counts: dict[Stream, int] = {}
        for row, stream in enumerate(streams):
            if stream is not None:
                # ``stream.form`` would be slower, and this runs for each row of each batch that has
                # changed.
                form: Form = "columns" if stream.columns else stream.encoding
                key = stream.link, stream.session, form
                rows = by_session.get(key)
                if rows is None:
                    by_session[key] = [(row, stream)]
                else:
                    rows.append((row, stream))
                counts[stream] = counts.get(stream, 0) + 1
        self.streams = counts
        """Each stream with its number of rows."""
        in_entries = [_in_entries(rows, sequences) for rows in by_session.values()]
        ordered = [row for rows in by_session.values() for row in rows]
        order = [row for row, _ in ordered]
        as_given = order == list(range(len(sequences)))
        self._order = None if as_given else np.array(order, dtype=np.intp)
        self.requests = np.array([stream.request for _, stream in ordered], dtype="<u8")
        """The request of each row that has a recipient."""
        self.seqs = np.array([sequences[row].seq for row in order], dtype="<u4")
        with_text = [sequences[row].with_text for row in order]
        self._ids = np.array([stream.stream_id for _, stream in ordered], dtype="<u8")
        ids, seqs = self._ids.tobytes(), self.seqs.tobytes() if self.seqs.any() else b""
        self._parts: dict[int, list[_Part]] = {}
        first = 0
        for ((link, session, form), rows), others in zip(
            by_session.items(), in_entries, strict=True
        ):
            end = first + len(rows)
            entries = end - others
            of_it = seqs[4 * first : 4 * entries]
            if not any(of_it):
                of_it = b""
            of_ids = ids[8 * first : 8 * entries]
            texts = any(with_text[first:entries])
            part = _Part(link, session, form, first, entries, end, of_ids, of_it, texts)
            self._parts.setdefault(link, []).append(part)
            first = end
        self._heads = {
            link: encode_token_header([part.session for part in parts])
            for link, parts in self._parts.items()
        }
        self._steps = 0
        self.sent_at = math.nan
        """The time at which the streams last received tokens, by ``time.monotonic``, in seconds."""

    def columns(self, rows: TokenColumns) -> Columns:
        """The rows of a step that have recipients. The arrays are copied, because they are
        stored."""
        tokens, logprobs, positions, texts = rows.tokens, rows.logprobs, rows.positions, rows.texts
        order = self._order
        if order is not None:
            tokens, logprobs, positions = tokens[order], logprobs[order], positions[order]
            if texts is not None:
                texts = [texts[row] for row in order.tolist()]
        u32 = tokens.astype("<u4"), positions.astype("<u4")
        return Columns(self, u32[0], logprobs.astype("<f8"), u32[1], texts)

    @property
    def links(self) -> Collection[int]:
        """The links to the brokers of these streams."""
        return self._parts.keys()

    def frames(
        self, columns: Columns, entries: BySession, finished: list[int], link: int = 0
    ) -> Frames:
        """The ``TOKEN`` of a step for one link: the rows of its sessions, and their entries, which
        are removed from ``entries``."""
        tokens, logprobs = columns.tokens.tobytes(), columns.logprobs.tobytes()
        positions = columns.positions.tobytes()
        bodies = []
        parts = self._parts[link]
        for part in parts:
            first, end, form = part.first, part.entries, part.form
            beside = entries.pop((part.session, form), []) if entries else []
            if form == "columns":
                if end < part.end:
                    beside = self.entries(columns, end, part.end) + beside
                body = ColumnsBody(
                    streams=part.streams,
                    tokens=tokens[4 * first : 4 * end],
                    logprobs=logprobs[8 * first : 8 * end],
                    positions=positions[4 * first : 4 * end],
                    seqs=part.seqs,
                    entries=beside,
                )
                if part.texts and columns.texts is not None:
                    body.texts = columns.texts[first:end]
                bodies.append(encode_body(body, "msgpack"))
            else:
                bodies.append(encode_body(self.entries(columns, first, end) + beside, form))
        if not entries and not finished:
            return [b"TOKEN", self._heads[link], *bodies]
        sessions = [part.session for part in parts] + [session for session, _ in entries]
        return [b"TOKEN", encode_token_header(sessions, finished), *bodies, *entry_bodies(entries)]

    def entries(self, columns: Columns, first: int, end: int) -> list[Token]:
        """The rows from ``first`` to ``end`` as entries."""
        rows = zip(
            self._ids[first:end].tolist(),
            columns.tokens[first:end].tolist(),
            columns.logprobs[first:end].tolist(),
            columns.positions[first:end].tolist(),
            self.seqs[first:end].tolist(),
            columns.texts[first:end] if columns.texts is not None else [None] * (end - first),
            strict=True,
        )
        return [plain_entry(*row) for row in rows]

    def sent(self, now: float) -> None:
        """Counts one more token for each row."""
        self._steps += 1
        self.sent_at = now

    def settle(self) -> None:
        """Adds the counted tokens to the streams."""
        steps, self._steps = self._steps, 0
        if steps:
            for stream, rows in self.streams.items():
                stream.num_tokens += steps * rows
                stream.sent_at = self.sent_at


def _in_entries(rows: list[tuple[int, Stream]], sequences: list[Sequence]) -> int:
    """Moves the rows of a session whose text the client accepts only in entries to the end. Returns
    the number of moved rows."""

    def in_entries(row: tuple[int, Stream]) -> bool:
        place, stream = row
        return stream.columns and sequences[place].with_text and not stream.texts

    if not rows[0][1].columns or not any(map(in_entries, rows)):
        return 0
    rows.sort(key=in_entries)
    return sum(map(in_entries, rows))
