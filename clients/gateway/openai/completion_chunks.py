"""Encodes the chunks of a streamed completion. A chunk that has only text is assembled from
prepared bytes, which is faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from ....protocol.messages import Token
from ..conversation.constraints import Receipt
from ..conversation.endings import receipt_of
from ..conversation.growing import GrowingChoice, GrowingChoices
from ..events import DONE, event
from ..json import encode
from ..models import ServedModel
from .choices import Indexes, finish_reason
from .completion_bodies import Completion, CompletionChoice, CompletionRequest
from .generations import Prompt
from .logprobs import CompletionLogprobs, Sampled, completion_logprobs
from .token_fields import TokenFields, TokenReports, ids_of, set_fields
from .usage import Counter, Usage


class Stamp(NamedTuple):
    """The fields that all chunks of an answer have."""

    id: str
    created: int
    """Seconds since 1970."""
    name: str
    """The model's name."""


class CompletionChunks:
    """Encodes the entries of a request's streams as events."""

    def __init__(
        self,
        stamp: Stamp,
        model: ServedModel,
        body: CompletionRequest,
        prompts: Sequence[Prompt],
        counter: Counter,
    ) -> None:
        self._stamp = stamp
        self._model = model
        self._counter = counter
        self._continuous = body.continuous_usage
        """Whether every chunk has the usage so far."""
        self._n = body.n or 1
        self._logprobs = body.logprobs
        self._constraint = body.own_constraint
        self._reports = TokenReports(body)
        self._prompts = prompts
        self._begun: set[tuple[int, int]] = set()
        """The choices whose first chunk has been encoded, as pairs of a prompt's index and ``seq``.
        Only the first chunk has the token ids of the prompt."""
        self._indexes = Indexes([body.n or 1] * len(prompts))
        self._choices = [GrowingChoices() for _ in prompts]
        self._offsets: dict[int, int] = {}
        """The length in characters of each choice's text so far, to compute ``text_offset``."""
        self._usage: UnsetType | None = None if body.include_usage else UNSET
        self._whole_entries = body.logprobs is not None or bool(self._reports)
        """Whether each token has its own chunk."""
        self._plain = not self._whole_entries and self._constraint is None
        """Whether all entries of a sequence except its last entry have only text."""
        self._heads: dict[tuple[int, int], bytes] = {}
        self._tail = b',"logprobs":null,"finish_reason":null}]' + (
            b',"usage":null}\n\n' if body.include_usage else b"}\n\n"
        )

    def write(self, place: int, entries: Sequence[Token]) -> bytes:
        """The events that report ``entries`` of one prompt's stream; empty if there is nothing to
        report. ``place``: the index of the prompt."""
        parts = []
        texts: dict[int, str] = {}
        for entry in entries:
            seq = entry.seq
            if self._plain and entry.finish_reason is None:
                if entry.text:
                    texts[seq] = texts.get(seq, "") + entry.text
                continue
            removed, text, choice = self._choices[place].take(entry)
            before = texts.pop(seq, "")
            whole = self._whole_entries or bool(entry.messages or entry.waiting)
            if not removed and entry.finish_reason is None and not whole:
                texts[seq] = before + text
                continue
            if removed and before:
                parts.append(self._text(place, seq, before))
                before = ""
            parts.append(self._whole(place, entry, before + text, removed, choice))
        parts += [self._text(place, seq, text) for seq, text in texts.items() if text]
        return b"".join(parts)

    def echo(self, place: int, text: str, sampled: Sampled | None, ended: str | None) -> bytes:
        """A prompt as the first chunk of each of its choices. ``sampled``: the prompt's tokens, if
        the request has ``logprobs``. ``ended``: the finish reason if no further chunk follows."""
        parts = []
        for seq in range(self._n):
            index = self._indexes.of(place, seq)
            logprobs = None
            if sampled is not None and self._logprobs is not None:
                logprobs = completion_logprobs(self._model, sampled, self._logprobs)
            self._offsets[index] = len(text)
            reason = finish_reason(ended) if ended is not None else None
            parts.append(self._chunk(index, text, logprobs, reason, None))
        return b"".join(parts)

    def end(self) -> bytes:
        """The last events: the usage, if the request asks for it, and ``[DONE]``."""
        if self._usage is UNSET:
            return DONE
        return event(self._answer([], self._counter.usage())) + DONE

    def _text(self, place: int, seq: int, text: str) -> bytes:
        if self._continuous:
            return self._chunk(self._indexes.of(place, seq), text, None, None, None)
        head = self._heads.get((place, seq))
        if head is None:
            # The head consists of the bytes of a chunk that precede its text.
            whole = self._chunk(self._indexes.of(place, seq), "", None, None, None)
            head = self._heads[place, seq] = whole.partition(b'"text":')[0] + b'"text":'
        return head + encode(text) + self._tail

    def _whole(
        self, place: int, entry: Token, text: str, removed: int, choice: GrowingChoice
    ) -> bytes:
        """The chunk of an entry that has more than text. ``text``: the text of earlier entries that
        is not sent yet, and of this entry. ``removed``: number of characters that the entry
        removes."""
        index = self._indexes.of(place, entry.seq)
        logprobs = None
        if self._logprobs is not None:
            offset = self._offsets.get(index, 0) - removed
            self._offsets[index] = offset + len(text)
            sampled = Sampled()
            sampled.add(entry, text)
            if sampled.tokens:
                logprobs = completion_logprobs(self._model, sampled, self._logprobs, offset)
        reason = receipt = None
        if entry.finish_reason is not None:
            reason = finish_reason(entry.finish_reason)
            receipt = receipt_of(self._constraint, choice, entry)
        if removed:
            receipt = receipt or Receipt()
            receipt.backtrack = removed
        if entry.messages or entry.waiting:
            receipt = receipt or Receipt()
            receipt.messages, receipt.waiting = list(entry.messages), entry.waiting
        fields = self._fields(place, entry) if self._reports else None
        if not (text or logprobs or reason or receipt or fields):
            return b""
        return self._chunk(index, text, logprobs, reason, receipt, fields)

    def _fields(self, place: int, entry: Token) -> TokenFields:
        """The fields of ``TokenFields`` for an entry's chunk."""
        key = place, entry.seq
        first = key not in self._begun
        self._begun.add(key)
        return self._reports.of_entry(entry, ids_of(self._prompts[place]) if first else None)

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: CompletionLogprobs | None,
        reason: str | None,
        receipt: Receipt | None,
        fields: TokenFields | None = None,
    ) -> bytes:
        choice = CompletionChoice(index, text, logprobs, reason, receipt or UNSET)
        set_fields(choice, fields)
        usage = self._counter.usage() if self._continuous else self._usage
        return event(self._answer([choice], usage))

    def _answer(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        id, created, name = self._stamp
        return Completion(id, "text_completion", created, name, choices, usage)
