"""Encodes the chunks of a streamed completion. A chunk that has only text is assembled from
prepared bytes, which is faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from ....protocol.messages import Token
from ..conversation.constraints import Receipt
from ..conversation.endings import end_of, receipt_of
from ..conversation.growing import EntryStep, Steps, TextStep
from ..events import DONE, event
from ..generation.counter import Counter
from ..generation.generations import Prompt
from ..json import encode
from ..models import ServedModel
from .choices import Indexes
from .completion_bodies import Completion, CompletionChoice, CompletionRequest
from .logprobs import CompletionLogprobs, Sampled, completion_logprobs
from .token_fields import TokenFields, TokenReports, ids_of, set_fields
from .usage import Usage


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
        single = body.logprobs is not None or bool(self._reports)
        constrained = self._constraint is not None
        self._steps = [Steps(None, constrained=constrained, single=single) for _ in prompts]
        self._offsets: dict[int, int] = {}
        """The length in characters of each choice's text so far, to compute ``text_offset``."""
        self._usage: UnsetType | None = None if body.include_usage else UNSET
        self._heads: dict[tuple[int, int], bytes] = {}
        self._tail = b',"logprobs":null,"finish_reason":null}]' + (
            b',"usage":null}\n\n' if body.include_usage else b"}\n\n"
        )

    def write(self, place: int, entries: Sequence[Token]) -> bytes:
        """The events that report ``entries`` of one prompt's stream; empty if there is nothing to
        report. ``place``: the index of the prompt."""
        return b"".join(
            self._text(place, step.seq, step.text)
            if isinstance(step, TextStep)
            else self._whole(place, step)
            for step in self._steps[place].take(entries)
        )

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
            reason = end_of(ended) if ended is not None else None
            parts.append(self._chunk(index, text, logprobs, reason, None))
        return b"".join(parts)

    def end(self) -> bytes:
        """The last events: the usage, if the request asks for it, and ``[DONE]``."""
        if self._usage is UNSET:
            return DONE
        return event(self._answer([], Usage.of(self._counter))) + DONE

    def _text(self, place: int, seq: int, text: str) -> bytes:
        if self._continuous:
            return self._chunk(self._indexes.of(place, seq), text, None, None, None)
        head = self._heads.get((place, seq))
        if head is None:
            # The head consists of the bytes of a chunk that precede its text.
            whole = self._chunk(self._indexes.of(place, seq), "", None, None, None)
            head = self._heads[place, seq] = whole.partition(b'"text":')[0] + b'"text":'
        return head + encode(text) + self._tail

    def _whole(self, place: int, step: EntryStep) -> bytes:
        entry, text = step.entry, step.text
        index = self._indexes.of(place, entry.seq)
        logprobs = None
        if self._logprobs is not None:
            offset = self._offsets.get(index, 0) - step.removed
            self._offsets[index] = offset + len(text)
            if entry.token is not None:
                sampled = Sampled.of_entry(entry, text)
                logprobs = completion_logprobs(self._model, sampled, self._logprobs, offset)
        reason = ended = None
        if entry.finish_reason is not None:
            reason = end_of(entry.finish_reason)
            ended = receipt_of(self._constraint, step.choice, entry)
        receipt = step.receipt(ended)
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
        usage = Usage.of(self._counter) if self._continuous else self._usage
        return event(self._answer([choice], usage))

    def _answer(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        id, created, name = self._stamp
        return Completion(id, "text_completion", created, name, choices, usage)
