"""How a text ended under a built-in constraint: complete, closed in time, or cut."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from tokenbus.clients import Client, GeneratedSequence, RequestError, RequestTimeoutError
from tokenbus.clients.client import Stream
from tokenizers import Tokenizer

from ....clients.wasm_guests import guest
from ....processes import Bus, until

pytestmark = pytest.mark.process

PROMPT = "x = "


@pytest.fixture
def client(steered: Bus) -> Iterator[Client]:
    with steered.client() as client:
        yield client


def ended(client: Client, controller: str, arg: Any, **options: Any) -> GeneratedSequence:
    """The only sequence of a request. Fails if an entry before the last one says how the text
    ended."""
    stream = client.generate(PROMPT, controller=controller, controller_arg=arg, **options)
    *before, _ = list(stream)
    assert all(entry.constraint is None for entry in before)
    [sequence] = stream.sequences
    return sequence


@pytest.mark.parametrize(
    ("controller", "arg", "text"),
    [
        ("regex", "[0-9]{3}", "[0-9]{3}"),
        ("choice", ["yes", "yesterday", "no"], "yes|yesterday|no"),
        ("substring", {"text": "ab"}, "a?b?"),
        ("yacc", '%start s\n%%\ns: "a" "b";', "ab"),
        ("json_schema", {"enum": [1, [2, 3]]}, r"1|\[2, ?3\]"),
        ("lark", 'start: "a" "b"?', "ab?"),
        ("combination", {"sequence": ["a", {"regex": "b{2}"}]}, "abb"),
        (
            "combination",
            {"sequence": ["a", {"json_schema": {"const": 7}}, {"regex": "c?"}]},
            "a7c?",
        ),
    ],
    ids=str,
)
def test_a_whole_value_is_complete(client: Client, controller: str, arg: Any, text: str) -> None:
    sequence = ended(client, controller, arg, max_tokens=60)
    assert re.fullmatch(text, sequence.text)
    assert (sequence.finish_reason, sequence.constraint) == ("stop", "complete")


@pytest.mark.parametrize(
    ("controller", "arg"),
    [
        ("regex", "[0-9]{200}"),
        ("yacc", '%start s\n%%\ns: "a" s "longenoughtoneedmanytokens" | "b" "b" "b" "b" "b" "b";'),
        ("combination", {"sequence": ["a", {"json_schema": {"type": "string", "minLength": 90}}]}),
    ],
    ids=str,
)
def test_a_value_that_does_not_fit_is_cut(client: Client, controller: str, arg: Any) -> None:
    sequence = ended(client, controller, arg, max_tokens=4)
    assert (sequence.finish_reason, sequence.constraint) == ("length", "cut")


@pytest.mark.parametrize(
    ("controller", "arg"),
    [("json_schema", {"type": "string", "minLength": 100}), ("lark", "start: /[a-z]{100}/")],
    ids=str,
)
def test_a_schema_or_a_grammar_whose_shortest_text_does_not_fit_is_refused(
    client: Client, controller: str, arg: Any
) -> None:
    with pytest.raises(RequestError, match=r"max_tokens is 4, but the shortest text takes \d+"):
        ended(client, controller, arg, max_tokens=4)


NESTED = '%start s\n%%\ns: "[" s "]" | "[" "]" ;'


@pytest.mark.parametrize(
    ("controller", "arg"),
    [
        ("yacc", NESTED),
        ("lark", 'start: "[" start "]" | "[" "]"'),
        ("combination", {"sequence": ["go ", {"yacc": NESTED}]}),
        ("combination", {"sequence": ["go ", {"lark": 'start: "[" start "]" | "[" "]"'}]}),
    ],
    ids=["yacc", "lark", "combination", "combination with lark"],
)
def test_a_value_with_its_shortest_completion_is_closed(
    client: Client, controller: str, arg: Any
) -> None:
    bias = {first_token(client, "["): 100.0}
    sequence = ended(client, controller, arg, max_tokens=30, logit_bias=bias)
    assert re.fullmatch(r"(go )?\[+\]+", sequence.text)
    assert sequence.text.count("[") == sequence.text.count("]") > 4
    assert sequence.constraint == "closed"
    assert "closed with" in sequence.logs


def test_a_value_that_is_whole_where_its_tokens_end_is_complete(client: Client) -> None:
    for controller, arg in (("regex", "[ab]+"), ("lark", "start: /[ab]+/")):
        sequence = ended(client, controller, arg, max_tokens=6, ignore_eos=True)
        assert re.fullmatch("[ab]+", sequence.text)
        assert sequence.constraint == "complete"
        assert "0 more tokens" not in sequence.logs


def test_the_log_of_a_complete_value_does_not_say_that_it_was_closed(client: Client) -> None:
    sequence = ended(client, "regex", "[0-9]{3,}", max_tokens=6)
    assert sequence.constraint == "complete"
    assert sequence.logs == "the text was ended here, where it is complete: max_tokens is 6\n"


@pytest.mark.parametrize("max_tokens", [4, 5])
def test_the_log_of_a_value_that_cannot_continue_does_not_name_max_tokens(
    client: Client, max_tokens: int
) -> None:
    sequence = ended(client, "regex", "[0-9]{3}", max_tokens=max_tokens)
    assert (sequence.constraint, sequence.logs) == ("complete", "")


def first_token(client: Client, text: str) -> int:
    ids: list[int] = Tokenizer.from_str(client.tokenizer().json).encode(text).ids
    return ids[-1]


def test_the_models_end_of_sequence_ends_a_complete_value(client: Client) -> None:
    [eos, *_] = client.model_info().eos_token_ids
    for controller, arg in (("regex", "a[ab]*"), ("lark", "start: /a[ab]*/")):
        sequence = ended(client, controller, arg, max_tokens=30, logit_bias={eos: 100.0})
        assert sequence.text == "a"
        assert (sequence.finish_reason, sequence.constraint) == ("stop", "complete")


@pytest.mark.parametrize(
    ("controller", "arg", "constraint"),
    [
        ("regex", r"\{\}\{[a-z]*", "cut"),
        ("regex", r"\{(\}\{[a-z]*)?", "complete"),
        ("yacc", '%start s\n%%\ns: "{" | "{" "}" "{" a;\na: | "a" a;', "complete"),
        ("lark", r"start: /\{\}\{[a-z]*/", "cut"),
        ("lark", r"start: /\{(\}\{[a-z]*)?/", "complete"),
        ("combination", {"sequence": ["{", {"regex": r"\}\{[a-z]*"}]}, "cut"),
        ("combination", {"sequence": ["{", {"lark": r"start: /(\}\{[a-z]*)?/"}]}, "complete"),
    ],
    ids=str,
)
def test_at_a_stop_string_the_text_before_it_is_judged(
    client: Client, controller: str, arg: Any, constraint: str
) -> None:
    ids = Tokenizer.from_str(client.tokenizer().json).get_vocab()
    bias = {number: 100.0 for piece, number in ids.items() if set(piece) <= set("{}")}
    sequence = ended(client, controller, arg, stop=["}{"], logit_bias=bias)
    assert (sequence.text, sequence.finish_reason) == ("{", "stop")
    assert sequence.constraint == constraint


def test_at_a_stop_token_a_value_may_be_complete(client: Client) -> None:
    a = first_token(client, "a")
    for pattern, constraint in (("[xa]b*", "complete"), ("[xa]b{9}", "cut")):
        sequence = ended(client, "regex", pattern, stop=[a], logit_bias={a: 100.0})
        assert (sequence.text, sequence.finish_reason) == ("a", "stop")
        assert sequence.constraint == constraint


@pytest.mark.parametrize(
    ("controller", "make"),
    [
        ("regex", lambda pattern: pattern),
        ("lark", lambda pattern: f"start: /{pattern}/"),
        ("combination", lambda p: {"sequence": [{"lark": 'start: "("'}, {"regex": p}]}),
    ],
    ids=["regex", "lark", "combination"],
)
@pytest.mark.parametrize("stop", [[], ["b", "5", "l"]], ids=["no stop", "stop"])
def test_a_value_is_cut_exactly_where_its_text_does_not_match(
    client: Client, controller: str, make: Any, stop: list[str]
) -> None:
    patterns = [r"[a-c]{2,9}", r"(ab|b[0-9]+c)*d?", r"\d+(\.\d{2})?", r"(if |else )+x"]
    found: set[str | None] = set()
    streams = [
        (
            pattern,
            client.generate(
                PROMPT,
                controller=controller,
                controller_arg=make(pattern),
                max_tokens=length,
                temperature=1.5,
                seed=length,
                n=2,
                stop=stop,
            ),
        )
        for pattern, length in itertools.product(patterns, (1, 2, 3, 5, 8, 13))
    ]
    for pattern, stream in streams:
        try:
            sequences = stream.wait()
        except RequestError:
            # The shortest text has more than ``max_tokens`` tokens.
            found.add("cut" if controller == "lark" else None)
            continue
        for sequence in sequences:
            whole = pattern if controller != "combination" else rf"\({pattern}"
            matches = re.fullmatch(whole, sequence.text) is not None
            assert matches == (sequence.constraint in ("complete", "closed")), sequence
            found.add(sequence.constraint)
    assert found >= {"complete", "cut"}
    assert None not in found


def test_a_json_text_is_cut_exactly_where_it_cannot_be_parsed(client: Client) -> None:
    streams = [
        client.generate(
            PROMPT,
            controller=controller,
            controller_arg=arg,
            max_tokens=length,
            temperature=1.5,
            seed=length,
        )
        for controller, arg in (("yacc", "json"), ("json_schema", {"type": "object"}))
        for length in (1, 3, 6, 12, 24, 48)
    ]
    for stream in streams:
        [sequence] = stream.wait()
        try:
            json.loads(sequence.text)
        except ValueError:
            assert sequence.constraint == "cut", sequence
        else:
            assert sequence.constraint in ("complete", "closed"), sequence


def test_a_request_that_times_out_has_no_whole_value_unless_it_is_known(client: Client) -> None:
    found: list[Stream] = []

    def timed_out() -> bool:
        """Runs a request; returns whether a request has timed out so far. While the operating
        system does not run the broker, no request times out."""
        stream = client.generate(
            PROMPT,
            controller="regex",
            controller_arg="[a-z]{900}",
            max_tokens=950,
            timeout_s=0.2,
            n=32,
        )
        try:
            stream.wait()
        except RequestTimeoutError:
            found.append(stream)
        return bool(found)

    until(timed_out, 300.0, "a request that times out")
    assert all(s.constraint in (None, "cut") for s in found[0].sequences)


def test_a_module_and_an_unconstrained_request_have_none(client: Client) -> None:
    module = client.upload_controller(guest(mid="nop nop nop")).module
    for stream in (
        client.generate(PROMPT, max_tokens=3, controller=module),
        client.generate(PROMPT, max_tokens=3),
    ):
        [sequence] = stream.wait()
        assert sequence.constraint is None
