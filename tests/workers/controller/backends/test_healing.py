"""If a prompt ends in the middle of a word, its last token is dropped and generated again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest
from tokenbus.protocol.errors import RequestError
from tokenbus.protocol.structure import FREE_TEXT
from tokenbus.workers.controller.backends.constraints import Constraints
from tokenbus.workers.controller.backends.healing import HealingProgram
from tokenbus.workers.controller.host import Host, Vocabulary, allowed
from tokenbus.workers.controller.interface import Action, Constraint

from ..played import BYTES, EOS, vocabulary
from ..played import engine as wasm_engine
from ..tokens.real_tokenizers import tekken
from .llguidance_streams import host

TOKENS = [
    *BYTES,
    *(b" F", b" Fr", b" France", b" Fra", b" Fresh", b" Freedom", b" Frog", b" From", b"ance"),
    *(b"an", b"ee", b"dom", b" Free", b" Freed", b"sh ", b" Fresh 1", b" Fresh 12", b" Fran"),
]
FREE = json.dumps(FREE_TEXT)
CASES = [
    ("structural", FREE),
    ("regex", "ance|eedom|esh [0-9]{1,2}"),
    ("regex", "(?s:.*)"),
    ("choice", json.dumps(["anc", "ee"])),
    ("lark", 'start: "an" "ce"? | /e[a-m]+/'),
]


@pytest.fixture(scope="module")
def constraints() -> Iterator[Constraints]:
    made = Constraints(wasm_engine, None)
    yield made
    made.close()


class Healed:
    """A sequence whose prompt's last token was dropped."""

    def __init__(
        self, constraints: Constraints, name: str, arg: str, on: Vocabulary, token: int, most: int
    ) -> None:
        inner = constraints.get(name)
        assert inner is not None
        self.on = on
        self.controller: Constraint = HealingProgram(inner, token).start(host(arg, on, 0, most))
        self.controller.init_prompt([1, 2])
        self.tokens: list[int] = []
        self._mask = memoryview(bytearray(4 * -(-on.size // 32)))

    def allowed(self) -> set[int]:
        """Appends all forced tokens; returns the tokens that may follow."""
        answer = self.controller.mid_process((0,), self._mask)
        while answer.action is Action.SPLICE:
            del self.tokens[len(self.tokens) - answer.backtrack :]
            self.push(answer.tokens, answer.backtrack)
            answer = self.controller.mid_process((0,), self._mask)
        return set(allowed(self._mask, self.on.size)) if answer.action is Action.CONTINUE else set()

    def push(self, tokens: Sequence[int], backtrack: int = 0) -> None:
        self.tokens += tokens
        self.controller.post_process(tokens, backtrack)

    @property
    def text(self) -> bytes:
        return b"".join(map(self.on.token, self.tokens))


def begins(constraints: Constraints, name: str, arg: str, on: Vocabulary, text: bytes) -> bool:
    """Whether a constraint allows a text as a beginning, with tokens of single bytes."""
    made = constraints.get(name)
    assert made is not None
    controller = made.start(host(arg, on))
    mask = memoryview(bytearray(4 * -(-on.size // 32)))
    forced = b""
    for byte in text:
        if not forced:
            answer = controller.mid_process((0,), mask)
            if answer.action is Action.STOP:
                return False
            if answer.action is Action.SPLICE:
                forced = b"".join(map(on.token, answer.tokens))
                controller.post_process(answer.tokens, 0)
            elif 1 + byte not in allowed(mask, on.size):
                return False
            else:
                controller.post_process([1 + byte], 0)
                continue
        if forced[0] != byte:
            return False
        forced = forced[1:]
    return True


@pytest.mark.process
@pytest.mark.parametrize(("name", "arg"), CASES)
@pytest.mark.parametrize("prefix", [b" Fr", b" F"])
def test_the_first_token_begins_with_the_text_and_goes_on_as_the_constraint_allows(
    constraints: Constraints, name: str, arg: str, prefix: bytes
) -> None:
    on = vocabulary(TOKENS)
    healed = Healed(constraints, name, arg, on, TOKENS.index(prefix), 40)
    expected = {
        number
        for number, token in enumerate(TOKENS)
        if token.startswith(prefix)
        and begins(constraints, name, arg, on, token.removeprefix(prefix))
    }
    assert healed.allowed() == expected


@pytest.mark.process
def test_what_follows_is_the_constraints_text_within_its_tokens(constraints: Constraints) -> None:
    """A random text under a schema is a value of the schema, and has at most ``max_tokens``
    tokens."""
    on = vocabulary([*TOKENS, b' ["', b' ["a', b' ["an', b'["'])
    schema = json.dumps({"type": "array", "items": {"type": "string"}, "minItems": 1})
    for seed in range(12):
        rng = Random(seed)
        most = 3 + seed
        healed = Healed(constraints, "json_schema", schema, on, 1 + ord(" "), most)
        while may := healed.allowed() - {EOS}:
            healed.push([rng.choice(sorted(may))])
            if len(healed.tokens) >= most:
                break
        assert healed.text.startswith(b" ")
        value = json.loads(healed.text)
        assert all(isinstance(one, str) for one in value)
        assert len(healed.tokens) <= most


def test_a_real_tokenizers_word_is_whole(constraints: Constraints) -> None:
    on = tekken()
    text = "The rivers of France and Switzerland are understandably internationalised."
    whole = on.tokenize(text.encode())
    tried = 0
    for cut in range(5, len(text) - 1):
        prompt = on.tokenize(text[:cut].encode())
        same = 0
        while same < len(prompt) and prompt[same] == whole[same]:
            same += 1
        if same != len(prompt) - 1:
            continue  # Only the last token of the prompt may differ.
        tried += 1
        healed = Healed(constraints, "structural", FREE, on, prompt[-1], 20)
        may = healed.allowed()
        assert whole[same] in may
        assert all(on.token(token).startswith(on.token(prompt[-1])) for token in may)
        healed.push([whole[same]])
        assert set(whole[same + 1 : same + 2]) <= healed.allowed()
    assert tried > 10


def test_a_fork_of_a_healed_sequence_goes_its_own_way(constraints: Constraints) -> None:
    on = vocabulary(TOKENS)
    healed = Healed(constraints, "structural", FREE, on, TOKENS.index(b" Fr"), 20)
    healed.allowed()
    fork = healed.controller.fork(host(FREE, on, 1, 20))
    healed.push([TOKENS.index(b" Fresh")])
    assert 1 + ord("z") in healed.allowed()
    mask = memoryview(bytearray(4 * -(-on.size // 32)))
    fork.mid_process((1,), mask)
    assert {on.token(token)[:3] for token in allowed(mask, on.size)} == {b" Fr"}


class Own:
    """A program that is also its own controller. It is not a built-in constraint."""

    closed = False

    def start(self, _host: Host) -> Any:
        return self

    def close(self) -> None:
        self.closed = True


def test_a_controller_of_ones_own_is_refused() -> None:
    own = Own()
    with pytest.raises(RequestError, match="is not a built-in constraint"):
        HealingProgram(own, 1 + ord("a")).start(host("", vocabulary(TOKENS)))
    assert own.closed
