"""The built-in ``regex``: the automaton of a pattern, run over the token trie by a guest."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenbus.clients import Client, RequestError
from tokenbus.grammars.regex import compile_regex
from tokenbus.protocol.errors import ControllerError
from tokenbus.workers.controller.constraints import RegexProgram
from tokenbus.workers.controller.host import Host
from tokenbus.workers.controller.interface import Then
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.logs import Log
from tokenbus.workers.controller.variables import SequenceVariables
from tokenbus.workers.state.variables import VariableStorage

from ...processes import Bus
from .played import EOS, WORDS, program, vocabulary

SOURCE = Path(__file__).parents[3] / "workers" / "controller" / "builtin" / "regex.c"
TOKENS = [*WORDS, b"12", b"2026", b"-0", b"-11-", "é".encode(), "né".encode(), b"\xc3", b"\xa9a"]
PATTERNS = [
    r"\d{4}-(0[1-9]|1[0-2])-\d\d",
    r"(the |a )?(cat|dog)( sat)*",
    r"[^\d]{2,5}",
    r"né*",
    r"(?i:abc)d?",
    r"a{3}|b{0,2}",
    r"",
]


class Run:
    """A stream under the built-in, played by hand."""

    def __init__(self, pattern: str | bytes) -> None:
        arg = pattern.encode() if isinstance(pattern, str) else pattern
        self.vocabulary = vocabulary(TOKENS)
        variables = SequenceVariables(1, 0, VariableStorage().apply, lambda: None)
        host = Host(1, 0, arg, self.vocabulary, variables, Log(1000), Limits(), 100)
        self.controller = RegexProgram(program(SOURCE)).start(host)
        self.controller.init_prompt([1, 2])
        self._mask = bytearray(4 * -(-len(TOKENS) // 32))

    def allowed(self) -> set[int]:
        """What may come next."""
        assert self.controller.pre_process().then is Then.GO_ON
        answer = self.controller.mid_process((0,), memoryview(self._mask))
        assert answer.masked
        bits = int.from_bytes(self._mask, "little")
        return {i for i in range(len(TOKENS)) if bits >> i & 1}

    def push(self, token: int) -> Then:
        """A token was sampled."""
        return self.controller.post_process([token], 0).then


@pytest.mark.parametrize("pattern", [p for p in PATTERNS if p])
def test_a_mask_has_the_tokens_that_a_match_may_go_on_with(pattern: str) -> None:
    dfa = compile_regex(pattern)
    for seed in range(20):
        rng = random.Random(seed)
        run, text, state = Run(pattern), b"", dfa.start
        for _ in range(12):
            may = {i for i, t in enumerate(TOKENS) if t and dfa.walk(t, state)}
            assert run.allowed() == may | ({EOS} if dfa.accepting[state] else set())
            token = rng.choice(sorted(may | ({EOS} if dfa.accepting[state] else set())))
            if token == EOS:
                assert run.push(token) is Then.STOP
                assert re.fullmatch(pattern, text.decode())
                break
            assert run.push(token) is Then.GO_ON
            text, state = text + TOKENS[token], dfa.walk(TOKENS[token], state)


def test_a_fork_goes_its_own_way() -> None:
    run = Run(r"(cat|ca!)")
    run.push(TOKENS.index(b"ca"))
    variables = SequenceVariables(1, 1, VariableStorage().apply, lambda: None)
    host = Host(1, 1, b"", run.vocabulary, variables, Log(1000), Limits(), 100)
    fork = Run(r"(cat|ca!)")
    fork.controller = run.controller.fork(host)
    run.push(1 + ord("t"))
    assert run.allowed() == {EOS}
    assert fork.allowed() == {1 + ord("t"), 1 + ord("!")}


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "needs a regular expression"),
        ("(a", "missing \\)"),
        (r"(a)\1", "back-reference"),
        ("(a|b)*a(a|b){20}", "states"),
        (b"\xff", "UTF-8"),
    ],
)
def test_what_is_no_regular_expression_is_refused_with_the_reason(
    pattern: str | bytes, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        Run(pattern)
    assert caught.value.path == "$.controller_arg"


def test_the_guest_checks_what_it_is_given() -> None:
    variables = SequenceVariables(1, 0, VariableStorage().apply, lambda: None)
    for arg in (b"", b"TBDF" + bytes(20), compile_regex("a").to_bytes()[:-1]):
        host = Host(1, 0, arg, vocabulary(TOKENS), variables, Log(1000), Limits(), 100)
        controller = program(SOURCE).start(host)
        with pytest.raises(ControllerError, match="automaton"):
            controller.init_prompt([1])


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Bus() as bus:
        bus.start_worker()
        bus.start_other("controller")
        bus.wait_for_models("embedded")
        bus.wait_for_roles("controller")
        with bus.client() as client:
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


def test_a_wrong_pattern_is_the_clients_error(client: Client) -> None:
    with pytest.raises(RequestError, match="missing"):
        _ = client.generate("x", controller="regex", controller_arg="(a").text
