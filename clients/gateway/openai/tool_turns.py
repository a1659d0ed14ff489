"""The turns of an answer whose tools the gateway calls.

A turn is one message of the model. If the message calls tools of the bus, the gateway makes the
calls, appends the message and the results to the conversation, and begins the next turn.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from ....protocol.errors import TokenbusError
from ....protocol.messages import Token
from ... import GeneratedSequence
from ..context import Gateway
from ..conversation.answers import Answer, AnswerPart
from ..conversation.constraints import Receipt
from ..conversation.made_calls import MadeCall, as_messages
from ..conversation.parts import Call, Conversation, Part, Result, Text, Turn, of_kind
from ..conversation.planning import Prepared, prepare
from ..errors import ApiError, from_tokenbus
from ..leniency import Ignored
from .bus_tools import make_calls, not_made
from .chat_bodies import ChatRequest
from .choices import finish_reason, receipt_of
from .generations import Generations, chat_generations
from .usage import Counter


@dataclass
class ModelTurn:
    """One message of the model. The sequence and its parts are set when the turn has ended."""

    prepared: Prepared
    generations: Generations
    sequence: GeneratedSequence | None = None
    parts: list[AnswerPart] = field(default_factory=list)

    def end(self) -> GeneratedSequence:
        """Sets the sequence and its parts."""
        [[sequence]] = self.generations.finished()
        answer = Answer(self.prepared.form)
        answer.feed(self.prepared.whole_text(sequence))
        answer.end()
        self.sequence, self.parts = sequence, answer.parts
        return sequence


class ToolTurns:
    """Generates the turns of one answer, and makes the calls between them."""

    def __init__(
        self,
        gateway: Gateway,
        body: ChatRequest,
        conversation: Conversation,
        counter: Counter,
        first: ModelTurn,
    ) -> None:
        self.turns = [first]
        self.made: list[MadeCall] = []
        self.finish_reason = ""
        """The finish reason of the answer, after its end."""
        self._gateway = gateway
        self._body = body
        self._conversation = conversation
        self._counter = counter
        self._served = frozenset(body.bus_tools)
        self._end = Receipt()
        """The error that ended the answer, if there is one."""

    def is_served(self, name: str) -> bool:
        """Whether a tool of the bus has this name. Otherwise the client makes the calls of the
        function."""
        return name in self._served

    async def batches(self) -> AsyncGenerator[tuple[ModelTurn, Sequence[Token]], None]:
        """Yields the entries of all turns as they arrive, each with its turn.

        Raises ApiError or TokenbusError if an error occurs before the first call of a tool. A later
        error ends the answer without an exception, so that the client receives the calls that were
        made.
        """
        more = True
        while more:
            turn = self.turns[-1]
            try:
                async with aclosing(turn.generations.batches()) as batches:
                    async for _, entries in batches:
                        await turn.prepared.checks.read(entries)
                        yield turn, entries
                self._gateway.shares.give_back_stream()
                more = await self._after(turn, turn.end())
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
        if self.finish_reason == "tool_calls":
            receipt.tool_messages = as_messages(self.made)
        if self._end.error:
            receipt.error, receipt.code = self._end.error, self._end.code
        return receipt

    async def _after(self, turn: ModelTurn, sequence: GeneratedSequence) -> bool:
        """Makes the calls of an ended turn, and begins the next turn. Returns whether there is a
        next turn."""
        calls = of_kind(turn.parts, Call)
        own = [call for call in calls if self.is_served(call.name)]
        self.finish_reason = finish_reason(sequence.finish_reason, bool(calls))
        if self.finish_reason != "tool_calls":
            self.made += not_made(own, "not called: the message was cut off")
            return False
        for_client = len(own) < len(calls)
        if not for_client and len(self.turns) == self._body.max_tool_turns:
            self._stop_at_bound(own)
            return False
        made = await make_calls(self._gateway, turn.prepared, own)
        self.made += made
        self._gateway.shares.take_bytes(sum(len(call.text) for call in made))
        if for_client:
            return False
        left = self._tokens_left()
        if left == 0:
            self.finish_reason = "length"
            return False
        self.turns.append(await self._next(turn, made, left))
        return True

    def _stop_at_bound(self, calls: Sequence[Call]) -> None:
        """Ends the answer, because its last permitted turn has calls."""
        count = len(self.turns)
        self.made += not_made(calls, f"not called: max_tool_turns is {count}")
        self.finish_reason = "length"
        self._end = Receipt(
            error=f"the answer has had {count} turns, and max_tool_turns is {count}; the last "
            "turn's calls were not made",
            code="max_tool_turns",
        )

    def _fail(self, error: ApiError) -> None:
        too_long = error.code == "context_length_exceeded"
        self.finish_reason = "length" if too_long else "error"
        self._end = Receipt(error=error.message, code=error.code or "")

    def _tokens_left(self) -> int | None:
        """Number of tokens that further turns may have; None if only the context bounds them."""
        limit = self._body.max_completion_tokens or self._body.max_tokens
        if limit is None or limit < 0:
            return None
        return max(0, limit - self._counter.completion)

    async def _next(self, turn: ModelTurn, made: Sequence[MadeCall], left: int | None) -> ModelTurn:
        """Begins the turn after the calls of ``turn``."""
        conversation, body = self._conversation, self._body
        results: list[Part] = [
            Result(call.id, [Text(call.text)], call.name, failed=bool(call.error)) for call in made
        ]
        conversation.turns += [Turn("assistant", [*turn.parts]), Turn("user", results)]
        conversation.rules.choice = "auto"
        model = turn.prepared.model.name
        # ``prepare`` has already reported, for the first turn, the fields that have no effect.
        prepared = await prepare(self._gateway, model, conversation, Ignored())
        options = body.options(prepared.constraint)
        options.pop("min_tokens", None)
        if left is not None:
            options["max_tokens"] = left
        fields = {"prompt": "messages"}
        generations = chat_generations(self._gateway, prepared, options, self._counter, fields)
        generations.shown = turn.generations.shown
        return ModelTurn(prepared, generations)
