"""The turns of an answer whose tools the gateway calls.

A turn is one message of the model. If the message calls tools of the bus, the gateway makes the
calls, appends the message and the results to the conversation, and begins the next turn. The loop
ends at a message without such calls, at a call of one of the client's functions, or at a bound.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol

from msgspec import Meta

from ....protocol.errors import TokenbusError
from ....protocol.messages import Token
from ... import GeneratedSequence
from ..bodies.leniency import Ignored
from ..context import Gateway
from ..errors import ApiError, from_tokenbus
from ..idempotency import current_named
from .answers import Answer, AnswerPart
from .bus_tools import make_calls, not_made
from .constraints import Receipt
from .endings import is_cut, receipt_of
from .made_calls import MadeCall
from .parts import Call, Conversation, Part, Result, Text, Turn, of_kind
from .planning import Prepared, prepare

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

End = Literal["", "stop", "length", "tool_calls", "max_tool_turns", "error"]
"""Why an answer ended. ``tool_calls``: the client has to make calls."""


class TurnStream(Protocol):
    """The stream of one turn at the bus."""

    def batches(self) -> AsyncGenerator[tuple[int, list[Token]], None]:
        """Yields entries as they arrive; raises ApiError."""

    def finished(self) -> list[list[GeneratedSequence]]:
        """The sequences after the stream has ended, as ``Generations.finished`` returns them. A
        turn has one prompt and one sequence."""


@dataclass
class ModelTurn:
    """One message of the model. The sequence and its parts are set when the turn has ended."""

    prepared: Prepared
    stream: TurnStream
    answer: Answer | None = None
    """The parts of the message, if the interface reads them while they arrive."""
    sequence: GeneratedSequence | None = None
    parts: list[AnswerPart] = field(default_factory=list)

    def end(self) -> GeneratedSequence:
        """Sets the sequence and its parts."""
        [[sequence]] = self.stream.finished()
        answer = self.answer
        if answer is None:
            answer = Answer(self.prepared.form)
            answer.feed(self.prepared.whole_text(sequence))
            answer.end()
        self.sequence, self.parts = sequence, answer.parts
        return sequence


@dataclass
class Made:
    """An event: the gateway has made the calls of one turn."""

    turn: ModelTurn
    calls: list[MadeCall]


@dataclass
class Making:
    """An event: the gateway is about to make the calls of one turn."""

    turn: ModelTurn
    calls: list[Call]


@dataclass
class Arrived:
    """An event: entries of a turn have arrived."""

    turn: ModelTurn
    entries: Sequence[Token]


@dataclass
class Loop:
    """How the turns of an answer are begun and bounded."""

    served: frozenset[str]
    """The names of the request's tools of the bus."""
    begin: Callable[[Prepared, int | None], TurnStream]
    """Begins a turn. The second argument is the maximum number of the turn's tokens. If it is None,
    only the context bounds them."""
    generated: Callable[[], int]
    """Returns the number of tokens that the answer has so far."""
    max_tokens: int | None = None
    """Maximum number of tokens of all turns; None if only the context bounds them."""
    max_turns: int | None = None
    """Maximum number of turns; ``DEFAULT_TOOL_TURNS`` if None is given."""
    max_calls: int | None = None
    """Maximum number of calls that the gateway makes. Further calls get an error as their
    result."""
    recorded: Mapping[str, MadeCall] = field(default_factory=dict)
    """The calls that an earlier gateway made for this answer, by their ids. They are not made
    again."""

    def __post_init__(self) -> None:
        self.max_turns = self.max_turns or DEFAULT_TOOL_TURNS

    @property
    def tokens_left(self) -> int | None:
        """Number of tokens that further turns may have; None if only the context bounds them."""
        if self.max_tokens is None:
            return None
        return max(0, self.max_tokens - self.generated())


ID_BYTES = 8
"""The bytes that are counted for a token id of a prompt."""


class ToolTurns:
    """Generates the turns of one answer, and makes the calls between them."""

    def __init__(
        self, gateway: Gateway, conversation: Conversation, first: ModelTurn, loop: Loop
    ) -> None:
        self.turns = [first]
        self.made: list[MadeCall] = []
        """The calls so far. A call that the gateway did not make has an error as its result."""
        self.end: End = ""
        """Why the answer ended; empty before the end."""
        self._gateway = gateway
        self._conversation = conversation
        self._loop = loop
        self._num_made = self._result_bytes = 0
        self._fault = Receipt()
        """The error that ended the answer, if there is one."""

    def is_served(self, name: str) -> bool:
        """Whether a tool of the bus has this name. Otherwise the client makes the calls of the
        function."""
        return name in self._loop.served

    async def events(self) -> AsyncGenerator[Arrived | Making | Made, None]:
        """Yields the entries and the calls of all turns in order. The calls of a turn begin when
        the caller requests the event after ``Making``.

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
                self._gateway.shares.give_back_stream()
                own = self._ended(turn, turn.end())
                if own:
                    yield Making(turn, own)
                    made = await self._make(turn, own)
                    yield Made(turn, made)
                    more = await self._continues(turn, made)
                else:
                    more = False
            except (ApiError, TokenbusError) as error:
                if not self.made:
                    raise
                self._fail(error if isinstance(error, ApiError) else from_tokenbus(error))
                more = False

    def receipt(self) -> Receipt:
        """The receipt of the answer: the receipt of the last turn, with the calls of all turns."""
        ended = [turn for turn in self.turns if turn.sequence is not None]
        last = ended[-1]
        assert last.sequence is not None
        receipt = receipt_of(last.prepared.constraint, last.sequence, None) or Receipt()
        receipt.keywords = last.prepared.checks.outcomes.get(last.sequence.seq, {})
        exact = [turn.sequence.exact for turn in ended if turn.sequence is not None]
        receipt.exact = None if None in exact else all(exact)
        receipt.tool_calls = self.made
        if self._fault.error:
            receipt.error, receipt.code = self._fault.error, self._fault.code
        return receipt

    def _ended(self, turn: ModelTurn, sequence: GeneratedSequence) -> list[Call]:
        """Sets the reason why the answer ends if no further turn follows. Returns the calls of the
        turn that the gateway makes or reports as not made."""
        calls = of_kind(turn.parts, Call)
        own = [call for call in calls if self.is_served(call.name)]
        if sequence.finish_reason == "error":
            self.end = "error"
        elif is_cut(sequence.finish_reason, bool(calls), sequence.constraint):
            self.end = "length"
        else:
            self.end = "tool_calls" if calls else "stop"
        return own

    async def _make(self, turn: ModelTurn, own: list[Call]) -> list[MadeCall]:
        """Makes the calls of an ended turn, unless a bound forbids them."""
        loop = self._loop
        if self.end != "tool_calls":
            made = not_made(own, "not called: the message was cut off")
        elif len(own) == len(of_kind(turn.parts, Call)) and len(self.turns) == loop.max_turns:
            made = not_made(own, f"not called: max_tool_turns is {loop.max_turns}")
            self._stop_at_bound()
        else:
            left = None if loop.max_calls is None else max(0, loop.max_calls - self._num_made)
            new = [call for call in own[:left] if call.id not in loop.recorded]
            found = dict(loop.recorded)
            found |= {call.id: call for call in await make_calls(self._gateway, turn.prepared, new)}
            made = [found[call.id] for call in own[:left]]
            for call, by in zip(made, own, strict=False):
                # The record of a call without a result does not contain the tool's name.
                call.name = by.name
            made += not_made(own[len(made) :], f"not called: max_tool_calls is {loop.max_calls}")
            self._num_made += len(own[:left])
        self.made += made
        return made

    async def _continues(self, turn: ModelTurn, made: Sequence[MadeCall]) -> bool:
        """Begins the next turn after the calls of ``turn``, unless the answer ends. Returns whether
        a turn has begun."""
        if self.end != "tool_calls":
            return False
        size = sum(len(call.text.encode()) for call in made)
        self._gateway.shares.take_bytes(size)
        self._result_bytes += size
        if len(made) < len(of_kind(turn.parts, Call)):
            # The client makes the other calls.
            return False
        left = self._loop.tokens_left
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
        self.turns.append(await self._next(turn, made, left))
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

    async def _next(self, turn: ModelTurn, made: Sequence[MadeCall], left: int | None) -> ModelTurn:
        """Begins the turn after the calls of ``turn``."""
        conversation = self._conversation
        results: list[Part] = [
            Result(call.id, [Text(call.text)], call.name, failed=bool(call.error)) for call in made
        ]
        conversation.turns += [Turn("assistant", [*turn.parts]), Turn("user", results)]
        conversation.rules.choice = "auto"
        model = turn.prepared.name
        if (named := current_named.get()) is not None:
            named.number_from(len(self.turns) * STREAMS_PER_TURN)
        # The fields that have no effect were already reported when the first turn was prepared.
        prepared = await prepare(self._gateway, model, conversation, Ignored())
        # The prompts of all turns are kept until the answer ends.
        self._gateway.shares.take_bytes(ID_BYTES * len(prepared.ids))
        return ModelTurn(prepared, self._loop.begin(prepared, left))
