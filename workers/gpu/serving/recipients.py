"""The clients that receive the rows of a batch. They are computed when the batch changes, and not
in each step. A row is a plain token of a step (``engine.sequence.TokenColumns``)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import compress
from operator import iadd
from typing import NamedTuple

import numpy as np

from ....protocol.columns import TokenColumns as ColumnsBody
from ....protocol.columns import plain_entry, row_columns
from ....protocol.messages import Token
from ..engine.sequence import Sequence, TokenColumns
from ..sampling.candidates import Candidate, candidate_columns
from .streams import ROW, ROWS, Form, Stream, TokenMessage

MAX_STEPS = 16
"""Maximum number of steps whose rows are added to the streams in one pass (``settle``)."""


class _Part(NamedTuple):
    """The consecutive rows ``[first, end)`` of one session."""

    link: int
    session: int
    form: Form
    first: int
    end: int
    body: ColumnsBody | None
    """The rows in columns; None if the rows are sent as entries. Each step replaces all columns
    except those of stream ids and sequence numbers."""
    texts: bool
    """Whether any row has text."""
    candidates: bool
    """Whether any row reports the distribution from which its token was drawn."""


class Recipients:
    """The streams of a batch's rows. Row i of a step belongs to ``sequences[i]``. A row without a
    stream has no recipient."""

    def __init__(self, sequences: list[Sequence], streams: Iterable[Stream | None]) -> None:
        self.sequences = sequences
        self.sent_at = math.nan
        """The time at which the last step was sent, by ``time.monotonic``, in seconds."""
        by_session: dict[tuple[int, int, Form, bool], list[tuple[int, Stream]]] = {}
        for row, (sequence, stream) in enumerate(zip(sequences, streams, strict=True)):
            if stream is not None:
                # This is the value of ``stream.form``. Reading the property would be slower in this
                # loop over all rows.
                form: Form = "columns" if stream.columns else stream.encoding
                in_columns = stream.columns and (stream.texts or not sequence.with_text)
                key = stream.link, stream.session, form, in_columns
                by_session.setdefault(key, []).append((row, stream))
        ordered = [row for rows in by_session.values() for row in rows]
        order = [row for row, _ in ordered]
        self._order = None if order == list(range(len(sequences))) else np.array(order, np.intp)
        self._streams = [stream for _, stream in ordered]
        self.streams = dict.fromkeys(self._streams)
        """The streams that have rows, each once."""
        self._ids = [stream.stream_id for stream in self._streams]
        self._seqs = [sequences[row].seq for row in order]
        # If a stream has several rows, rows are added to the streams in each step. This keeps the
        # entries of the stream in order.
        max_steps = MAX_STEPS if len(self.streams) == len(order) else 1
        self._block = np.zeros((max_steps, len(order)), ROWS).T
        """The rows that have not been added to the streams, ``[rows, steps]``, ordered by
        session."""
        self._block["seq"].T[:] = self._seqs
        self._steps = 0
        """Number of steps in ``_block``."""
        self._rows = self._block[:, 0]
        """The rows of the current step."""
        self._sent = [stream.rows for stream in self._streams]
        self._texts: list[str | None] = [None] * len(order)
        self._with_text = [sequences[row].with_text for row in order]
        self._sent_texts = [s.row_texts for s in compress(self._streams, self._with_text)]
        self._candidates = [Candidate()] * len(order)
        reporting = [sequences[row].reports_candidates for row in order]
        self._reporting = reporting if any(reporting) else []
        self._sent_candidates = [s.row_candidates for s in compress(self._streams, reporting)]
        self._parts: list[_Part] = []
        first = 0
        for (link, session, form, in_columns), rows in by_session.items():
            end = first + len(rows)
            body = row_columns(self._ids[first:end], self._seqs[first:end]) if in_columns else None
            texts = any(self._with_text[first:end])
            reports = any(reporting[first:end])
            self._parts.append(_Part(link, session, form, first, end, body, texts, reports))
            first = end

    def take(self, columns: TokenColumns) -> None:
        """Takes the rows of the next step. The caller first sets ``sent_at`` to the time of the
        step."""
        if self._steps == self._block.shape[1]:
            self.settle()
        rows = self._rows = self._block[:, self._steps]
        self._steps += 1
        order, texts = self._order, columns.texts
        if order is None:
            rows["token"], rows["logprob"] = columns.tokens, columns.logprobs
            rows["pos"] = columns.positions
        else:
            rows["token"], rows["logprob"] = columns.tokens[order], columns.logprobs[order]
            rows["pos"] = columns.positions[order]
        if self._sent_texts:
            assert texts is not None
            self._texts = texts if order is None else [texts[row] for row in order.tolist()]
            own = compress(self._texts, self._with_text)
            deque(map(list.append, self._sent_texts, own), maxlen=0)
        if self._reporting:
            self._take_candidates(columns.candidates)

    def _take_candidates(self, candidates: list[Candidate | None] | None) -> None:
        """Takes and stores the distributions of the next step's rows."""
        assert candidates is not None
        ordered = range(len(candidates)) if self._order is None else self._order.tolist()
        self._candidates = [candidates[row] or Candidate() for row in ordered]
        own = compress(self._candidates, self._reporting)
        deque(map(list.append, self._sent_candidates, own), maxlen=0)
        for stream, candidate in zip(self._streams, self._candidates, strict=True):
            if isinstance(candidate.kept, bytes):
                stream.id_bytes += len(candidate.kept)

    @property
    def reporting(self) -> list[Stream]:
        """The streams with rows that report the distribution of their token, each once."""
        return list(dict.fromkeys(compress(self._streams, self._reporting)))

    def settle(self) -> None:
        """Adds the rows of the last steps to the streams, with the time of the last step. Must be
        called before the rows of the streams are read, and before other entries of the streams are
        stored."""
        steps, self._steps = self._steps, 0
        if steps:
            rows = np.ascontiguousarray(self._block[:, :steps]).view((np.void, steps * ROW.size))
            # ``deque`` runs the loop over the rows in C.
            deque(map(iadd, self._sent, rows[:, 0].tolist()), maxlen=0)
            for stream in self.streams:
                stream.sent_at = self.sent_at

    def add_to(self, messages: Mapping[int, TokenMessage]) -> None:
        """Adds the rows of the current step to the messages for the links of their brokers."""
        rows = self._rows
        tokens, logprobs = rows["token"].tobytes(), rows["logprob"].tobytes()
        positions = rows["pos"].tobytes()
        for link, session, form, first, end, body, texts, candidates in self._parts:
            if body is None:
                messages[link].add(session, form, self._entries(first, end))
                continue
            body.tokens = tokens[4 * first : 4 * end]
            body.logprobs = logprobs[8 * first : 8 * end]
            body.positions = positions[4 * first : 4 * end]
            if texts:
                body.texts = self._texts[first:end]
            if candidates:
                found = self._candidates[first:end]
                body.processed, body.kept = candidate_columns(found)
            messages[link].columns[session] = body

    def entries(self) -> dict[Stream, list[Token]]:
        """The rows of the current step as entries of their streams."""
        found: dict[Stream, list[Token]] = {}
        for stream, entry in zip(self._streams, self._entries(0, len(self._ids)), strict=True):
            found.setdefault(stream, []).append(entry)
        return found

    def _entries(self, first: int, end: int) -> list[Token]:
        rows = self._rows[first:end]
        columns = [rows[name].tolist() for name in ("token", "logprob", "pos")]
        ids, seqs, texts = self._ids[first:end], self._seqs[first:end], self._texts[first:end]
        found = self._candidates[first:end]
        processed, kept = [c.processed for c in found], [c.kept for c in found]
        return list(map(plain_entry, ids, *columns, seqs, texts, processed, kept))
