"""Answers of the Messages API are built from entries, and the docs have all fields of requests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from tokenbus.clients.gateway.answer_forms import HERMES, Function, Wanted, structure_of
from tokenbus.clients.gateway.answer_parts import AnswerForm
from tokenbus.clients.gateway.anthropic.answers import MessageAnswer
from tokenbus.clients.gateway.anthropic.bodies import (
    CountTokens,
    CreateMessage,
    OutputConfig,
    Tool,
    ToolChoice,
)
from tokenbus.clients.gateway.anthropic.content import TextBlock, ToolUseBlock
from tokenbus.clients.gateway.anthropic.messages import MessageJob
from tokenbus.clients.gateway.conversation.answers import Piece
from tokenbus.clients.gateway.conversation.constraints import Constraint, Receipt
from tokenbus.protocol.messages import Token

from .small_model import played, prepared

FORM = AnswerForm(
    structure_of(HERMES, Wanted([Function("a", {"type": "object"}), Function("b", {})])), {}
)


def message_of(
    entries: list[Token], form: AnswerForm | None, constraint: Constraint | None = None
) -> tuple[MessageAnswer, list[Piece]]:
    """The message that these entries make, and the changes of its parts."""
    turns = played(prepared(form, constraint), [[one] for one in entries])
    job = MessageJob(turns)
    pieces: list[Piece] = []

    async def read() -> None:
        async for changes in job.changes():
            pieces.extend(change for _, change in changes if isinstance(change, Piece))

    asyncio.run(read())
    return job.answers.message(), pieces


def entry(text: str, **more: Any) -> Token:
    fields: dict[str, Any] = {"finish_reason": None, **more}
    return Token(token=1, stream_id=0, logprob=-1.0, text=text, **fields)


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_text_is_followed_by_calls(size: int) -> None:
    whole = (
        "Let me see. \n\n<tool_call>\n"
        '{"name": "a", "arguments": {"x": "}"}}\n</tool_call>\n<tool_call>\n'
        '{"name": "b", "arguments": {}}\n</tool_call>'
    )
    entries = [entry(whole[at : at + size]) for at in range(0, len(whole), size)]
    entries.append(entry("", finish_reason="stop", constraint="complete"))
    constraint = Constraint("tools", "structural", None, "tools")
    message, changes = message_of(entries, FORM, constraint)
    text, one, two = message.content
    assert text == TextBlock(text="Let me see.")
    assert isinstance(one, ToolUseBlock)
    assert isinstance(two, ToolUseBlock)
    assert (one.name, one.input, two.name, two.input) == ("a", {"x": "}"}, "b", {})
    joined = ["".join(new.text for new in changes if new.place == i) for i in range(3)]
    assert joined == ["Let me see.", '{"x": "}"}', "{}"]
    assert message.stop_reason == "tool_use"
    assert message.tokenbus == Receipt(constraint="tools", ended="complete")


@pytest.mark.parametrize("form", [None, FORM])
def test_white_space_stays_where_no_call_follows(form: Any) -> None:
    entries = [entry(text) for text in ("\n a", " ", "b \n")]
    message, _ = message_of([*entries, entry("", finish_reason="stop")], form)
    assert message.content == [TextBlock(text="\n a b \n")]


@pytest.mark.parametrize(("ended", "reason"), [("complete", "tool_use"), ("closed", "max_tokens")])
def test_complete_calls_at_the_token_limit_can_be_made(ended: Any, reason: str) -> None:
    """Calls that were closed before the limit may lack a part of their arguments."""
    call = '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>'
    entries = [entry(call)] * 1 + [entry("", finish_reason="length", constraint=ended)]
    entries[1:1] = [entry("")] * 998
    message, _ = message_of(entries, FORM, Constraint("tools", "structural", None, "tools"))
    assert message.stop_reason == reason


@pytest.mark.parametrize("kind", [CreateMessage, CountTokens, Tool, ToolChoice, OutputConfig])
def test_every_field_is_in_the_guide(kind: type[Struct]) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "anthropic.md").read_text()
    assert [name for name in kind.__struct_fields__ if f"{name}`" not in guide] == []
