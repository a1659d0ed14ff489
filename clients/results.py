"""The results of streams: sequences, and the scores of a SCORE."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from msgspec import UNSET

from ..protocol.columns import Row, kept_of, plain_entry
from ..protocol.errors import Code, RequestTimeoutError, TokenbusError, error_for
from ..protocol.messages import ConstraintEnd, Span, Token
from .calls import Call


@dataclass(slots=True)
class GeneratedSequence:
    """One sequence of a stream: one of ``n``, or a fork that a controller made.

    A fork begins with the tokens of its parent. Both sequences may later remove some of these
    tokens. Each sequence has its own logs and storage. Nothing is removed from them.
    """

    seq: int
    parent: int | None = None
    """The number of the sequence from which this one was forked; None if it is not a fork."""
    tokens: list[int] = field(default_factory=list)
    """All tokens after the prompt, including tokens that the controller appended."""
    logprobs: list[float] = field(default_factory=list)
    """The log-probability of each token; NaN for an appended token, which was not sampled."""
    logs: str = ""
    """The text that the controller has logged or printed so far."""
    storage: list[Any] = field(default_factory=list)
    """The controller's writes to variables, in order, in the form of AICI's storage commands."""
    messages: list[str] = field(default_factory=list)
    """The texts that the program has sent to the client, in order."""
    waiting: int = 0
    """The number of the input that the program waits for; 0 if it does not wait for an input."""
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    """For each token: the log-probabilities of the most likely tokens and of the token itself, by
    id. Empty for an appended token."""
    finish_reason: str | None = None
    error: str | None = None
    """The error message if the sequence failed, else None."""
    code: str | None = None
    """The code of ``error``: ``controller_failed``, ``deadlock``, ..."""
    stop: str | int | None = None
    """The element of the request's ``stop`` that ended the sequence, or None."""
    constraint: ConstraintEnd | None = None
    """How the text ended under a built-in constraint; None without a constraint.

    - ``complete``: the text is a whole value
    - ``closed``: the text is a whole value, because the constraint appended its shortest completion
      before the limit
    - ``cut``: the text ends inside a value
    """
    prompt_tokens: int = 0
    """The number of tokens of the stream's prompt, including its buffers."""
    cached_tokens: int = 0
    """Number of prompt tokens that were in the worker's prefix cache."""
    processed_logprobs: list[float | None] = field(default_factory=list)
    """With the option ``processed_logprobs``: the log-probability of each token under the
    distribution that it was drawn from. None for an appended token, or without the option."""
    kept: list[int | list[int] | None] = field(default_factory=list)
    """With the option ``kept``: the candidates that each token was drawn from, as in
    ``Token.kept``. None for an appended token, or without the option."""
    spans: list[tuple[int, Span]] = field(default_factory=list)
    """How the tokens were computed. A span says this for consecutive tokens. The number is the
    index of the span's first token. A span ends where the next span begins."""
    exact: bool | None = None
    """Whether all steps of the stream until the end of this sequence were exact with the same
    arithmetic (``Token.exact``). The bits of the sequence's logits and log-probabilities then do
    not depend on batches, forks and moves. None before the end of the sequence."""
    _pieces: list[str] = field(default_factory=list)

    @property
    def texts(self) -> list[str]:
        """The text of each token."""
        return list(self._pieces)

    @property
    def text(self) -> str:
        """The text so far; ``""`` if the request did not ask for text."""
        return "".join(self._pieces)

    @property
    def cumulative_logprob(self) -> float:
        """The sum of the log-probabilities of all tokens; NaN if one of them was appended."""
        return sum(self.logprobs)

    def append_text(self, place: int, text: str) -> None:
        """Adds text to the text of the token with the index ``place``."""
        self._pieces[place] += text

    def _fork(self, number: int, at: int) -> GeneratedSequence:
        return GeneratedSequence(
            number,
            self.seq,
            self.tokens[:at],
            self.logprobs[:at],
            top_logprobs=self.top_logprobs[:at],
            processed_logprobs=self.processed_logprobs[:at],
            kept=self.kept[:at],
            spans=[one for one in self.spans if one[0] < at],
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            _pieces=self._pieces[:at],
        )

    def _add_rows(self, rows: Sequence[Row]) -> None:
        self.waiting = 0
        _, tokens, logprobs, _, _, texts, processed, kept = zip(*rows, strict=True)
        self.tokens += tokens
        self.logprobs += logprobs
        self.top_logprobs += [{row[1]: row[2]} for row in rows]
        self._pieces += [text or "" for text in texts]
        self.processed_logprobs += processed
        self.kept += [None if one is None else kept_of(one) for one in kept]

    def _add(self, entry: Token) -> None:
        if entry.backtrack:
            length = max(0, len(self.tokens) - entry.backtrack)
            for parts in (self.tokens, self.logprobs, self.top_logprobs, self._pieces):
                del parts[length:]
            del self.processed_logprobs[length:], self.kept[length:]
            self.spans = _cut(self.spans, length)
        if entry.span is not None and (not self.spans or self.spans[-1][1] != entry.span):
            self.spans.append((len(self.tokens), entry.span))
        text = "" if entry.text is UNSET else entry.text
        if entry.token is not None:
            self.tokens.append(entry.token)
            self.logprobs.append(entry.logprob if entry.logprob is not None else float("nan"))
            self.top_logprobs.append({} if entry.top_logprobs is UNSET else entry.top_logprobs)
            self._pieces.append(text)
            self.processed_logprobs.append(None if entry.processed is UNSET else entry.processed)
            self.kept.append(None if entry.kept is UNSET else entry.kept)
        elif text and self._pieces:
            # An entry without a token may have text that the worker has held back until now. This
            # text belongs to the last token.
            self._pieces[-1] += text
        self.logs += entry.logs
        self.storage += entry.storage
        self.messages += entry.messages
        self.waiting = entry.waiting
        if entry.finish_reason is not None:
            self.finish_reason, self.error = entry.finish_reason, entry.error
            self.code, self.constraint = entry.code, entry.constraint
            self.stop, self.exact = entry.stop, entry.exact


def _cut(spans: list[tuple[int, Span]], length: int) -> list[tuple[int, Span]]:
    """The spans that remain when the tokens from index ``length`` on are removed. If all tokens of
    the last span are removed, this span still remains, because the next tokens belong to it."""
    found = [(min(first, length), span) for first, span in spans]
    return [one for one, after in pairwise(found) if after[0] > one[0]] + found[-1:]


class Sequences:
    """Collects the entries of one stream.

    A row (``protocol/columns.py``) is stored unchanged until the sequences are read or an entry is
    added. The row is then added to its sequence.
    """

    def __init__(self) -> None:
        self._by_seq: dict[int, GeneratedSequence] = {}
        self._rows: list[Row] = []
        self.add_row = self._rows.append
        """Adds the entry that a row represents."""
        self._adding = threading.Lock()
        self._prompt_tokens = self._cached_tokens = 0

    @property
    def by_seq(self) -> dict[int, GeneratedSequence]:
        """The sequences so far, by number."""
        if self._rows:
            self._add_rows()
        return self._by_seq

    def add(self, entry: Token) -> None:
        """Adds one entry."""
        if self._rows:
            self._add_rows()
        self._add(entry)

    def ended(self, error: TokenbusError | None, complete: bool) -> None:
        """Called when the stream has been read to its end, or was closed before its end.
        ``complete``: whether it was read to its end. ``error``: the error of the stream, or
        None."""

    def _add(self, entry: Token) -> None:
        if entry.prompt_tokens:
            self._prompt_tokens, self._cached_tokens = entry.prompt_tokens, entry.cached_tokens
        by_seq = self._by_seq
        sequence = by_seq.get(entry.seq)
        if sequence is None:
            parent = by_seq.get(entry.parent) if entry.parent is not None else None
            at = entry.pos + entry.backtrack
            if parent is not None:
                sequence = parent._fork(entry.seq, at)
            else:
                sequence = GeneratedSequence(
                    entry.seq,
                    entry.parent,
                    prompt_tokens=self._prompt_tokens,
                    cached_tokens=self._cached_tokens,
                )
            by_seq[entry.seq] = sequence
        sequence._add(entry)

    def _add_rows(self) -> None:
        # The lock is needed because another thread may read the sequences at the same time.
        with self._adding:
            rows = self._rows[:]
            del self._rows[: len(rows)]
            by_seq: dict[int, list[Row]] = {}
            for row in rows:
                by_seq.setdefault(row[4], []).append(row)
            for seq, of_it in by_seq.items():
                if seq not in self._by_seq:
                    self._add(plain_entry(*of_it.pop(0)))
                if of_it:
                    self._by_seq[seq]._add_rows(of_it)

    def listed(self) -> list[GeneratedSequence]:
        """All sequences, by number."""
        by_seq = self.by_seq
        return [by_seq[number] for number in sorted(by_seq)]

    def failure(self) -> TokenbusError | None:
        """The error if the stream has timed out, or if its only sequence has failed. None in all
        other cases."""
        ended = list(self.by_seq.values())
        if any(s.finish_reason == "timeout" for s in ended):
            return RequestTimeoutError(Code.TIMEOUT, "the timeout of the request has expired")
        if len(ended) == 1 and ended[0].finish_reason == "error":
            [failed] = ended
            return error_for(failed.code or Code.INTERNAL, failed.error or "the sequence failed")
        return None


@dataclass(frozen=True, slots=True)
class Scores:
    """The answer of ``score``: each token of the scored part, and its natural log-probability."""

    tokens: list[int]
    logprobs: list[float]
    texts: list[str]
    """The text of each token; empty strings without the option ``text``. If the scored part is a
    text, the option is set by default."""
    top_logprobs: list[dict[int, float]]
    """The most likely tokens at each position, as in ``GeneratedSequence``; empty dicts if they
    were not requested."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Number of prompt tokens that were in the worker's prefix cache."""

    @classmethod
    def of(cls, scored: GeneratedSequence) -> Scores:
        """Makes the answer from the only sequence of a SCORE."""
        return cls(
            scored.tokens,
            scored.logprobs,
            scored.texts,
            scored.top_logprobs,
            scored.prompt_tokens,
            scored.cached_tokens,
        )

    @property
    def total(self) -> float:
        """The log-probability of the whole scored text, given the prompt."""
        return sum(self.logprobs)


def check_text(call: Call) -> None:
    """Raises ValueError if a stream has no text."""
    if not getattr(call.message, "text", False):
        raise ValueError(
            "this stream has no text, because its prompt was token ids or text=False was given; "
            "use text=True"
        )


def describe(ended: bool, sequences: list[GeneratedSequence]) -> str:
    """A short description of a stream."""
    count = sum(len(s.tokens) for s in sequences)
    return f"{len(sequences)} sequences, {count} tokens, {'ended' if ended else 'running'}"
