"""The constraints ``regex`` and ``yacc``: masks of their controllers, and streams through a whole
system."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenbus.clients import Client, ControllerError, RequestError
from tokenbus.grammars import library
from tokenbus.grammars.regex import compile_regex
from tokenbus.grammars.yacc import Recognizer, compile_grammar
from tokenbus.protocol.errors import UnavailableError
from tokenbus.workers.controller.backends.compiling.turns import Turns
from tokenbus.workers.controller.backends.constraints import Constraints
from tokenbus.workers.controller.backends.grammar import yacc_compiler
from tokenbus.workers.controller.backends.grammar.file_cache import FileCache
from tokenbus.workers.controller.host import Host
from tokenbus.workers.controller.interface import Action, Constraint, Program
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.logs import Log
from tokenbus.workers.controller.variable_calls import SequenceVariables
from tokenbus.workers.controller.wasm.module_table import BUILT_IN
from tokenbus.workers.variables import VariableStorage

from ....processes import Bus
from ..played import BYTES, EOS, WORDS, Steered, engine

TOKENS = [*WORDS, b"12", b"2026", b"-0", b"-11-", "é".encode(), "né".encode(), b"\xc3", b"\xa9a"]
PATTERNS = [
    r"\d{4}-(0[1-9]|1[0-2])-\d\d",
    r"(the |a )?(cat|dog)( sat)*",
    r"[^\d]{2,5}",
    r"né*",
    r"(?i:abc)d?",
    r"a{3}|b{0,2}",
]


@pytest.fixture(scope="module")
def constraints(tmp_path_factory: pytest.TempPathFactory) -> Constraints:
    return Constraints(engine, tmp_path_factory.mktemp("grammars"))


def named(constraints: Constraints, name: str) -> Program:
    program = constraints.get(name)
    assert program is not None
    return program


# --- masks ----------------------------------------------------------------------------------------


def test_a_substring_is_any_part_of_the_text(constraints: Constraints) -> None:
    run = Steered(named(constraints, "substring"), WORDS, '{"text": "the cat sät"}')
    text = "the cat sät".encode()
    allowed = run.mid()
    assert isinstance(allowed, set)
    inside = {i for i, t in enumerate(WORDS) if t and t in text}
    assert allowed == {EOS} | inside - {1 + text[-2]}  # a part does not begin inside a character
    run.post([WORDS.index(b" cat")])
    assert run.mid() == {EOS, 1 + ord(" ")}
    run.post([1 + byte for byte in " sä".encode()[:-1]])
    assert run.mid() == {1 + "ä".encode()[1]}


def test_a_combination_puts_parts_together_and_bounds_its_tokens(constraints: Constraints) -> None:
    date = {"regex": r"\d\d"}
    arg = {
        "sequence": [
            "the ",
            {"repetition": {"choice": ["cat", "dog"]}, "least": 1, "most": 2},
            {"alternation": [date, {"stop_at": "!", "of": {"regex": "[a!]+"}}]},
        ],
        "max_tokens": 6,
    }
    run = Steered(named(constraints, "combination"), WORDS, json.dumps(arg))
    for tokens in ([b"the "], [b"cat"], [b"dog"], [b"a"]):
        assert run.mid()
        run.post([WORDS.index(token) for token in tokens])
    assert run.mid() == [1 + ord("!")]  # the text must end after six tokens
    run.post([1 + ord("!")])
    assert run.mid() is None

    run = Steered(named(constraints, "combination"), WORDS, '{"stop_at": "cat"}')
    run.post([WORDS.index(b"dog"), WORDS.index(b" cat")])
    assert run.mid() is None


def allowed_after(run: Steered, text: bytes) -> set[bytes] | None:
    """Appends a text byte by byte; returns the bytes of the tokens that may follow, or of the first
    forced token."""
    for byte in text:
        may = run.mid()
        assert may is not None
        assert 1 + byte in (may if isinstance(may, set) else may[:1])
        run.post([1 + byte])
    may = run.mid()
    if isinstance(may, list):
        may = set(may[:1])
    return None if may is None else {BYTES[token] for token in may}


@pytest.mark.process
def test_a_combination_has_grammars_and_schemas_as_parts(constraints: Constraints) -> None:
    arg = {
        "sequence": [
            {"alternation": ["a: ", {"regex": "b+: "}]},
            {"repetition": {"sequence": [{"yacc": "json"}, ";"]}, "least": 1, "most": 2},
            {"json_schema": {"enum": [True, 12]}},
        ]
    }
    combination = named(constraints, "combination")
    begin = Steered(combination, BYTES, json.dumps(arg))
    assert allowed_after(begin, b"") == {b"a", b"b"}
    assert b" " in (allowed_after(begin, b"a: ") or set())
    run = Steered(combination, BYTES, json.dumps(arg))
    after = allowed_after(run, b"bb: [1, 2]") or set()
    assert b";" in after
    assert b"," not in after
    # The repetition begins again with JSON, or the schema follows.
    assert {b"t", b"1", b"["} < (allowed_after(run, b";") or set())
    assert b"r" in (allowed_after(run, b"t") or set())
    # ``true`` may be a value of the schema, or JSON in the repetition.
    assert {b";", BYTES[EOS]} < (allowed_after(run, b"rue") or set())
    fork = Steered(combination, BYTES, json.dumps(arg))
    variables = SequenceVariables(1, 1, VariableStorage().apply, lambda: None)
    host = Host(1, 1, b"", run.vocabulary, variables, Log(1000), Limits(), 100)
    fork.controller.close()
    fork.controller = run.controller.fork(host)
    assert allowed_after(fork, b";") == {b"t", b"1"}
    assert allowed_after(fork, b"12") is None
    run.controller.close()


@pytest.mark.process
def test_a_combination_that_fails_gives_back_all_of_its_ways_once(
    constraints: Constraints,
) -> None:
    one = {"sequence": [{"yacc": "json"}, {"regex": ";"}], "max_tokens": 90}
    arg = json.dumps({"alternation": [one] * 40})
    run = Steered(named(constraints, "combination"), BYTES, arg)
    shared = Steered(named(constraints, "yacc"), BYTES, "json").controller._shared  # type: ignore[attr-defined]
    before = shared.users
    for byte in b"[1]":
        run.mid()
        run.post([1 + byte])
    with pytest.raises(ControllerError, match="more than 32 ways"):
        run.mid()
    assert shared.users == before + 40
    run.controller.close()
    assert shared.users == before
    assert not shared.guest.dead


@pytest.mark.process
def test_a_way_that_fails_does_not_end_another_ways_sequence(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    arg = json.dumps({"alternation": [{"yacc": "arithmetic"}, {"yacc": "json"}]})
    run = Steered(named(constraints, "combination"), BYTES, arg)
    assert 1 + ord("[") in (run.mid() or ())
    other = Steered(named(constraints, "yacc"), BYTES, "arithmetic")

    def fail(*_: object) -> None:
        raise ControllerError("controller_failed", "not today")

    monkeypatch.setattr(run.controller._ways[1].controller, "post_process", fail)  # type: ignore[attr-defined]
    with pytest.raises(ControllerError, match="not today"):
        run.post([1 + ord("[")])
    run.controller.close()
    assert 1 + ord("(") in (other.mid() or ())


@pytest.mark.process
def test_a_part_has_tokens_of_its_own_and_is_closed_in_time(constraints: Constraints) -> None:
    arg = {"sequence": [{"yacc": "json", "max_tokens": 6}, " and ", {"yacc": "arithmetic"}]}
    run = Steered(named(constraints, "combination"), BYTES, json.dumps(arg))
    assert allowed_after(run, b"[[1") == {b"]"}
    run.post([1 + ord("]"), 1 + ord("]")])
    assert allowed_after(run, b"") == {b" "}
    assert b"(" in (allowed_after(run, b" and ") or set())


def test_no_tag_can_have_the_name_of_a_constraint(constraints: Constraints) -> None:
    assert constraints.names == set(BUILT_IN)


def test_a_choice_is_one_of_the_texts_and_no_more(constraints: Constraints) -> None:
    run = Steered(named(constraints, "choice"), WORDS, '["the cat", "the dog", "the", "é"]')
    assert run.mid() == {1 + ord("t"), 1 + 0xC3, WORDS.index(b"the"), WORDS.index(b"the ")}
    run.post([WORDS.index(b"the")])
    assert run.mid() == {EOS, 1 + ord(" "), WORDS.index(b" cat")}
    run.post([1 + ord(" ")])
    run.post([1 + ord("c")])
    assert run.mid() == [WORDS.index(b"at")]
    run.post([WORDS.index(b"at")])
    assert run.mid() is None


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_mask_has_the_tokens_that_a_match_may_go_on_with(
    constraints: Constraints, pattern: str
) -> None:
    dfa = compile_regex(pattern)
    for seed in range(20):
        rng = random.Random(seed)
        run, text, state = Steered(named(constraints, "regex"), TOKENS, pattern), b"", dfa.start
        for _ in range(12):
            may = {i for i, t in enumerate(TOKENS) if t and dfa.walk(t, state)}
            allowed = run.mid()
            if allowed is None:
                assert not may
                assert dfa.accepting[state]
                assert re.fullmatch(pattern, text.decode())
                break
            if isinstance(allowed, list):
                tokens = allowed
                assert not dfa.accepting[state]
            else:
                end = {EOS} if dfa.accepting[state] else set()
                assert allowed == may | end
                tokens = [rng.choice(sorted(allowed))]
            if tokens == [EOS]:
                assert run.post(tokens) is Action.STOP
                assert re.fullmatch(pattern, text.decode())
                break
            assert run.post(tokens) is Action.CONTINUE
            written = b"".join(TOKENS[token] for token in tokens)
            text, state = text + written, dfa.walk(written, state)
            assert state


def test_what_must_come_is_appended_as_the_tokenizer_writes_it(constraints: Constraints) -> None:
    run = Steered(named(constraints, "regex"), TOKENS, "(the cat|a) sat")
    assert run.mid() == {1 + ord("t"), 1 + ord("a"), TOKENS.index(b"the"), TOKENS.index(b"the ")}
    run.post([TOKENS.index(b"the")])
    assert run.mid() == [TOKENS.index(b" cat"), TOKENS.index(b" sat")]


def test_a_token_that_something_longer_could_stand_for_is_left_to_the_model(
    constraints: Constraints,
) -> None:
    run = Steered(named(constraints, "regex"), TOKENS, "xy ca(t|r)s")
    assert run.mid() == [1 + ord("x"), 1 + ord("y")]
    run.post([1 + ord("x"), 1 + ord("y")])
    assert run.mid() == {1 + ord(" "), TOKENS.index(b" cat")}


def test_a_fork_goes_its_own_way(constraints: Constraints) -> None:
    run, fork = (Steered(named(constraints, "regex"), TOKENS, "(cat|ca!)") for _ in "12")
    run.post([TOKENS.index(b"ca")])
    variables = SequenceVariables(1, 1, VariableStorage().apply, lambda: None)
    host = Host(1, 1, b"", run.vocabulary, variables, Log(1000), Limits(), 100)
    fork.controller.close()
    fork.controller = run.controller.fork(host)
    run.post([1 + ord("t")])
    assert run.mid() is None
    assert fork.mid() == {1 + ord("t"), 1 + ord("!")}


@pytest.mark.process
def test_a_grammar_without_a_token_that_goes_on_ends_with_the_text_so_far(
    constraints: Constraints,
) -> None:
    tokens = [b"", b"a", b"b"]
    run = Steered(named(constraints, "yacc"), tokens, '%start s\n%%\ns: "ab" "€" ;')
    for token in (1, 2):
        assert run.mid() == {token}
        run.post([token])
    with pytest.raises(
        ControllerError, match=r"any token of this model's vocabulary .* so far: 'ab'"
    ):
        run.mid()


@pytest.mark.process
def test_a_token_that_cannot_follow_is_an_error(constraints: Constraints) -> None:
    run = Steered(named(constraints, "yacc"), WORDS, '%start s\n%%\ns: "cat" ;')
    with pytest.raises(
        ControllerError, match=f"does not allow the tokens .{WORDS.index(b'dog')}. here"
    ):
        run.post([WORDS.index(b"dog")])


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize(
    ("constraint", "arg", "message"),
    [
        ("choice", "", "the argument of choice is missing; it must be a JSON list of strings"),
        ("choice", "[]", "at least one text"),
        ("choice", '["a", 1]', r"expected a text, not a whole number at \$\[1\]; it must be"),
        ("choice", '{"choice": ["a"]}', "JSON list of strings"),
        ("regex", "", "is empty; it must be a regular expression"),
        ("regex", "(a", "missing \\)"),
        ("regex", r"(a)\1", "back-reference"),
        ("regex", "(a|b)*a(a|b){20}", "states"),
        ("regex", b"\xff", "UTF-8"),
        (
            "regex",
            '{"library": "nope"}',
            "'nope' is not in the library; it must be one of email, iso_date",
        ),
        ("regex", '{"pattern": "a", "flags": 1}', "an object with the fields pattern, flags"),
        ("substring", "a" * 70_000, "65,536"),
        ("substring", '{"library": "c"}', 'the field.* library; it must be text, {"text": TEXT}'),
        ("combination", "x", "is not valid JSON"),
        (
            "combination",
            '{"regex": "a", "choice": ["b"]}',
            "which is not a part; a part is a text or an object with exactly one of regex",
        ),
        ("combination", '{"grammar": "json"}', "an object with exactly one of regex"),
        ("combination", '{"sequence": ["a", {"regex": "(b"}]}', r"\$.sequence\[1\].regex: missing"),
        (
            "combination",
            '{"repetition": "a", "least": -1}',
            "least is -1; it must be an integer of at least 0",
        ),
        (
            "combination",
            '{"repetition": "a", "least": 2, "most": 1}',
            "most is 1; it must be an integer of at least 2",
        ),
        ("substring", "", "is empty; it must be a text"),
        ("yacc", "jsno", "'jsno' is not in the library; it must be one of arithmetic, c, json"),
        (
            "combination",
            '{"regex": "a", "flags": 1}',
            "unknown field 'flags'; regex takes max_tokens, regex",
        ),
        ("combination", '{"regex": {"library": "x"}}', "'x' is not in the library"),
        (
            "combination",
            '{"regex": "a", "max_tokens": 0}',
            "max_tokens is 0; it must be an integer",
        ),
        ("combination", '{"sequence": "ab"}', 'sequence is "ab"; it must be a list'),
        (
            "combination",
            '{"sequence": ["a", {"yacc": "x :"}]}',
            r"\$.sequence\[1\].yacc: yacc: line",
        ),
        (
            "combination",
            '{"stop_at": "x", "of": {"yacc": "json"}}',
            "stop_at.of is yacc, .* must be a text, a regex",
        ),
        (
            "combination",
            '{"repetition": {"yacc": "json"}, "most": 300}',
            "exceeds the limit of 256 parts",
        ),
        ("combination", '{"yacc": 3}', "yacc is 3; it must be a text"),
        ("combination", "[" * 60 + "]" * 60, "is a text or an object"),
        ("combination", '{"sequence": [' * 60 + "]}" * 60, "50 deep"),
        ("yacc", " ", "library grammar: arithmetic, c, json"),
        ("yacc", b"\xff", "UTF-8"),
        ("yacc", "%start s\n%%\ns: t ;", "line 3, column 4: the rule 't' is not defined"),
        ("yacc", '%start s\n%%\ns: "a" ;\nt: "b" ;', "line 4, column 4: .* never used"),
        ("yacc", '%%\ns: "a" ;', "%start"),
        ("yacc", '%start s\n%%\ns: s "a" ;', "finite"),
        ("yacc", '%start s\n%%\ns: "/(a/" ;', "line 3, column 6: missing"),
        ("yacc", '%start s\n%%\ns: "a', "line 3"),
        ("yacc", "%start s\n" + "//" * 5_000_000, "has 10000009 characters; at most 1048576"),
        ("yacc", '{"library": "nope"}', "'nope' is not in the library"),
    ],
)
def test_a_wrong_argument_is_refused_with_the_reason(
    constraints: Constraints, constraint: str, arg: str | bytes, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        Steered(named(constraints, constraint), WORDS, arg)
    assert caught.value.path == "$.controller_arg"


@pytest.mark.process
def test_a_grammar_is_given_as_text_or_by_its_name(constraints: Constraints) -> None:
    text = library.grammar("arithmetic")
    reference = Recognizer(compile_grammar(text).grammar)
    bytes_only = {1 + byte for byte in reference.allowed_bytes()}
    for arg in (text, "arithmetic", '{"library": "arithmetic"}', json.dumps({"grammar": text})):
        allowed = Steered(named(constraints, "yacc"), WORDS[:257], arg).mid()
        assert allowed == bytes_only
    email = Steered(named(constraints, "regex"), WORDS, '{"library": "email"}').mid()
    assert email == Steered(named(constraints, "regex"), WORDS, library.regex("email")).mid()


def test_no_more_grammars_are_compiled_at_once_than_the_machine_can_do(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yacc_compiler, "_turns", Turns(0))
    monkeypatch.setattr(yacc_compiler, "TURN_S", 0.0)
    with pytest.raises(UnavailableError, match="at most 2 grammars at a time") as caught:
        Steered(named(constraints, "yacc"), WORDS, '%start s\n%%\ns: "new here" ;')
    assert caught.value.retry_after_s == 1


@pytest.mark.process
def test_a_grammar_waits_for_its_turn_to_be_compiled(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(1)
    assert turns.acquire("", 0.0)
    monkeypatch.setattr(yacc_compiler, "_turns", turns)
    program = named(constraints, "yacc")
    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(Steered, program, WORDS, '%start s\n%%\ns: "the next one" ;')
        with pytest.raises(TimeoutError):
            made.result(timeout=0.2)
        turns.release("")
        assert made.result(timeout=120.0).mid()


# --- cached tables --------------------------------------------------------------------------------


@pytest.mark.process
def test_masks_and_tables_are_there_for_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = b'[1, {"the": true}]'
    first = Constraints(engine, tmp_path)
    masks = walk(named(first, "yacc"), text)
    first.close()
    assert [path.suffix for path in sorted((tmp_path / "memories").iterdir())] == [".memory"]

    def refuse(text: str) -> bytes:
        raise AssertionError("the tables were compiled again")

    monkeypatch.setattr(
        "tokenbus.workers.controller.backends.grammar.grammar_tables.compile_apart", refuse
    )
    second = Constraints(engine, tmp_path)
    program = named(second, "yacc")
    run = Steered(program, WORDS, "json")
    found = run.controller._guest.found  # type: ignore[attr-defined]
    assert found > 5
    assert walk(program, text) == masks
    assert run.controller._guest.found == found  # type: ignore[attr-defined]


@pytest.mark.process
@pytest.mark.parametrize("damage", [b"", b"TBGM", b"x" * 100_000])
def test_a_memory_on_disk_that_is_damaged_is_made_again(tmp_path: Path, damage: bytes) -> None:
    text = b"[1]"
    first = Constraints(engine, tmp_path)
    masks = walk(named(first, "yacc"), text)
    first.close()
    for path in [*(tmp_path / "memories").iterdir(), *(tmp_path / "tables").iterdir()]:
        path.write_bytes(damage)
    assert walk(named(Constraints(engine, tmp_path), "yacc"), text) == masks


def test_what_is_kept_on_disk_has_a_bound_and_the_least_used_goes(tmp_path: Path) -> None:
    files = FileCache(tmp_path, ".kept", 250)
    for age, key in enumerate(("old", "older", "new")):
        files.write(key, bytes(50), bytes(50))
        if key != "new":
            os.utime(tmp_path / f"{key}.kept", (age, 1000 - age))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.kept", "old.kept"]
    assert files.path("old").read_bytes() == bytes(100)
    assert not files.path("older").exists()


def test_sequences_of_a_grammar_share_what_was_found_and_guests_without_any_make_room(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = named(constraints, "regex")
    one, other = Steered(program, WORDS, "(the cat)+"), Steered(program, WORDS, "(the cat)+")
    guest = one.controller._guest  # type: ignore[attr-defined]
    assert other.controller._guest is guest  # type: ignore[attr-defined]
    one.mid()
    found = guest.found
    other.mid()
    assert guest.found == found
    monkeypatch.setattr(
        "tokenbus.workers.controller.backends.grammar.shared_instances.KEPT_BYTES", 1
    )
    Steered(program, WORDS, "(the dog)+")
    assert not guest.dead
    one.controller.close()
    other.controller.close()
    Steered(program, WORDS, "(a dog)+")
    assert guest.dead


def walk(program: Program, text: bytes) -> list[bytes]:
    """Appends a text byte by byte; returns the mask before each byte."""
    run = Steered(program, WORDS, "json")
    masks = []
    for byte in text:
        run.controller.mid_process((0,), memoryview(run._mask))
        masks.append(bytes(run._mask))
        assert run.post([1 + byte]) is Action.CONTINUE
    run.controller.close()
    return masks


# --- streams --------------------------------------------------------------------------------------


@pytest.fixture
def client(steered: Bus) -> Iterator[Client]:
    with steered.client() as client:
        yield client


@pytest.mark.parametrize("pattern", [r"\d{4}-(0[1-9]|1[0-2])-\d\d", r'\["[a-z ]{3,12}"\]', "é+x"])
def test_streams_match_their_pattern(client: Client, pattern: str) -> None:
    streams = [
        client.generate(
            "x = ",
            controller="regex",
            controller_arg=pattern,
            temperature=1.5,
            seed=seed,
            max_tokens=200,
        )
        for seed in range(20)
    ]
    for stream in streams:
        [sequence] = stream.wait()
        if sequence.finish_reason == "stop":
            assert re.fullmatch(pattern, sequence.text), sequence.text
        else:
            assert compile_regex(pattern).is_live(
                compile_regex(pattern).walk(sequence.text.encode())
            )
    assert any(s.sequences[0].finish_reason == "stop" for s in streams)


@pytest.mark.parametrize("constraint", ["regex", "yacc"])
def test_a_wrong_argument_is_the_clients_error(client: Client, constraint: str) -> None:
    with pytest.raises(RequestError, match=r"missing|unexpected character"):
        _ = client.generate("x", controller=constraint, controller_arg="(a").text()


def test_schemas_and_lark_grammars_steer_streams(client: Client) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "old": {"type": "boolean"}},
        "required": ["name", "old"],
        "additionalProperties": False,
    }
    lark = 'start: "(" (start | NUMBER) ")"\nNUMBER: /[0-9]{1,3}/'
    sampled: dict[str, Any] = {"temperature": 1.0, "max_tokens": 120}
    for seed in range(5):
        [value] = client.generate(
            "x = ", controller="json_schema", controller_arg=schema, seed=seed, **sampled
        ).wait()
        assert value.finish_reason == "stop"
        assert set(json.loads(value.text)) == {"name", "old"}
        [nested] = client.generate(
            "x = ", controller="lark", controller_arg=lark, seed=seed, **sampled
        ).wait()
        if nested.finish_reason == "stop":
            assert re.fullmatch(r"(\(+)\d{1,3}(\)+)", nested.text)
            assert nested.text.count("(") == nested.text.count(")")
    with pytest.raises(RequestError, match="json_schema"):
        client.generate("x", controller="json_schema", controller_arg={"type": "x"}).wait()


# --- the end of a text ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arg"),
    [
        ("regex", "[0-9]{2}"),
        ("combination", '{"sequence": [{"json_schema": {"const": 12}}, {"regex": "3?"}]}'),
        ("lark", 'start: "1" "2"'),
    ],
)
def test_a_text_whose_last_tokens_come_together_with_its_end_is_complete(
    constraints: Constraints, name: str, arg: str
) -> None:
    """After an accepted draft, several tokens come in one round. The tokens before the end of the
    sequence count, so the text is complete and not cut."""
    run = Steered(named(constraints, name), BYTES, arg)
    run.mid()
    stopped = run.controller.post_process([1 + ord("1"), 1 + ord("2"), EOS], 0)
    assert stopped.action is Action.STOP
    assert isinstance(run.controller, Constraint)
    assert run.controller.text_end() == "complete"
    run.controller.close()
