"""Encodes the chunks of a streamed chat. A chunk that has only text is assembled from prepared
bytes, which is faster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import UNSET, UnsetType

from ....protocol.messages import Token
from ..conversation.answers import Answer, Piece, entry_text
from ..conversation.constraints import Receipt
from ..conversation.endings import receipt_of
from ..conversation.growing import GrowingChoice, GrowingChoices
from ..conversation.parts import Call, Text, Thinking
from ..conversation.planning import Prepared
from ..events import DONE, event
from ..json import encode
from .chat_bodies import CallDelta, ChatChunk, ChatChunkChoice, ChatRequest, Delta, FunctionDelta
from .choices import finish_reason
from .logprobs import ChatLogprobs, Sampled, token_logprobs
from .token_fields import TokenFields, TokenReports, set_fields
from .usage import Counter


class ChatChunks:
    """Encodes the entries of a chat's stream as events."""

    def __init__(
        self,
        id: str,
        created: int,
        body: ChatRequest,
        prepared: Prepared,
        counter: Counter,
    ) -> None:
        self._id = id
        self._created = created
        self._model, self._name = prepared.model, prepared.name
        self._tops = (body.top_logprobs or 0) if body.logprobs else None
        self._constraint = prepared.constraint
        self._checks = prepared.checks
        self._form = prepared.form
        self._answers: dict[int, Answer] = {}
        self._choices = GrowingChoices(prepared.form)
        self._older = bool(body.functions)
        """Whether calls have the older form, ``function_call``."""
        self._counter = counter
        self._continuous = body.continuous_usage
        """Whether every chunk has the usage so far."""
        self._usage: UnsetType | None = None if body.include_usage else UNSET
        self._reports = TokenReports(body)
        self._prompt = prepared.ids if self._reports.ids else None
        """The token ids of the prompt that the first chunk still has to report; None if they were
        reported, or if the request does not ask for them."""
        self._whole_entries = self._tops is not None or bool(self._reports)
        """Whether each token has its own chunk."""
        self._plain = prepared.constraint is None and not self._whole_entries
        """Whether all entries of a sequence except its last entry have only text."""
        self._heads: dict[int, bytes] = {}
        """The prepared bytes of a chunk before its text, by sequence."""
        self._tail = b'},"logprobs":null,"finish_reason":null}]' + (
            b',"usage":null}\n\n' if body.include_usage else b"}\n\n"
        )

    def write(self, entries: Sequence[Token]) -> bytes:
        """The events that report ``entries``; empty if there is nothing to report."""
        parts = []
        texts: dict[int, str] = {}
        for entry in entries:
            seq = entry.seq
            if seq not in self._heads:
                parts.append(self._begin(seq))
            if self._plain and entry.finish_reason is None:
                text = entry_text(self._form, entry)
                if text:
                    texts[seq] = texts.get(seq, "") + text
                continue
            removed, text, choice = self._choices.take(entry)
            before = texts.pop(seq, "")
            whole = self._whole_entries or bool(entry.messages or entry.waiting)
            if not removed and entry.finish_reason is None and not whole:
                texts[seq] = before + text
                continue
            if removed:
                parts += self._deltas(seq, before)
                before = ""
            parts.append(self._whole(entry, before + text, removed, choice))
        for seq, text in texts.items():
            parts += self._deltas(seq, text)
        return b"".join(parts)

    def end(self) -> bytes:
        """The last events: the usage, if the request asks for it, and ``[DONE]``."""
        if self._usage is UNSET:
            return DONE
        chunk = ChatChunk(
            self._id,
            "chat.completion.chunk",
            self._created,
            self._name,
            [],
            self._counter.usage(),
        )
        return event(chunk) + DONE

    def _begin(self, seq: int) -> bytes:
        """The first chunk of a choice, with its role."""
        content = "" if self._form is None else UNSET
        first = self._chunk(seq, Delta(role="assistant", content=content))
        self._prompt = None
        self._heads[seq] = first.partition(b'"role":')[0] + b'"content":'
        return first

    def _text(self, seq: int, text: str) -> bytes:
        if self._continuous:
            return self._chunk(seq, Delta(content=text))
        return self._heads[seq] + encode(text) + self._tail

    def _deltas(self, seq: int, text: str) -> list[bytes]:
        """The chunks that add ``text`` to a choice."""
        if self._form is None:
            return [self._text(seq, text)] if text else []
        return [self._chunk(seq, delta) for delta in self._deltas_of(self._of(seq).feed(text))]

    def _whole(self, entry: Token, text: str, removed: int, choice: GrowingChoice) -> bytes:
        """The chunks of an entry that has more than text. ``text``: the text of earlier entries
        that is not sent yet, and of this entry. ``removed``: number of characters that the entry
        removes."""
        logprobs = reason = receipt = None
        if self._tops is not None and entry.token is not None:
            sampled = Sampled()
            sampled.add(entry, text)
            logprobs = ChatLogprobs(token_logprobs(self._model, sampled, self._tops))
        deltas = [Delta(content=text)] if text else []
        called = False
        if self._form is not None:
            answer = self._of(entry.seq)
            pieces = answer.feed(text)
            if entry.finish_reason is not None:
                pieces += answer.end()
            deltas = self._deltas_of(pieces)
            called = answer.called
        if entry.finish_reason is not None:
            reason, receipt = self._ended(entry, choice, called)
        if removed:
            receipt = receipt or Receipt()
            receipt.backtrack = removed
        if entry.messages or entry.waiting:
            receipt = receipt or Receipt()
            receipt.messages, receipt.waiting = list(entry.messages), entry.waiting
        fields = self._reports.of_entry(entry) if self._reports else None
        if not deltas and (logprobs or reason or receipt or fields):
            deltas = [Delta()]
        # The first delta has the log-probabilities and the token's fields. The last delta has the
        # finish reason and the receipt.
        last = len(deltas) - 1
        return b"".join(
            self._chunk(
                entry.seq,
                delta,
                logprobs if i == 0 else None,
                reason if i == last else None,
                receipt if i == last else None,
                fields if i == 0 else None,
            )
            for i, delta in enumerate(deltas)
        )

    def _ended(
        self, entry: Token, choice: GrowingChoice, called: bool
    ) -> tuple[str | None, Receipt | None]:
        """The finish reason and the receipt of a choice whose last entry is ``entry``. ``called``:
        whether the choice has called a function."""
        receipt = receipt_of(self._constraint, choice, entry)
        if receipt is not None:
            receipt.keywords = self._checks.outcomes.get(entry.seq, {})
        reason = finish_reason(entry.finish_reason, called, self._older, entry.constraint)
        return reason, receipt

    def _of(self, seq: int) -> Answer:
        """The answer of a sequence."""
        answer = self._answers.get(seq)
        if answer is None:
            answer = self._answers[seq] = Answer(self._form)
        return answer

    def _chunk(
        self,
        seq: int,
        delta: Delta,
        logprobs: ChatLogprobs | None = None,
        reason: str | None = None,
        receipt: Receipt | None = None,
        fields: TokenFields | None = None,
    ) -> bytes:
        choice = ChatChunkChoice(seq, delta, logprobs, reason, receipt or UNSET)
        set_fields(choice, fields)
        chunk = ChatChunk(
            self._id,
            "chat.completion.chunk",
            self._created,
            self._name,
            [choice],
            self._counter.usage() if self._continuous else self._usage,
            UNSET if self._prompt is None else self._prompt,
        )
        return event(chunk)

    def _deltas_of(self, pieces: Iterable[Piece]) -> list[Delta]:
        return [self._delta(piece) for piece in pieces]

    def _delta(self, piece: Piece) -> Delta:
        match piece.part:
            case Text():
                return Delta(content=piece.text)
            case Thinking():
                return Delta(reasoning_content=piece.text)
            case Call(id, name):
                function = FunctionDelta("", name) if piece.begins else FunctionDelta(piece.text)
                if self._older:
                    return Delta(function_call=function)
                delta = CallDelta(piece.number, function)
                if piece.begins:
                    delta.id, delta.type = id, "function"
                return Delta(tool_calls=[delta])
