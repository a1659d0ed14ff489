"""Chat templates are rendered as transformers renders them, in a separate, bounded process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenbus.clients.gateway.bodies.leniency import Ignored
from tokenbus.clients.gateway.conversation.parts import Conversation, Text, Thinking, Turn
from tokenbus.clients.gateway.conversation.rendering import Resources, prompt_ids
from tokenbus.clients.gateway.errors import ApiError
from tokenbus.clients.gateway.models import ServedModel
from tokenbus.clients.gateway.templates.plain_template import PLAIN_TEMPLATE
from tokenbus.clients.gateway.templates.template_process import TemplateFault, render
from tokenbus.clients.gateway.templates.templates import (
    RenderingProcess,
    TemplateError,
    TemplateRefusalError,
    Templates,
)
from tokenbus.clients.gateway.users.turns import Turns, current_user
from tokenbus.protocol.errors import RequestError
from tokenbus.protocol.text_bounds import TokenSize
from transformers.utils.chat_template_utils import render_jinja_template

from .small_model import small_model

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and message.content is string %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content and loop.index0 > ns.last %}
        {{- '<think>' + message.reasoning_content.strip('\\n') + '</think>' }}
    {%- endif %}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
HEADERS = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- for message in messages %}
    {%- generation %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message.role == 'system' %}{{- 'Today: ' + date_string + '\\n' }}{% endif %}
    {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endgeneration %}
{%- endfor %}
{%- if tools is not none %}{{- tools | tojson(indent=4) }}{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
INST = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/…') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.last and system_message is defined %}
            {{- '[INST] ' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
"""
MACRO = """\
{%- macro shown(value, depth=0) -%}
    {%- if value is mapping -%}
        {%- for key, item in value | dictsort -%}
            {{ '  ' * depth }}{{ key }}: {{ shown(item, depth + 1) }}
        {%- endfor -%}
    {%- elif value is string -%}{{ value | upper }}
    {%- elif value is sequence -%}[{{ value | join(', ') }}]
    {%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}
{% set made = dict(a=1, b='<&>') %}
{{ made | tojson }} {{ shown(tools[0].function.parameters) if tools else 'no tools' }}
  {% for m in messages %}
{{ loop.index }}{{ m.role }}={{ m.content.split('\\n') | map('trim') | list }}
  {% endfor %}
{% if documents %}{{ documents | length }} documents{% endif %}
"""
TEMPLATES = {
    "chatml": CHATML,
    "headers": HEADERS,
    "inst": INST,
    "macro": MACRO,
    "plain": PLAIN_TEMPLATE,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a <place>, in °C.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
SHORT = [{"role": "user", "content": "hello  "}]
LONG = [
    {"role": "system", "content": "Be brief & exact."},
    {"role": "user", "content": "one\n two "},
    {"role": "assistant", "content": "ein ", "reasoning_content": "\nhm\n"},
    {"role": "user", "content": "drei «»"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def expected(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    variables: dict[str, Any] = {**SPECIAL, **options}
    rendered: Any = render_jinja_template([messages], chat_template=template, **variables)
    return str(rendered[0][0])


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("messages", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_transformers_renders_it(
    name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, prompt: bool
) -> None:
    template = TEMPLATES[name]
    variables = {**SPECIAL, "tools": tools, "documents": None, "add_generation_prompt": prompt}
    assert render(template, messages, variables) == expected(
        template, messages, tools=tools, add_generation_prompt=prompt
    )


@pytest.mark.parametrize("name", ["chatml", "headers", "plain"])
@pytest.mark.parametrize("content", ["It is", "It is ", "It is\n\n"])
def test_the_last_message_is_continued_as_transformers_does(name: str, content: str) -> None:
    template = TEMPLATES[name]
    messages = [*SHORT, {"role": "assistant", "content": content}]
    variables = {**SPECIAL, "tools": None, "documents": None, "add_generation_prompt": False}
    text = render(template, messages, variables, continue_final_message=True)
    assert text == expected(template, messages, continue_final_message=True)
    assert text.endswith(content.rstrip() if name == "headers" else content)


def test_the_plain_template_names_the_speakers() -> None:
    assert render(PLAIN_TEMPLATE, LONG, {"add_generation_prompt": True}) == (
        "System: Be brief & exact.\nUser: one\n two \nAssistant: ein \nUser: drei «»\nAssistant:"
    )


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for %}", "line 1"),
        ("{{ messages[0].content.nothing.at_all }}", "nothing"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append({}) }}", "unsafe"),
        ("{{ dict.__class__.__mro__ }}", "unsafe"),
        ("{% set ns = namespace(_a=1) %}", "_a"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "__class__"),
        ("{% for i in range(10**9) %}{% endfor %}", "range"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recurs"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_template_that_cannot_be_rendered_says_why(template: str, why: str) -> None:
    with pytest.raises(TemplateFault, match=why):
        render(template, SHORT, {})


@pytest.fixture
def model() -> ServedModel:
    return small_model(chat_template=CHATML, special_tokens=SPECIAL)


@pytest.fixture
async def templates(processes: None) -> AsyncIterator[Templates]:
    templates = Templates(trust_requests=True)
    yield templates
    await templates.close()


@pytest.mark.anyio
async def test_endless_templates_end_and_others_are_rendered_all_the_while(
    model: ServedModel, templates: Templates
) -> None:
    async def given(template: str) -> str:
        return await templates.render(model, SHORT, chat_template=template)

    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    looping = asyncio.create_task(given(loop))
    assert await templates.render(model, SHORT) == expected(
        CHATML, SHORT, add_generation_prompt=True
    )
    with pytest.raises(ApiError, match=r"more than 2 s of CPU time") as caught:
        await looping
    assert caught.value.status == 400
    with pytest.raises(ApiError, match=r"memory"):
        await given("{{ 'a' * 10**12 }}")
    with pytest.raises(ApiError, match=r"at most \d+ are allowed"):
        await given("{{ 'a' * 2**25 }}")
    assert await given("{{ messages[0].role }}, {{ bos_token }}") == "user, <s>"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("{{ raise_exception('no') }}", TemplateRefusalError),
        ("{{ messages[0].content.missing.too }}", TemplateRefusalError),
        ("{{ 'a' * 10**12 }}", TemplateError),
        ("{{ 'a' * 2**25 }}", TemplateError),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", TemplateError),
    ],
)
async def test_messages_are_arranged_only_after_a_refusal(
    model: ServedModel, templates: Templates, template: str, kind: type[TemplateError]
) -> None:
    with pytest.raises(TemplateError) as caught:
        await templates.render(model, SHORT, chat_template=template)
    assert type(caught.value) is kind


@pytest.mark.anyio
async def test_a_request_brings_no_template_unless_it_is_trusted(model: ServedModel) -> None:
    templates = Templates()
    with pytest.raises(ApiError, match="--trust-request-chat-template") as caught:
        await templates.render(model, SHORT, chat_template="{{ messages[0].content }}")
    assert (caught.value.status, caught.value.param) == (400, "chat_template")


@pytest.mark.anyio
async def test_a_client_that_leaves_ends_no_rendering(
    model: ServedModel, templates: Templates
) -> None:
    async def number() -> str:
        template = "{{ messages | length }} {{ raise_exception }}"
        return await templates.render(model, SHORT, chat_template=template)

    same = await number()  # The text has a memory address, which differs between processes.
    leaving = asyncio.create_task(number())
    process = templates._of_requests
    assert isinstance(process, RenderingProcess)
    while not process._asked:
        await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert await number() == same


@pytest.mark.anyio
async def test_users_take_turns() -> None:
    turns, order = Turns(), []

    async def take(user: str, number: int) -> None:
        async with turns.of(user):
            order.append(f"{user}{number}")
            await asyncio.sleep(0)

    async with turns.of("a"):
        waiting = [asyncio.create_task(take("a", number)) for number in range(4)]
        waiting += [asyncio.create_task(take("b", number)) for number in range(2)]
        waiting.append(asyncio.create_task(take("c", 0)))
        await asyncio.sleep(0)
        waiting.pop(1).cancel()
    await asyncio.gather(*waiting)
    assert order == ["a0", "b0", "c0", "a2", "b1", "a3"]
    await take("d", 0)


@pytest.mark.anyio
async def test_a_request_is_encoded_in_its_turn() -> None:
    process, encoded = RenderingProcess(), []

    def request() -> bytes:
        encoded.append(True)
        raise ValueError

    async with process._turns.of("ann"):
        asked = asyncio.create_task(process.ask(request))
        while not process._turns._waiting:
            await asyncio.sleep(0)
        assert not encoded
    with pytest.raises(ValueError):
        await asked
    assert encoded


@pytest.mark.anyio
async def test_requests_and_answers_have_the_characters_in_utf_8(
    model: ServedModel, templates: Templates, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\U0001f600" * 100_000
    sizes: list[int] = []
    exchange = RenderingProcess._exchange

    async def measured(self: RenderingProcess, request: bytes) -> bytes:
        answer = await exchange(self, request)
        sizes.extend((len(request), len(answer)))
        return answer

    monkeypatch.setattr(RenderingProcess, "_exchange", measured)
    messages = [{"role": "user", "content": text}]
    template = "{{ messages[0].content }}"
    assert await templates.render(model, messages, chat_template=template) == text
    assert max(sizes) < len(text.encode()) + 1_000


@pytest.mark.anyio
async def test_a_conversation_whose_texts_cannot_fit_is_not_rendered(model: ServedModel) -> None:
    model.token_size = TokenSize(1000, shortens=False)
    conversation = Conversation([Turn("user", [Text("a" * 4000)])] * 5)
    nothing = cast(Resources, SimpleNamespace(templates=None))
    with pytest.raises(RequestError, match="the text has 20000 bytes or more") as caught:
        await prompt_ids(nothing, model, conversation, Ignored())
    assert caught.value.code == "prompt_too_long"


@pytest.mark.anyio
@pytest.mark.parametrize("template", [None, "{{ messages[-1].content }}"])
async def test_text_that_a_template_may_leave_out_is_not_counted_before(
    model: ServedModel, templates: Templates, template: str | None
) -> None:
    model.token_size = TokenSize(1000, shortens=False)
    long = "a" * 20_000
    left_out = Turn("assistant", [Thinking(long)] if template is None else [Text(long)])
    conversation = Conversation([left_out, Turn("user", [Text("b")])])
    conversation.rendering.chat_template = template
    resources = cast(Resources, SimpleNamespace(templates=templates))
    assert await prompt_ids(resources, model, conversation, Ignored()) == []


@pytest.mark.anyio
async def test_one_user_s_renderings_leave_room_for_those_of_others(
    model: ServedModel, templates: Templates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenbus.clients.gateway.templates.templates.MAX_OF_ONE", 2)

    async def given(user: str, text: str) -> str:
        current_user.set(user)
        return await templates.render(model, SHORT, chat_template=text)

    first = [asyncio.create_task(given("ann", text)) for text in "xy"]
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match=r"2 of them are yours \(at most 2\)") as full:
        await asyncio.create_task(given("ann", "z"))
    assert (full.value.status, full.value.code) == (429, "client_limit")
    assert await asyncio.create_task(given("bob", "z")) == "z"
    assert await asyncio.gather(*first) == ["x", "y"]
    assert await asyncio.create_task(given("ann", "z")) == "z"


@pytest.mark.anyio
async def test_the_renderings_of_two_users_leave_room_for_those_of_a_third(
    model: ServedModel, templates: Templates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenbus.clients.gateway.templates.templates.MAX_WAITING", 8)
    monkeypatch.setattr("tokenbus.clients.gateway.templates.templates.MAX_OF_ONE", 4)

    async def given(user: str) -> str:
        current_user.set(user)
        return await templates.render(model, SHORT, chat_template=user)

    users = [*(["ann"] * 4), *(["bob"] * 4), "cid"]
    tasks = [asyncio.create_task(given(user)) for user in users]
    *_, third, fourth, cid = await asyncio.gather(*tasks, return_exceptions=True)
    assert [cast(ApiError, error).status for error in (third, fourth)] == [429, 429]
    assert cid == "cid"
