"""The turns of an answer.

A turn is one message of the model. If the message calls tools of the bus, the gateway makes the
calls, appends the message and the results to the conversation, and begins the next turn. The loop
ends at a message without such calls, at a call of one of the client's functions, or at a bound.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from msgspec import Meta

from ....protocol.errors import TokenbusError
from ....protocol.messages import Token
from ... import GeneratedSequence
from ..bodies.leniency import Ignored
from ..errors import ApiError, as_api_error
from ..users.idempotency import current_named
from .answers import Answer, AnswerPart
from .bus_tools import make_calls, not_made
from .constraints import Receipt
from .endings import End, end_of
from .made_calls import MadeCall, as_messages
from .parts import Call, Part, Result, Text, Turn, of_kind
from .planning import Prepared, prepare
from .requests import Plan

DEFAULT_TOOL_TURNS = 16
MAX_TOOL_TURNS = 64
MaxToolTurns = Annotated[int, Meta(ge=1, le=MAX_TOOL_TURNS)]
MaxToolCalls = Annotated[int, Meta(ge=1)]
MAX_RESULT_BYTES = 4 * 1024 * 1024
"""Maximum number of bytes that the results of all calls of one answer have together. The gateway
keeps the results until the answer ends."""

STREAMS_PER_TURN = 64
"""Number of stream numbers (``NamedRequest.number_from``) that each turn of a request with an
idempotency key reserves. The turn uses one for itself, and one for each of its calls."""

ID_BYTES = 8
"""Number of bytes that are counted for each token id of a prompt."""


class TurnStream(Protocol):
    """The stream of one turn at the bus."""

    def batches(self) -> AsyncGenerator[tuple[int, list[Token]], None]:
        """Yields entries as they arrive; raises ApiError."""

    def close(self) -> None:
        """Cancels the stream if it still runs."""

    def finished(self) -> list[list[GeneratedSequence]]:
        """The sequences after the stream has ended, as ``Generations.finished`` returns them. A
        turn has one prompt."""


@dataclass
class ModelTurn:
    """One message of the model, or several choices of a message."""

    prepared: Prepared
    stream: TurnStream
    call_prefix: str = "call_"
    sequences: dict[int, GeneratedSequence] = field(default_factory=dict)
    """The sequences by their numbers; empty until the turn has ended."""
    made: list[MadeCall] = field(default_factory=list)
    """The calls of the turn that the gateway has made, or has reported as not made."""
    _answers: dict[int, Answer] = field(default_factory=dict)

    def answer(self, seq: int = 0) -> Answer:
        """The parts of a sequence. An interface that reads the parts while they arrive adds the
        text of each entry. Otherwise the parts are read when the turn has ended."""
        answer = self._answers.get(seq)
        if answer is None:
            answer = self._answers[seq] = Answer(self.prepared.form, self.call_prefix)
        return answer

    @property
    def parts(self) -> list[AnswerPart]:
        """The parts of sequence 0."""
        return self.answer().parts

    def end(self) -> None:
        """Sets the sequences, and reads their parts, when the stream has ended."""
        [sequences] = self.stream.finished()
        for one in sequences:
            self.sequences[one.seq] = one
            if one.seq not in self._answers:
                self._answers[one.seq] = self.prepared.answer_of(one, self.call_prefix)

    def end_of(self, seq: int) -> End:
        """Why a sequence of this turn ended."""
        sequence = self.sequences[seq]
        return end_of(sequence.finish_reason, self.answer(seq).called, sequence.constraint)


@dataclass
class Arrived:
    """An event: entries of a turn have arrived."""

    turn: ModelTurn
    entries: Sequence[Token]


@dataclass
class Ended:
    """An event: a turn has ended."""

    turn: ModelTurn
    calls: list[Call]
    """The calls of the bus's tools, which begin when the caller requests the next event."""


@dataclass
class Made:
    """An event: the gateway has made the calls of one turn."""

    turn: ModelTurn


class AnswerTurns:
    """Generates the turns of one answer, and makes the calls between them. An answer without tools
    of the bus has one turn."""

    def __init__(self, plan: Plan, stream: TurnStream) -> None:
        """``stream``: the stream of the first turn."""
        self.plan = plan
        self.counter = plan.counter
        self.served = frozenset(plan.request.bus_tools)
        """The names of the request's tools of the bus."""
        self.turns = [ModelTurn(plan.prepared, stream, plan.request.call_prefix)]
        self.end: End | None = None
        """Why the answer ended; None before the end."""
        self._num_made = self._result_bytes = 0
        self._fault = Receipt()
        """The error that ended the answer, if there is one."""

    @classmethod
    def begin(cls, plan: Plan) -> AnswerTurns:
        """Begins the first turn."""
        return cls(plan, plan.begin())

    @property
    def made(self) -> list[MadeCall]:
        """The calls so far. A call that the gateway did not make has an error as its result."""
        return [call for turn in self.turns for call in turn.made]

    def is_served(self, part: object) -> bool:
        """Whether a part is a call of a tool of the bus. The client makes all other calls."""
        return isinstance(part, Call) and part.name in self.served

    @property
    def parts(self) -> list[AnswerPart | MadeCall]:
        """The parts of all turns so far, and the calls that the gateway has made, in order."""
        return [part for turn in self.turns for part in (*turn.parts, *turn.made)]

    def close(self) -> None:
        """Cancels the stream of the last turn if it still runs."""
        self.turns[-1].stream.close()

    async def events(self) -> AsyncGenerator[Arrived | Ended | Made, None]:
        """Yields the entries, the ends and the calls of all turns in order.

        Raises ApiError if an error occurs before the first call of a tool. A later error ends the
        answer without an exception, so that the client receives the calls that were made.
        """
        more = True
        while more:
            turn = self.turns[-1]
            try:
                async with aclosing(turn.stream.batches()) as batches:
                    async for _, entries in batches:
                        await turn.prepared.checks.read(entries)
                        yield Arrived(turn, entries)
                self.plan.gateway.shares.give_back_stream()
                turn.end()
                # The answer ends with this turn, unless a further turn follows.
                self.end = turn.end_of(0)
                calls = [call for call in of_kind(turn.parts, Call) if self.is_served(call)]
                yield Ended(turn, calls)
                more = bool(calls)
                if calls:
                    turn.made = await self._make(turn, calls)
                    yield Made(turn)
                    more = await self._continues(turn)
            except (ApiError, TokenbusError) as error:
                if not self.made:
                    raise
                self._fail(as_api_error(error))
                more = False

    async def read(self) -> None:
        """Reads all turns to their ends. Raises ApiError or TokenbusError as ``events`` does."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass

    def end_of(self, seq: int) -> End:
        """Why a sequence ended. Only answers of one turn have several sequences."""
        return self.turns[0].end_of(seq) if seq or self.end is None else self.end

    def receipt(self, seq: int = 0, *, calls: bool = True) -> Receipt | None:
        """The receipt of a sequence: the receipt of its last turn, with the calls of all turns if
        ``calls`` is true. None if the receipt would be empty."""
        ended = [turn for turn in self.turns if seq in turn.sequences]
        last = ended[-1]
        receipt = last.prepared.receipt_of(last.sequences[seq]) or Receipt()
        exact = [turn.sequences[seq].exact for turn in ended]
        receipt.exact = None if None in exact else all(exact)
        if calls:
            receipt.tool_calls = self.made
            receipt.tool_messages = as_messages(self.made) if self.end == "tool_calls" else []
        if self._fault.error:
            receipt.error, receipt.code = self._fault.error, self._fault.code
        return receipt if receipt != Receipt() else None

    async def _make(self, turn: ModelTurn, own: list[Call]) -> list[MadeCall]:
        """Makes the calls of an ended turn, unless a bound forbids them."""
        max_turns = self.plan.request.max_tool_turns or DEFAULT_TOOL_TURNS
        max_calls, recorded = self.plan.request.max_tool_calls, self.plan.recorded
        if self.end != "tool_calls":
            made = not_made(own, "not called: the message was cut off")
        elif len(own) == len(of_kind(turn.parts, Call)) and len(self.turns) == max_turns:
            made = not_made(own, f"not called: max_tool_turns is {max_turns}")
            self._stop_at_bound()
        else:
            left = None if max_calls is None else max(0, max_calls - self._num_made)
            new = [call for call in own[:left] if call.id not in recorded]
            calls = await make_calls(self.plan.gateway, turn.prepared, new)
            found = {**recorded, **{call.id: call for call in calls}}
            made = [found[call.id] for call in own[:left]]
            for call, by in zip(made, own, strict=False):
                # The record of a call without a result does not contain the tool's name.
                call.name = by.name
            made += not_made(own[len(made) :], f"not called: max_tool_calls is {max_calls}")
            self._num_made += len(own[:left])
        return made

    async def _continues(self, turn: ModelTurn) -> bool:
        """Begins the next turn after the calls of ``turn``, unless the answer ends. Returns whether
        a turn has begun."""
        if self.end != "tool_calls":
            return False
        size = sum(len(call.text.encode()) for call in turn.made)
        self.plan.gateway.shares.take_bytes(size)
        self._result_bytes += size
        if len(turn.made) < len(of_kind(turn.parts, Call)):
            # The client makes the other calls.
            return False
        limit = self.plan.request.limit
        left = None if limit is None else max(0, limit - self.counter.completion)
        if left == 0:
            self.end = "length"
            return False
        if self._result_bytes > MAX_RESULT_BYTES:
            raise ApiError(
                413,
                f"the results of the answer's calls have {self._result_bytes} bytes together; at "
                f"most {MAX_RESULT_BYTES} are allowed",
                code="too_large",
            )
        self.turns.append(await self._next(turn, left))
        return True

    def _stop_at_bound(self) -> None:
        """Ends the answer, because its last permitted turn has calls."""
        count = len(self.turns)
        self.end = "max_tool_turns"
        self._fault = Receipt(
            error=f"the answer has had {count} turns, and max_tool_turns is {count}; the last "
            "turn's calls were not made",
            code="max_tool_turns",
        )

    def _fail(self, error: ApiError) -> None:
        too_long = error.code == "context_length_exceeded"
        self.end = "length" if too_long else "error"
        self._fault = Receipt(error=error.message, code=error.code or "")

    async def _next(self, turn: ModelTurn, left: int | None) -> ModelTurn:
        """Begins the turn after the calls of ``turn``, with at most ``left`` tokens."""
        gateway, conversation = self.plan.gateway, self.plan.conversation
        results: list[Part] = [
            Result(call.id, [Text(call.text)], call.name, failed=bool(call.error))
            for call in turn.made
        ]
        conversation.turns += [Turn("assistant", [*turn.parts]), Turn("user", results)]
        conversation.rules.choice = "auto"
        model = turn.prepared.name
        if (named := current_named.get()) is not None:
            named.number_from(len(self.turns) * STREAMS_PER_TURN)
        # The fields that have no effect were already reported when the first turn was prepared.
        prepared = await prepare(gateway, model, conversation, Ignored())
        # The prompts of all turns are kept until the answer ends.
        gateway.shares.take_bytes(ID_BYTES * len(prepared.ids))
        return ModelTurn(prepared, self.plan.continued(prepared, left), turn.call_prefix)
