"""Answers of Anthropic's door put together from entries; its fields and its guide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from tokenbus.clients.gateway.answer_forms import HERMES, Function, Wanted, structure_of
from tokenbus.clients.gateway.answer_parts import AnswerForm
from tokenbus.clients.gateway.anthropic.answers import Answer, CallAnswer, TextAnswer
from tokenbus.clients.gateway.anthropic.bodies import (
    CountTokens,
    CreateMessage,
    OutputConfig,
    Tool,
    ToolChoice,
)
from tokenbus.protocol.messages import Token

FORM = AnswerForm(
    structure_of(HERMES, Wanted([Function("a", {"type": "object"}), Function("b", {})])), {}
)


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
    answer = Answer(FORM, "tools", 1000)
    changes: list[tuple[int, str]] = []
    for at in range(0, len(whole), size):
        changes += answer.add([entry(whole[at : at + size])])
    changes += answer.add([entry("", finish_reason="stop")])
    text, one, two = answer.blocks
    assert isinstance(text, TextAnswer)
    assert isinstance(one, CallAnswer)
    assert isinstance(two, CallAnswer)
    assert text.text == "Let me see."
    assert (one.name, one.input, two.name, two.input) == ("a", {"x": "}"}, "b", {})
    joined = ["".join(new for place, new in changes if place == i) for i in range(3)]
    assert joined == [text.text, '{"x": "}"}', "{}"]
    assert answer.ended.stop_reason == "tool_use"


@pytest.mark.parametrize("form", [None, FORM])
def test_white_space_stays_where_no_call_follows(form: Any) -> None:
    answer = Answer(form, None, 1000)
    for text in ("\n a", " ", "b \n"):
        answer.add([entry(text)])
    answer.add([entry("", finish_reason="stop")])
    assert answer.blocks == [TextAnswer("\n a b \n")]


@pytest.mark.parametrize("kind", [CreateMessage, CountTokens, Tool, ToolChoice, OutputConfig])
def test_every_field_is_in_the_guide(kind: type[Struct]) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "anthropic.md").read_text()
    assert [name for name in kind.__struct_fields__ if f"{name}`" not in guide] == []
