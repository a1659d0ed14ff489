"""The chat template determines the form of answers, and a text in this form is split into parts."""

from __future__ import annotations

import itertools
import json
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenbus.clients.gateway.answer_forms import (
    DEEPSEEK,
    DEEPSEEK_FENCED,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_LIST,
    MISTRAL_SPACED_LIST,
    Family,
    Function,
    Rest,
    Wanted,
    family_of,
    structure_of,
    thinking_of,
)
from tokenbus.clients.gateway.answer_parts import AnswerForm
from tokenbus.clients.gateway.conversation import parts
from tokenbus.clients.gateway.conversation.answers import Answer
from tokenbus.clients.gateway.templates.plain_template import PLAIN_TEMPLATE

from ...counts import examples

FUNCTIONS = [Function("weather", {"type": "object"}), Function("pi_ng", {"type": "object"})]
FORMS = {
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mistral, list": MISTRAL_LIST,
    "deepseek": DEEPSEEK,
    "deepseek, fenced": DEEPSEEK_FENCED,
}


def written(family: Family, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The text of calls in the form of a family of models."""
    if not calls:
        return ""
    texts = [
        family.head
        + (json.dumps(name) if family.quoted else name)
        + family.middle
        + json.dumps(arguments)
        + family.tail
        for name, arguments in calls
    ]
    return family.opening + family.between.join(texts) + family.closing


class Read(NamedTuple):
    text: str
    reasoning: str
    calls: list[tuple[str, Any]]


def read(family: Family, wanted: Wanted, pieces: list[str]) -> Read:
    return read_form(AnswerForm(structure_of(family, wanted), {}), pieces)


def read_form(form: AnswerForm, pieces: list[str]) -> Read:
    answer = Answer(form)
    changes = [change for piece in pieces for change in answer.feed(piece)] + answer.end()
    calls = parts.of_kind(answer.parts, parts.Call)
    assert answer.called == bool(calls)
    for place, part in enumerate(answer.parts):
        changed = "".join(change.text for change in changes if change.place == place)
        assert changed == (part.arguments if isinstance(part, parts.Call) else part.text)
    return Read(
        parts.text_of(answer.parts),
        parts.thinking_of(answer.parts) or "",
        [(call.name, json.loads(str(call.arguments))) for call in calls],
    )


def test_the_form_is_that_of_the_template() -> None:
    assert family_of(PLAIN_TEMPLATE) is HERMES
    assert family_of("{{ tools }}<tool_call>…") is HERMES
    assert family_of("{{ messages }}") is HERMES
    llama = 'Respond in the format {"name": function name, "parameters": dictionary …}.'
    assert family_of(llama) is LLAMA
    assert family_of("{{ '[TOOL_CALLS] [' }}") is MISTRAL_SPACED_LIST
    assert family_of("{{ '[TOOL_CALLS][' }}") is MISTRAL_LIST
    assert family_of("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}") is MISTRAL
    assert family_of(f"{DEEPSEEK.opening}{DEEPSEEK.head}") is DEEPSEEK
    assert family_of(f"{DEEPSEEK.opening}{DEEPSEEK.head}'\n```json\n'") is DEEPSEEK_FENCED
    assert family_of("<|start|>assistant<|channel|>final<|message|>") is HARMONY


def test_an_answer_begins_with_thinking_where_the_template_knows_it() -> None:
    template = "{% if '</think>' in content %}…"
    assert thinking_of("{{ messages }}", "assistant\n") == "none"
    assert thinking_of(template, "assistant\n") == "first"
    assert thinking_of(template, "assistant\n<think>\n") == "inside"
    assert thinking_of(template, "<think>\n\n</think>\n\n") == "first"


texts = st.text(st.sampled_from('<tool_cal>{"name: \\}x]'), max_size=20)
values = st.recursive(
    texts | st.integers(0, 9),
    lambda some: st.lists(some, max_size=3) | st.dictionaries(texts, some, max_size=3),
    max_leaves=8,
)
names = st.sampled_from([function.name for function in FUNCTIONS])
some_calls = st.lists(st.tuples(names, st.dictionaries(texts, values, max_size=3)), max_size=3)
thoughts = st.none() | st.text(st.sampled_from("</think> x"), max_size=12)


@pytest.mark.parametrize("family", FORMS.values(), ids=FORMS)
@settings(max_examples=examples(20))
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1), before=texts, calls=some_calls, thought=thoughts
)
def test_an_answer_is_read_back_however_it_is_cut(
    family: Family,
    sizes: list[int],
    before: str,
    calls: list[tuple[str, dict[str, Any]]],
    thought: str | None,
) -> None:
    if family.first_only:
        before = before.replace("{", "") if not calls else ""
    for marker in (family.trigger, *family.never):
        before = before.replace(marker, "")
    if any(never in json.dumps(calls) for never in family.never):
        calls = []
    thought = None if thought is None else thought.replace("think>", "")
    wanted = Wanted(FUNCTIONS, thinking="none" if thought is None else "first")
    start = "" if thought is None else f"<think>\n{thought}</think>"
    answer = start + before + written(family, calls)
    pieces, rest = [], answer
    for size in itertools.cycle(sizes):
        pieces.append(rest[:size])
        rest = rest[size:]
        if not rest:
            break
    found = read(family, wanted, pieces)
    assert found.text.strip() == before.strip()
    assert found.reasoning == (thought or "").strip()
    assert found.calls == calls


def test_text_behind_the_beginning_of_a_tag_is_text_after_all() -> None:
    found = read(HERMES, Wanted(FUNCTIONS), ["a <tool", " b <tool_cal"])
    assert found.text == "a <tool b <tool_cal"
    found = read(HERMES, Wanted(thinking="first"), ["<thi", "s>"])
    assert (found.text, found.reasoning) == ("<this>", "")


def test_white_space_alone_before_a_call_is_no_text() -> None:
    call = written(HERMES, [("pi_ng", {})])
    assert read(HERMES, Wanted(FUNCTIONS), ["\n\n", call]).text == ""
    assert read(HERMES, Wanted(FUNCTIONS), [" \n a b \n"]).text == " \n a b \n"


def test_thinking_that_the_prompt_began_is_read_from_the_first_token_on() -> None:
    found = read(HERMES, Wanted(thinking="inside"), ["hm", "\n</thi", "nk>\n\nYes."])
    assert (found.reasoning, found.text) == ("hm", "Yes.")
    assert read(HERMES, Wanted(thinking="inside"), ["cut he"]).reasoning == "cut he"


def test_special_tokens_are_told_from_text_that_looks_like_them() -> None:
    form = AnswerForm(structure_of(MISTRAL, Wanted(FUNCTIONS)), {7: "[TOOL_CALLS]", 8: "[ARGS]"})
    marks = {name: f"\udcff{name}\udcff" for name in ("[TOOL_CALLS]", "[ARGS]")}
    text = f"the [TOOL_CALLS] {marks['[TOOL_CALLS]']}weather{marks['[ARGS]']}{{}}"
    found = read_form(form, [text])
    assert (found.text, found.calls) == ("the [TOOL_CALLS]", [("weather", {})])


def test_channels_of_harmony_are_parts() -> None:
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.pi_ng <|constrain|>json<|message|>{"a": 1}'
    )
    found = read(HARMONY, Wanted(FUNCTIONS, thinking="first"), [text])
    assert (found.reasoning, found.text, found.calls) == ("hm", "", [("pi_ng", {"a": 1})])
    final = "<|channel|>final<|message|>Hello."
    assert read(HARMONY, Wanted(rest=Rest(), thinking="first"), [final]).text == "Hello."
