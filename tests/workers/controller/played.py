"""Runs guests for tests: call by call, or a whole request in which a function samples the
tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import wasmtime
from tokenbus.protocol.worker_messages import StepResult
from tokenbus.workers.controller.host import Host
from tokenbus.workers.controller.interface import Action, Controller, Program
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.logs import Log
from tokenbus.workers.controller.sequence_group import Round, SequenceGroup
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary
from tokenbus.workers.controller.variable_calls import SequenceVariables
from tokenbus.workers.controller.wasm.native import NativeProgram
from tokenbus.workers.controller.wasm.sandbox import make_engine
from tokenbus.workers.variables import VariableStorage

from .wasm.guests import compile_guest

EOS = 0
BYTES = [b"", *(bytes([byte]) for byte in range(256))]
"""Token 0 ends a sequence. Each other token is a byte. Tests add longer tokens."""
WORDS = [*BYTES, b"the", b"the ", b" cat", b"cat", b"ca", b"dog", b" sat", b"AB", b"abcD", b"at"]

engine = make_engine(Limits())


@cache
def program(source: str | Path) -> NativeProgram:
    return NativeProgram(engine, wasmtime.Module(engine, compile_guest(source)))


def vocabulary(tokens: Sequence[bytes], eos: int = EOS) -> TokenizerVocabulary:
    made = TokenizerVocabulary.from_tokens(tokens, [eos] if eos >= 0 else [], "test")
    made.assign_roles({"bos": 1, "pad": 3, "mask": len(tokens) - 1, "cls": len(tokens), "unk": -1})
    return made


UNHURRIED = Limits(init_s=60.0, pre_s=60.0, mid_s=60.0, post_s=60.0, script_s=60.0)
"""Limits for tests that do not check times. On a busy machine, a guest's calls may take longer than
the usual limits of some milliseconds of CPU time."""


class Steered:
    """The controller of one sequence. The test makes its calls."""

    def __init__(
        self,
        source: str | Path | Program,
        tokens: Sequence[bytes],
        arg: str | bytes = b"",
        eos: int = EOS,
        max_tokens: int = 100,
    ) -> None:
        """``source``: the C source of a guest, or a program."""
        self.vocabulary = vocabulary(tokens, eos)
        self.log = Log(1 << 20)
        storage = VariableStorage()
        variables = SequenceVariables(1, 0, storage.apply, lambda: None)
        arg = arg.encode() if isinstance(arg, str) else arg
        host = Host(1, 0, arg, self.vocabulary, variables, self.log, UNHURRIED, max_tokens)
        made = program(source) if isinstance(source, str | Path) else source
        self.controller: Controller = made.start(host)
        self._mask = bytearray(4 * -(-len(tokens) // 32))

    def begin(self, prompt: Sequence[int] = ()) -> str:
        """Calls init_prompt; returns the log."""
        self.controller.init_prompt(prompt)
        return self.log.take()

    def mid(self) -> set[int] | list[int] | None:
        """Calls pre_process and mid_process; returns the set of allowed tokens, the list of the
        tokens of a splice, or None for stop."""
        assert self.controller.pre_process().action is Action.CONTINUE
        answer = self.controller.mid_process((0,), memoryview(self._mask))
        if answer.action is Action.STOP:
            return None
        if answer.action is Action.SPLICE:
            return list(answer.tokens)
        if not answer.masked:
            return set(range(self.vocabulary.size))
        bits = int.from_bytes(self._mask, "little")
        return {i for i in range(8 * len(self._mask)) if bits >> i & 1}

    def post(self, tokens: Sequence[int]) -> Action:
        return self.controller.post_process(tokens, 0).action


Choose = Callable[[int, list[int], set[int]], int]
"""Samples a token; takes the number of a sequence, the sequence's tokens, and the allowed
tokens."""


class Run:
    """Runs a request to its end in a sequence group. ``choose`` samples the tokens."""

    def __init__(
        self,
        made: Program,
        tokens: Sequence[bytes],
        choose: Choose,
        arg: str = "",
        max_tokens: int = 50,
    ) -> None:
        self._vocabulary, self._choose, self._max = vocabulary(tokens), choose, max_tokens
        self.tokens: dict[int, list[int]] = {0: []}
        self.ended: dict[int, str] = {}
        self.logs: dict[int, str] = {}
        self.sampled = self.dropped = 0
        self._group = SequenceGroup(
            1, 1, UNHURRIED, arg.encode(), max_tokens, False, VariableStorage().apply
        )
        self._play(self._group.begin(made, self._vocabulary, [1, 2]))

    def text(self, seq: int = 0) -> str:
        return b"".join(map(self._vocabulary.token, self.tokens[seq])).decode()

    def _play(self, results: list[StepResult]) -> None:
        rounds: deque[Round] = deque()
        while True:
            if not results and rounds:
                results = rounds.popleft()()
            elif not results:
                woken, results = self._group.wake_idle()
                rounds += woken
                if not (woken or results):
                    break
                continue
            sampled = [round_ for result in results for round_ in self._apply(result)]
            woken, results = self._group.record(results)
            self._group.free()
            rounds += [*sampled, *woken]
        assert set(self.ended) == set(self.tokens), "a sequence has not ended"

    def _apply(self, result: StepResult) -> list[Round]:
        seq, tokens = result.seq, self.tokens[result.seq]
        self.logs[seq] = self.logs.get(seq, "") + result.logs
        del tokens[len(tokens) - result.backtrack :]
        tokens += result.ff_tokens
        self.dropped += result.backtrack
        for child in result.children:
            self.tokens[child] = list(tokens)
        if result.action in ("stop", "error"):
            self.ended[seq] = result.error or "stop"
        return [lambda: self._sample(result)] if result.action == "sample" else []

    def _sample(self, result: StepResult) -> list[StepResult]:
        seq, tokens, size = result.seq, self.tokens[result.seq], self._vocabulary.size
        may = set(range(size))
        if result.attachment is not None:
            bits = int.from_bytes(self._group.mask(seq) or b"", "little")
            may = {i for i in range(bits.bit_length()) if bits >> i & 1}
        token = self._choose(seq, tokens, may)
        assert token in may, f"the mask forbids {token}"
        tokens.append(token)
        self.sampled += 1
        over = len(tokens) >= self._max
        stepped = self._group.step(seq, [token], over, None)
        assert stepped is not None
        return stepped[1]()


def says(*texts: str) -> Choose:
    """Samples the bytes of ``texts[seq]`` one by one, and then the end. If the mask forbids the
    next token, the first allowed token is sampled."""
    rest = [iter(text.encode()) for text in texts]

    def choose(seq: int, _tokens: list[int], may: set[int]) -> int:
        byte = next(rest[seq], None)
        wanted = EOS if byte is None else 1 + byte
        return wanted if wanted in may else min(may)

    return choose
