"""A model of a gateway, and conversations with this model, for tests without a GPU worker."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any, cast

from tokenbus.clients import GeneratedSequence
from tokenbus.clients.gateway.answer_parts import AnswerForm
from tokenbus.clients.gateway.context import Gateway
from tokenbus.clients.gateway.conversation.answer_turns import AnswerTurns
from tokenbus.clients.gateway.conversation.constraints import Constraint
from tokenbus.clients.gateway.conversation.parts import Conversation
from tokenbus.clients.gateway.conversation.planning import Prepared
from tokenbus.clients.gateway.conversation.requests import AnswerRequest, Plan
from tokenbus.clients.gateway.conversation.schemas import Checks
from tokenbus.clients.gateway.generation.counter import Counter
from tokenbus.clients.gateway.models import ServedModel
from tokenbus.clients.gateway.templates.templates import Templates
from tokenbus.clients.gateway.users.user_shares import UserShares
from tokenbus.clients.results import Sequences
from tokenbus.protocol.messages import ModelInfo, Token, TokenizerFiles
from tokenizers import Tokenizer
from tokenizers.models import BPE


def small_model(name: str = "m", **files: Any) -> ServedModel:
    """A model with a context of 16 tokens. ``files`` has fields of its ``TokenizerFiles``."""
    info = ModelInfo(name=name, vocab_size=9, context_length=16, eos_token_ids=[0], fingerprint="f")
    return ServedModel(info, TokenizerFiles(fingerprint="f", json="{}", **files), Tokenizer(BPE()))


class PlayedStream:
    """A stream of a turn whose entries are given (``TurnStream``)."""

    def __init__(self, batches: Sequence[list[Token]], counter: Counter) -> None:
        self._batches = batches
        self._counter = counter
        self._sequences = Sequences()

    async def batches(self) -> AsyncGenerator[tuple[int, list[Token]], None]:
        for entries in self._batches:
            self._counter.add(entries)
            for entry in entries:
                self._sequences.add(entry)
            yield 0, entries

    def close(self) -> None:
        pass

    def finished(self) -> list[list[GeneratedSequence]]:
        return [self._sequences.listed()]


def played(planned: Prepared, batches: Sequence[list[Token]]) -> AnswerTurns:
    """The turns of an answer without tools of the bus, whose entries are given."""
    gateway = cast(Gateway, SimpleNamespace(shares=UserShares(8)))
    request = cast(AnswerRequest, SimpleNamespace(bus_tools=[], call_prefix="call_", limit=1000))
    plan = Plan(gateway, request, Conversation([]), planned)
    return AnswerTurns(plan, PlayedStream(batches, plan.counter))


def prepared(
    form: AnswerForm | None, constraint: Constraint | None = None, name: str = "m"
) -> Prepared:
    """A conversation whose answer has a form and a constraint."""
    return Prepared(small_model(name), name, [1], form, constraint, Checks(Templates(), form))
