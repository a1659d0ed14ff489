"""Encodes the chunks of a streamed chat. A chunk that has only text is assembled from prepared
bytes, which is faster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import UNSET, UnsetType

from ....protocol.messages import Token
from ..conversation.answer_turns import AnswerTurns, ModelTurn
from ..conversation.answers import Piece
from ..conversation.constraints import Receipt
from ..conversation.endings import End, end_of
from ..conversation.growing import EntryStep, Steps, TextStep
from ..conversation.parts import Call, Text, Thinking
from ..events import DONE, event
from ..json import encode
from .chat_bodies import CallDelta, ChatChunk, ChatChunkChoice, ChatRequest, Delta, FunctionDelta
from .logprobs import ChatLogprobs, Sampled
from .token_fields import TokenFields, TokenReports, set_fields
from .usage import Usage


def reason_of(end: End, older: bool) -> str:
    """The finish reason for an end. ``older``: whether calls have the older form,
    ``function_call``."""
    if end == "max_tool_turns":
        return "length"
    return "function_call" if older and end == "tool_calls" else end


class ChatChunks:
    """Encodes the entries of a chat's turns as events. If the request has tools of the bus, their
    calls are not reported, and only the last chunk has a finish reason and a receipt."""

    def __init__(
        self,
        id: str,
        created: int,
        body: ChatRequest,
        turns: AnswerTurns,
    ) -> None:
        self._id = id
        self._created = created
        self._turns = turns
        self._model, self._name = turns.plan.prepared.model, turns.plan.prepared.name
        self._tops = (body.top_logprobs or 0) if body.logprobs else None
        self._older = bool(body.functions)
        """Whether calls have the older form, ``function_call``."""
        self._continuous = body.continuous_usage
        """Whether every chunk has the usage so far."""
        self._usage: UnsetType | None = None if body.include_usage else UNSET
        self._reports = TokenReports(body)
        self._prompt = turns.plan.prepared.ids if self._reports.ids else None
        """The token ids of the prompt that the first chunk still has to report; None if they were
        reported, or if the request does not ask for them."""
        self._calls: dict[int, dict[str, int]] = {}
        """The numbers of the client's calls by their ids, for each sequence."""
        self._kinds: frozenset[type] = frozenset()
        """The kinds of parts (text, thinking) that the answer has so far."""
        self._heads: dict[int, bytes] = {}
        """The prepared bytes of a chunk before its text, by sequence."""
        self._tail = b'},"logprobs":null,"finish_reason":null}]' + (
            b',"usage":null}\n\n' if body.include_usage else b"}\n\n"
        )
        self._begin_turn(turns.turns[0])

    def _begin_turn(self, turn: ModelTurn) -> None:
        self._turn, form = turn, turn.prepared.form
        single = self._tops is not None or bool(self._reports)
        constrained = turn.prepared.constraint is not None
        self._steps = Steps(form, constrained=constrained, single=single)
        self._earlier = self._kinds
        """The kinds of parts that earlier turns have and this turn does not have yet."""

    def write(self, turn: ModelTurn, entries: Sequence[Token]) -> bytes:
        """The events that report ``entries`` of a turn; empty if there is nothing to report."""
        if turn is not self._turn:
            self._begin_turn(turn)
        parts = [self._begin(one.seq) for one in entries if one.seq not in self._heads]
        for step in self._steps.take(entries):
            parts += self._text(step) if isinstance(step, TextStep) else self._whole(step)
        return b"".join(parts)

    def end(self) -> bytes:
        """The last events: the end of an answer with tools of the bus, the usage, if the request
        asks for it, and ``[DONE]``."""
        last = b""
        if self._turns.served:
            reason = reason_of(self._turns.end_of(0), self._older)
            last = self._chunk(0, Delta(), None, reason, self._turns.receipt())
        if self._usage is UNSET:
            return last + DONE
        usage = Usage.of(self._turns.counter)
        chunk = ChatChunk(self._id, "chat.completion.chunk", self._created, self._name, [], usage)
        return last + event(chunk) + DONE

    def _begin(self, seq: int) -> bytes:
        """The first chunk of a choice, with its role."""
        content = "" if self._turn.prepared.form is None else UNSET
        first = self._chunk(seq, Delta(role="assistant", content=content))
        self._prompt = None
        self._heads[seq] = first.partition(b'"role":')[0] + b'"content":'
        return first

    def _text(self, step: TextStep) -> list[bytes]:
        if self._turn.prepared.form is not None:
            pieces = self._turn.answer(step.seq).feed(step.text)
            return [self._chunk(step.seq, delta) for delta in self._deltas(step.seq, pieces)]
        if self._continuous:
            return [self._chunk(step.seq, Delta(content=step.text))]
        return [self._heads[step.seq] + encode(step.text) + self._tail]

    def _whole(self, step: EntryStep) -> list[bytes]:
        entry, seq, text = step.entry, step.entry.seq, step.text
        logprobs = reason = ended = None
        if self._tops is not None and entry.token is not None:
            sampled = Sampled.of_entry(entry, text)
            logprobs = ChatLogprobs.of(self._model, [sampled], self._tops)
        deltas = [Delta(content=text)] if text else []
        answer = None
        if self._turn.prepared.form is not None:
            answer = self._turn.answer(seq)
            pieces = answer.feed(text)
            if entry.finish_reason is not None:
                pieces += answer.end()
            deltas = self._deltas(seq, pieces)
        if entry.finish_reason is not None and not self._turns.served:
            called = answer is not None and answer.called
            reason = reason_of(end_of(entry.finish_reason, called, entry.constraint), self._older)
            ended = self._turn.prepared.receipt_of(step.choice, entry)
        receipt = step.receipt(ended)
        fields = self._reports.of_entry(entry) if self._reports else None
        if not deltas and (logprobs or reason or receipt or fields):
            deltas = [Delta()]
        # The first delta has the log-probabilities and the token's fields. The last delta has the
        # finish reason and the receipt.
        last = len(deltas) - 1
        return [
            self._chunk(
                seq,
                delta,
                logprobs if i == 0 else None,
                reason if i == last else None,
                receipt if i == last else None,
                fields if i == 0 else None,
            )
            for i, delta in enumerate(deltas)
        ]

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
            Usage.of(self._turns.counter) if self._continuous else self._usage,
            UNSET if self._prompt is None else self._prompt,
        )
        return event(chunk)

    def _deltas(self, seq: int, pieces: Iterable[Piece]) -> list[Delta]:
        return [self._delta(seq, one) for one in pieces if not self._turns.is_served(one.part)]

    def _delta(self, seq: int, piece: Piece) -> Delta:
        part, text, kind = piece.part, piece.text, type(piece.part)
        if not isinstance(part, Call):
            if kind in self._earlier:
                # As in an answer that is not streamed, a line break precedes the text of a turn.
                self._earlier -= {kind}
                text = "\n" + text
            self._kinds |= {kind}
        match part:
            case Text():
                return Delta(content=text)
            case Thinking():
                return Delta(reasoning_content=text)
            case Call(id, name):
                function = FunctionDelta("", name) if piece.begins else FunctionDelta(text)
                if self._older:
                    return Delta(function_call=function)
                numbers = self._calls.setdefault(seq, {})
                delta = CallDelta(numbers.setdefault(id, len(numbers)), function)
                if piece.begins:
                    delta.id, delta.type = id, "function"
                return Delta(tool_calls=[delta])
