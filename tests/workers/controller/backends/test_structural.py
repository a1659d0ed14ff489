"""The constraint ``structural``: other projects' parsers read the answers of every family of models
as Tokenbus reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
import pytest
from tokenbus.clients.gateway.answer_forms import (
    HERMES,
    Function,
    Rest,
    Schema,
    Thinking,
    Wanted,
    structure_of,
)
from tokenbus.clients.gateway.answer_parts import AnswerForm
from tokenbus.clients.gateway.conversation import answers
from tokenbus.clients.gateway.conversation.parts import Call, of_kind, text_of, thinking_of
from tokenbus.protocol.errors import RequestError
from tokenbus.protocol.structure import Phase, Structure, Tag, special
from tokenbus.workers.controller.backends.llguidance.matchers import Matchers
from tokenbus.workers.controller.backends.llguidance.schema_and_lark import JsonSchemaProgram
from tokenbus.workers.controller.backends.structural.program import StructuralProgram
from tokenbus.workers.controller.backends.structural.structural_controller import (
    StructuralController,
)
from tokenbus.workers.controller.interface import Action

from ..played import BYTES, EOS, vocabulary
from .answer_references import Answer, Read, references
from .answer_walks import FAMILIES, FUNCTIONS, PLACE, Walk, wants
from .llguidance_streams import host

pytestmark = pytest.mark.process

WALKS = 6


@pytest.fixture(scope="module")
def program() -> Iterator[StructuralProgram]:
    matchers = Matchers()
    yield StructuralProgram({"json_schema": JsonSchemaProgram(matchers)})
    matchers.close()


def ours(walk: Walk) -> Read:
    form = AnswerForm(walk.structure, walk.names)
    names, token = walk.names, walk.vocabulary.token
    data = (special(names[t]) if t in names else token(t) for t in walk.tokens)
    answer = answers.Answer(form)
    answer.feed(b"".join(data).decode("utf-8", "surrogateescape"))
    answer.end()
    calls = [(call.name, json.loads(str(call.arguments))) for call in of_kind(answer.parts, Call)]
    thinking = thinking_of(answer.parts) or ""
    return Read(thinking.strip(), text_of(answer.parts).strip(), calls)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_answer_is_read_differently_by_the_familys_own_parser(
    program: StructuralProgram, family: str
) -> None:
    """Drafts do not change an answer."""
    called = thought = drafted = 0
    for wanted in wants(family):
        for seed in range(WALKS):
            walk = Walk(program, family, wanted, seed)
            end = walk.run()
            again = Walk(program, family, wanted, seed)
            assert again.run(walk.tokens) == end
            assert again.tokens == walk.tokens
            drafted += again.drafted
            if end != "complete":
                assert len(walk.tokens) > 350, walk.text
                continue
            found = ours(walk)
            answer = Answer(family, walk.pieces, wanted.thinking)
            for name, read in references(answer, FUNCTIONS):
                assert found == read, f"{name}: {walk.text}"
            assert found.calls or wanted.rest is not None
            called += bool(found.calls)
            thought += bool(found.reasoning)
    assert called
    assert drafted
    assert thought or family == "llama"


def test_thinking_is_closed_when_its_tokens_are_used_up(program: StructuralProgram) -> None:
    wanted = Wanted(thinking="inside", max_thinking_tokens=5)
    walk = Walk(program, "hermes", wanted, 3)
    while walk.step() and "</think>" not in walk.text:
        pass
    thinking = walk.text.partition("</think>")[0]
    assert len(walk.vocabulary.tokenize(thinking.encode())) <= 8 * 5
    assert walk.run() == "complete"
    none = Walk(program, "hermes", Wanted(thinking="inside", max_thinking_tokens=0), 3)
    none.step()
    assert none.text == "\n</think>"


def allowed_after(program: StructuralProgram, tokens: list[bytes], text: str) -> set[bytes]:
    """The tokens that may follow a text in an answer with calls in Hermes's form, or the text that
    the controller appends."""
    on = vocabulary([*BYTES, *tokens])
    structure = structure_of(HERMES, Wanted(FUNCTIONS))
    made = program.start(host(msgspec.json.encode(structure), on))
    made.post_process([1 + byte for byte in text.encode()], 0)
    mask = memoryview(bytearray(4 * -(-on.size // 32)))
    answer = made.mid_process((0,), mask)
    made.close()
    if answer.action is Action.SPLICE:
        return {on.bytes_of(answer.tokens)}
    bits = int.from_bytes(mask, "little")
    return {on.token(t) for t in range(on.size) if bits >> t & 1}


def test_a_trigger_is_recognised_where_a_token_spans_its_end(program: StructuralProgram) -> None:
    spans = [b"call>\n{", b'call>\n{"name": "we', b"call> {", b"x<tool_call>\n", b"</tool_call>!"]
    found = allowed_after(program, spans, "It is <tool_")
    assert {b"call>\n{", b'call>\n{"name": "we', b"x<tool_call>\n", b"hat"[:1]} <= found
    assert b"call> {" not in found
    assert b"</tool_call>!" not in found
    assert allowed_after(program, spans, '<tool_call>\n{"name": "we') >= {b"a", b"t"}
    assert allowed_after(program, spans, "<tool_call>") == {b'\n{"name": "we'}


def test_a_schema_holds_until_the_tag_ends(program: StructuralProgram) -> None:
    inside = '<tool_call>\n{"name": "weather", "arguments": '
    assert allowed_after(program, [], inside + '{"place": "a", "days": 1') == {b"2}"}
    after = inside + '{"place": "a"}'
    assert allowed_after(program, [], after) == {b"}\n</tool_call>"}
    assert b"o" not in allowed_after(program, [], after + "}\n</tool_call>")
    quoted = inside + '{"place": "</tool_call'
    assert b">" not in allowed_after(program, [], quoted)
    assert b"!" in allowed_after(program, [], quoted)


def test_a_fork_goes_its_own_way(program: StructuralProgram) -> None:
    walk = Walk(program, "hermes", Wanted(FUNCTIONS, None, parallel=False), 1)
    for _ in range(4):
        walk.step()
    arg = msgspec.json.encode(walk.structure)
    fork = walk.controller.fork(host(arg, walk.vocabulary, 1, 400))
    before = list(walk.tokens)
    assert walk.run() == "complete"
    assert fork.text_end() == "cut"
    fork.post_process(walk.tokens[len(before) :], 0)
    assert fork.text_end() == "complete"


def test_an_answer_may_be_any_constraint_behind_thinking(program: StructuralProgram) -> None:
    tags = [Tag(begin="<t>", end="</t>", kind="reasoning", then=1)]
    rest = Phase(controller="json_schema", arg={"enum": [12, True]}, may_end=True)
    structure = Structure(phases=[Phase(first=[0]), rest], tags=tags)
    on = vocabulary(BYTES)
    made = program.start(host(msgspec.json.encode(structure), on))
    made.post_process([1 + byte for byte in b"<t>no 1</t>"], 0)
    mask = memoryview(bytearray(4 * -(-on.size // 32)))
    made.mid_process((0,), mask)
    bits = int.from_bytes(mask, "little")
    assert {t for t in range(on.size) if bits >> t & 1} == {1 + ord("1"), 1 + ord("t")}
    made.post_process([1 + byte for byte in b"true"], 0)
    assert made.text_end() == "complete"
    assert made.mid_process((0,), mask).complete or bytes(mask)[0] & 1 << EOS


def value_or_call(program: StructuralProgram, schema: Schema) -> StructuralController:
    """A controller after its answer's thinking. A value of a schema or a call must follow."""
    wanted = Wanted(FUNCTIONS[:1], Rest("json_schema", schema), thinking="inside")
    structure = structure_of(HERMES, wanted)
    made = program.start(host(msgspec.json.encode(structure), vocabulary(BYTES)))
    made.post_process([1 + byte for byte in b"hm\n</think>\n\n"], 0)
    return made


def test_an_answer_does_not_end_inside_the_beginning_of_a_call_in_place_of_a_value(
    program: StructuralProgram,
) -> None:
    made = value_or_call(program, {"enum": [12]})
    mask = memoryview(bytearray(4 * -(-len(BYTES) // 32)))
    made.mid_process((0,), mask)
    bits = int.from_bytes(mask, "little")
    assert {t for t in range(len(BYTES)) if bits >> t & 1} == {1 + ord("1"), 1 + ord("<")}
    made.post_process([1 + ord("<")], 0)
    assert made.text_end() == "cut"
    forced = made.mid_process((0,), mask)
    assert forced.action is Action.SPLICE
    assert bytes(token - 1 for token in forced.tokens).startswith(b'tool_call>\n{"name": ')
    made.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_complete_answer_with_a_schema_has_a_whole_value_or_calls(
    program: StructuralProgram, family: str
) -> None:
    thinking: Thinking = "none" if family == "llama" else "first"
    wanted = Wanted(FUNCTIONS, Rest("json_schema", PLACE), thinking=thinking)
    complete = 0
    for seed in range(WALKS):
        walk = Walk(program, family, wanted, seed)
        if walk.run() == "complete":
            complete += 1
            found = ours(walk)
            assert found.calls or json.loads(found.text), walk.text
    assert complete


def test_a_call_that_was_completed_because_tokens_ran_out_is_closed(
    program: StructuralProgram,
) -> None:
    schema = {**PLACE, "properties": {"place": {"type": "string"}}}
    structure = structure_of(HERMES, Wanted([Function("say", schema)], None, parallel=False))
    arg = msgspec.json.encode(structure)
    made = program.start(host(arg, vocabulary(BYTES), 0, 100))
    mask = memoryview(bytearray(4 * -(-len(BYTES) // 32)))
    text: list[int] = []
    while (answer := made.mid_process((0,), mask)).action is not Action.STOP:
        allowed = int.from_bytes(mask, "little")
        likely = (t for t in (1 + ord("a"), *range(len(BYTES))) if allowed >> t & 1)
        tokens = list(answer.tokens) if answer.action is Action.SPLICE else [next(likely)]
        del text[len(text) - answer.backtrack :]
        made.post_process(tokens, answer.backtrack)
        text += tokens
    assert bytes(t - 1 for t in text).endswith(b'aaa"}}\n</tool_call>')
    assert len(text) <= 100
    assert made.text_end() == made.fork(host(arg, vocabulary(BYTES), 1, 100)).text_end() == "closed"


@pytest.mark.parametrize(
    ("text", "stop", "end"),
    [(b"123", b"3", "complete"), (b"12", b"2", "cut"), (b"<tool_", b"l", "cut")],
)
def test_a_stop_string_ends_a_value_where_its_schema_says_so(
    program: StructuralProgram, text: bytes, stop: bytes, end: str
) -> None:
    made = value_or_call(program, {"enum": [12, 123]})
    mask = memoryview(bytearray(4 * -(-len(BYTES) // 32)))
    for byte in text:
        made.mid_process((0,), mask)
        made.post_process([1 + byte], 0)
    assert made.text_end(stop) == end
    made.close()


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        (b"{", "truncated"),
        (b'{"phases": [], "tags": []}', "there are 0 phases"),
        (b'{"phases": [{"tags": [0], "text": true}], "tags": []}', "the tag 0, which is unknown"),
        (b'{"phases": [{}], "tags": [{"begin": "", "then": 0}]}', "expected 1 to 4096"),
        (b'{"phases": [{}], "tags": [{"begin": "a", "then": 1}]}', "then is 1"),
        (b'{"phases": [{}], "tags": [{"begin": "a", "then": 0}]}', "text content without an end"),
        (b'{"phases": [{"controller": "x"}], "tags": []}', "controller is 'x'"),
        (
            b'{"phases": [{}], "tags": [{"begin": "a", "content": "json", "then": 0, '
            b'"schema": {"type": "objekt"}}]}',
            r"tags\[0\].schema: json_schema: Invalid type: objekt",
        ),
    ],
)
def test_a_wrong_structure_is_refused_with_the_reason(
    program: StructuralProgram, arg: bytes, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        program.start(host(arg, vocabulary(BYTES)))
    assert caught.value.path == "$.controller_arg"
