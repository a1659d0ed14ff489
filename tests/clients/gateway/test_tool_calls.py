"""Tool calls: what their grammar allows, and how the text of an answer is split."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenbus.clients.gateway.plain_template import PLAIN_TEMPLATE
from tokenbus.clients.gateway.tool_calls import (
    HERMES,
    LLAMA,
    Arguments,
    CallBegin,
    CallForm,
    CallReader,
    Function,
    Part,
    Text,
    form_of,
    tool_grammar,
)

from ...counts import examples

PLACE = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["place"],
    "additionalProperties": False,
}
FUNCTIONS = [Function("weather", PLACE), Function("pi ng", {"type": "object"})]
BYTES = LLTokenizer("byte")
FORMS = {"hermes": HERMES, "llama": LLAMA}


def call(form: CallForm, name: str, arguments: dict[str, Any]) -> str:
    return form.opening + json.dumps(name) + form.middle + json.dumps(arguments) + form.closing


def accepts(grammar: str, text: str) -> bool:
    grammar = json.dumps({"grammars": [{"lark_grammar": grammar}]})
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = text.encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


def read(form: CallForm, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The text outside calls, and the name and arguments of each call."""
    reader = CallReader(form)
    parts: list[Part] = [part for piece in pieces for part in reader.feed(piece)]
    parts += reader.end()
    text = ""
    calls: list[tuple[str, str]] = []
    for part in parts:
        match part:
            case Text(more):
                text += more
            case CallBegin(number, name):
                assert number == len(calls)
                calls.append((name, ""))
            case Arguments(number, more):
                assert number == len(calls) - 1
                calls[number] = (calls[number][0], calls[number][1] + more)
    assert reader.called == bool(calls)
    return text, calls


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_calls_are_held_to_their_schemas(form: CallForm) -> None:
    good = call(form, "weather", {"place": 'a}"]', "days": 2})
    both = good + form.between + call(form, "pi ng", {})
    wrong = [
        call(form, "weather", {"days": 2}),
        call(form, "weather", {"place": 1}),
        call(form, "weather", {"place": "x", "more": 1}),
        call(form, "other", {}),
        good[:-1],
        good + "x",
    ]
    for text in (True, False):
        grammar = tool_grammar(form, FUNCTIONS, text=text, parallel=True)
        assert accepts(grammar, good)
        assert accepts(grammar, both)
        assert accepts(grammar, "It is <tool warm.") == text
        assert accepts(grammar, "") == text
        assert not any(accepts(grammar, one) for one in wrong)
    single = tool_grammar(form, FUNCTIONS, text=False, parallel=False)
    assert accepts(single, good)
    assert not accepts(single, both)


def test_text_may_precede_a_call_in_the_form_with_a_trigger() -> None:
    grammar = tool_grammar(HERMES, FUNCTIONS, text=True, parallel=True)
    assert accepts(grammar, "Let me see.\n" + call(HERMES, "pi ng", {"any": [1]}))
    assert not accepts(grammar, "Let me see <tool_call> and tell")


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_answer_without_a_call_may_have_a_schema(form: CallForm) -> None:
    grammar = tool_grammar(form, FUNCTIONS, text=True, parallel=True, answer=PLACE)
    assert accepts(grammar, '{"place": "x"}')
    assert accepts(grammar, call(form, "weather", {"place": "x"}))
    assert not accepts(grammar, "free text")
    assert read(form, ['{"pl', 'ace": "x"}']) == ('{"place": "x"}', [])


def test_the_form_is_that_of_the_template() -> None:
    assert form_of(PLAIN_TEMPLATE) is HERMES
    assert form_of("{{ tools }}<tool_call>…") is HERMES
    assert form_of("{{ messages }}") is HERMES
    llama = 'Respond in the format {"name": function name, "parameters": dictionary …}.'
    assert form_of(llama) is LLAMA


texts = st.text(st.sampled_from('<tool_cal>{"name: \\}x]'), max_size=20)
values = st.recursive(
    texts | st.integers(0, 9),
    lambda some: st.lists(some, max_size=3) | st.dictionaries(texts, some, max_size=3),
    max_leaves=8,
)
some_calls = st.lists(st.tuples(texts, st.dictionaries(texts, values, max_size=3)), max_size=3)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@settings(max_examples=examples(20))
@given(sizes=st.lists(st.integers(1, 12), min_size=1), before=texts, calls=some_calls)
def test_an_answer_is_read_back_however_it_is_cut(
    form: CallForm, sizes: list[int], before: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    if form.first_only:
        before = before.replace("{", "") if not calls else ""
    before = before.replace(form.trigger, "")
    written = [call(form, name, arguments) for name, arguments in calls]
    answer = before + form.between.join(written)
    pieces = []
    for size in itertools.cycle(sizes):
        pieces.append(answer[:size])
        answer = answer[size:]
        if not answer:
            break
    text, found = read(form, pieces)
    assert text == before
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
