"""Sequences under json_schema and lark. The tests choose their tokens and make the controller's
calls."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import numpy as np
from tokenbus.workers.controller.host import Host, Vocabulary
from tokenbus.workers.controller.interface import Action, Answer, Program
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.logs import Log
from tokenbus.workers.controller.variable_calls import SequenceVariables
from tokenbus.workers.variables import VariableStorage

from ..played import BYTES

TOKENS = [
    *BYTES,
    *(b'{"', b'": ', b', "', b'"}', b'["', b'", "', b"name", b'name"', b"age", b"true", b"tru"),
    *(b"ru", b"null", b"10", b"12", b": 1", b"}}", b"red", b're"', b"ed", b"\xc3", b"\xa9x"),
    *("né".encode(), b"ab", b"aba", b"b+", b"+a", b"(a", b"))", b"a)", b" ", b"  ", b""),
]
"""Token 0 ends a sequence. The last token is special."""
SPECIAL = len(TOKENS) - 1


PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["red", "né"]},
        "age": {"type": "integer", "minimum": 8, "maximum": 112},
    },
    "required": ["name"],
    "additionalProperties": False,
}


def host(arg: object, vocabulary: Vocabulary, seq: int = 0, max_tokens: int = 100_000) -> Host:
    if not isinstance(arg, str | bytes):
        arg = json.dumps(arg)
    variables = SequenceVariables(1, seq, VariableStorage().apply, lambda: None)
    data = arg.encode() if isinstance(arg, str) else arg
    return Host(1, seq, data, vocabulary, variables, Log(1000), Limits(), max_tokens)


class Stream:
    """A sequence whose tokens the test chooses."""

    def __init__(
        self, program: Program, arg: object, on: Vocabulary, max_tokens: int = 100_000
    ) -> None:
        self.vocabulary = on
        self.controller = program.start(host(arg, on, 0, max_tokens))
        self.controller.init_prompt([1])
        self.tokens: list[int] = []
        self._mask = bytearray(b"\xff" * (4 * -(-on.size // 32)))
        self._view = memoryview(self._mask)

    def mid(self) -> Answer:
        assert self.controller.pre_process().action is Action.CONTINUE
        return self.controller.mid_process((0,), self._view)

    @property
    def allowed(self) -> set[int]:
        """The tokens of the last mask."""
        return set(self._bits().tolist())

    def _bits(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        bits = np.unpackbits(np.frombuffer(self._mask, np.uint8), bitorder="little")
        return np.flatnonzero(bits)

    def push(self, tokens: Sequence[int]) -> Action:
        then = self.controller.post_process(tokens, 0).action
        if then is Action.CONTINUE:
            self.tokens += tokens
        return then

    @property
    def text(self) -> bytes:
        return b"".join(map(self.vocabulary.token, self.tokens))

    def fork(self) -> Stream:
        other = Stream.__new__(Stream)
        other.vocabulary, other.tokens = self.vocabulary, list(self.tokens)
        other.controller = self.controller.fork(host("", self.vocabulary, 1))
        other._mask = bytearray(len(self._mask))
        other._view = memoryview(other._mask)
        return other

    def random(self, rng: random.Random, most: int = 300) -> bool:
        """Samples random tokens until the end; returns whether the end came within ``most``
        rounds."""
        for _ in range(most):
            answer = self.mid()
            if answer.action is Action.STOP:
                return True
            if answer.action is Action.SPLICE:
                assert self.push(answer.tokens) is Action.CONTINUE
                continue
            bits = self._bits()
            end = [bit for bit in self.vocabulary.eos_ids if bit in bits and rng.random() < 0.3]
            if self.push(end or [int(rng.choice(bits))]) is Action.STOP:
                return True
        return False


def walked(stream: Stream, rng: random.Random, taken_back: bool = False) -> bytes:
    """Samples random tokens, but never the end, until the controller stops, only the end is
    allowed, or the text has ``max_tokens`` tokens. In half of the steps, tokens that begin a value
    are preferred. ``taken_back``: whether the controller may drop tokens."""
    begin = {number for number, token in enumerate(TOKENS) if token[:1] in (b"{", b"[", b",", b"(")}
    most = stream.controller._host.max_tokens  # type: ignore[attr-defined]
    while len(stream.tokens) < most:
        answer = stream.mid()
        if answer.action is Action.STOP:
            return stream.text
        if answer.action is Action.SPLICE:
            assert taken_back or not answer.backtrack, stream.text
            push(stream, answer.tokens, answer.backtrack)
            continue
        allowed = stream.allowed - {0}
        preferred = allowed & begin if rng.random() < 0.5 else set[int]()
        if not allowed:
            return stream.text
        push(stream, [rng.choice(sorted(preferred or allowed))])
    return stream.text


def push(stream: Stream, tokens: Sequence[int], backtrack: int = 0) -> None:
    assert stream.controller.post_process(tokens, backtrack).action is Action.CONTINUE
    del stream.tokens[len(stream.tokens) - backtrack :]
    stream.tokens += tokens
