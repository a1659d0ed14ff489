"""The entries that live streams have sent, for clients that attach again and for saved buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

import numpy as np

from ....protocol.columns import plain_entry
from ....protocol.messages import Token
from .recipients import Columns
from .streams import SentRows, Stream

SORTED_AFTER = 64
"""Number of steps whose columns are stored before their rows are sorted by stream."""

_ROW = np.dtype(
    [("message", "<u8"), ("token", "<u4"), ("pos", "<u4"), ("logprob", "<f8"), ("seq", "<u4")]
)


class History:
    """Stores the sent entries. ``find`` returns the stream of a request, or None if its entries are
    not stored.

    A row of columns takes 28 bytes and, apart from its text, no Python object of its own. Columns
    are stored step by step. Every ``SORTED_AFTER`` steps, their rows are sorted by request in one
    pass.
    """

    def __init__(self, find: Callable[[int], Stream | None]) -> None:
        self._find = find
        self._messages = 0
        self._steps: list[tuple[int, Columns]] = []

    def add(
        self,
        entries: list[tuple[Stream, list[Token]]],
        columns: Columns | None = None,
    ) -> None:
        """Stores the contents of one message. A stream has either entries or rows in a message, not
        both."""
        self._messages += 1
        for stream, new in entries:
            stream.entries.append((self._messages, new))
        if columns is not None:
            self._steps.append((self._messages, columns))
            if len(self._steps) >= SORTED_AFTER:
                self.sort()

    def of(self, stream: Stream) -> list[Token]:
        """All entries of a stream, in the order in which they were sent."""
        self.sort()
        found = [(message, entry) for message, entries in stream.entries for entry in entries]
        for rows, texts in stream.rows:
            numbers = rows.tolist()
            for of_row, text in zip(numbers, texts or [None] * len(numbers), strict=True):
                message, token, pos, logprob, seq = of_row
                entry = plain_entry(stream.stream_id, token, logprob, pos, seq, text)
                found.append((message, entry))
        found.sort(key=itemgetter(0))
        return [entry for _, entry in found]

    def sort(self) -> None:
        """Moves the rows of the last steps to their streams, and drops the rows of other requests.

        Call it after a stream is dropped, so that a new stream of the same request does not get its
        rows.
        """
        steps, self._steps = self._steps, []
        if not steps:
            return
        requests = np.concatenate([columns.recipients.requests for _, columns in steps])
        order = np.argsort(requests, kind="stable")
        requests = requests[order]
        rows = np.empty(len(requests), _ROW)
        sizes = [len(columns.tokens) for _, columns in steps]
        rows["message"] = np.repeat([message for message, _ in steps], sizes)[order]
        rows["token"] = np.concatenate([columns.tokens for _, columns in steps])[order]
        rows["pos"] = np.concatenate([columns.positions for _, columns in steps])[order]
        rows["logprob"] = np.concatenate([columns.logprobs for _, columns in steps])[order]
        rows["seq"] = np.concatenate([columns.recipients.seqs for _, columns in steps])[order]
        texts = _texts([columns for _, columns in steps], order)
        ends = [*(np.flatnonzero(requests[1:] != requests[:-1]) + 1).tolist(), len(requests)]
        first = 0
        for end in ends:
            stream = self._find(int(requests[first]))
            if stream is not None:
                # A view would keep the rows of all streams in memory.
                of_stream = texts[first:end] if texts is not None else None
                if of_stream is not None and not any(text is not None for text in of_stream):
                    of_stream = None
                stream.rows.append(SentRows(rows[first:end].copy(), of_stream))
            first = end


def _texts(steps: Sequence[Columns], order: np.ndarray) -> list[str | None] | None:
    """The texts of the rows of all steps, in this order; None if no row has text."""
    if all(columns.texts is None for columns in steps):
        return None
    texts: list[str | None] = []
    for columns in steps:
        texts += columns.texts or [None] * len(columns.tokens)
    return [texts[row] for row in order.tolist()]
