"""If a chat template refuses the order of an agent's messages, the gateway rearranges them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tokenbus.clients.gateway.conversation.order import arrangements
from tokenbus.clients.gateway.conversation.parts import Call, Result, Text, Turn
from tokenbus.clients.gateway.conversation.rendering import for_template
from tokenbus.clients.gateway.templates.template_process import TemplateFault, render

from ...processes import Gateway
from ...work import num_calls
from .openai_requests import MODEL

ALTERNATING = """
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- for m in rest %}
{%- if m.role == 'system' %}{{ raise_exception('a late system message') }}{% endif %}
{%- if m.role == 'user' and loop.previtem and loop.previtem.role in ('user', 'tool') %}
{{- raise_exception('roles must alternate') }}{% endif %}
{%- endfor %}
{%- for m in messages %}{{ m.role + ': ' + m.content + '|' }}{% endfor %}"""
"""A template as strict as those of the Mistral family."""
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    + ALTERNATING
)
"""A template as strict as those of the Gemma family."""


def turn(role: Any, text: str) -> Turn:
    return Turn(role, [Text(text)])


def rendered(template: str, turns: list[Turn]) -> list[str]:
    """Renders all arrangements of the turns. Leaves out arrangements that the template refuses."""
    found = []
    for arranged in arrangements(turns):
        try:
            found.append(render(template, for_template(arranged), {}))
        except TemplateFault:
            continue
    return found


LATE = [turn("user", "a"), turn("system", "s"), turn("user", "b"), turn("system", "t")]
CALLED = [
    turn("system", "s"),
    turn("user", "a"),
    Turn("assistant", [Call("1", "f", "{}"), Call("2", "f", "{}")]),
    Turn("user", [Result("1", [Text("r")])]),
    Turn("user", [Result("2", [Text("q")]), Text("go on")]),
]


@pytest.mark.parametrize("part", [Text(""), Call("1", "f", "{}")])
def test_the_work_of_an_arrangement_is_linear_in_the_messages(part: Text | Call) -> None:
    def work(count: int) -> int:
        turns = [Turn("assistant", [part]) for _ in range(count)]
        return num_calls(lambda: list(arrangements(turns)))

    assert work(1_600) < 10 * work(200)


def test_an_order_that_a_template_accepts_is_not_changed() -> None:
    assert next(arrangements(LATE)) == LATE
    briefed = [turn("system", "s"), turn("user", "a")]
    assert next(arrangements(briefed)) == briefed
    assert len(list(arrangements([turn("user", "a")]))) == 1


def test_system_messages_are_hoisted_and_neighbours_of_one_role_are_merged() -> None:
    assert rendered(ALTERNATING, LATE)[0] == "system: s\n\nt|user: a\n\nb|"
    twice = [turn("user", "a"), turn("assistant", "b"), turn("assistant", "c"), turn("user", "d")]
    assert list(arrangements(twice))[1] == [
        turn("user", "a"),
        turn("assistant", "b\n\nc"),
        turn("user", "d"),
    ]


def test_without_a_system_role_the_text_is_the_beginning_of_the_first_message() -> None:
    assert rendered(NO_SYSTEM, LATE) == ["user: s\n\nt\n\na\n\nb|"]


def test_a_text_after_results_joins_the_last_result_if_roles_must_alternate() -> None:
    joined = "user: a|assistant: |tool: r|tool: q\n\ngo on|"
    assert rendered(ALTERNATING, CALLED[1:]) == [joined]
    assert rendered(ALTERNATING, CALLED)[0] == f"system: s|{joined}"


@pytest.mark.process
def test_a_request_is_arranged_only_if_its_template_refuses_it(gateway: Gateway) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "developer", "content": "s"},
        {"role": "user", "content": "b"},
    ]

    def prompt(template: str) -> str:
        asked = {"model": MODEL, "messages": messages, "chat_template": template}
        ids = httpx.post(f"{gateway.url}/tokenize", json=asked, timeout=300).json()["tokens"]
        text = httpx.post(f"{gateway.url}/detokenize", json={"tokens": ids}, timeout=300).json()
        assert isinstance(text["prompt"], str)
        return text["prompt"]

    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '|' }}{% endfor %}"
    assert prompt(plain) == "user: a|system: s|user: b|"
    assert prompt(plain + "{# developer #}") == "user: a|developer: s|user: b|"
    assert prompt(ALTERNATING) == "system: s|user: a\n\nb|"
    asked = {"messages": messages, "chat_template": "{{ raise_exception('never') }}"}
    refused = httpx.post(f"{gateway.url}/tokenize", json=asked, timeout=300)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "chat_template_error")
