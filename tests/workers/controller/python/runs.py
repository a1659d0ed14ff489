"""Runs Python controllers as a controller worker does. A function samples the tokens."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import cache
from importlib.resources import files

from tokenbus.protocol.bodies import decode_as, encode_body
from tokenbus.protocol.sampling import Distribution
from tokenbus.protocol.worker_messages import Pin, StepResult, Variable, VariableAnswer
from tokenbus.workers.controller.host import allowed
from tokenbus.workers.controller.interface import Program
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.python import Controller, PythonProgram, ScriptProgram
from tokenbus.workers.controller.python.script import Script
from tokenbus.workers.controller.sequence_group import Round, SequenceGroup
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary
from tokenbus.workers.controller.variable_calls import VariableCalls
from tokenbus.workers.variables import VariableStorage

Choose = Callable[[int, list[int], list[int]], int]
"""Samples a token; takes the number of a sequence, the sequence's tokens, and the allowed
tokens."""


@cache
def vocabulary() -> TokenizerVocabulary:
    """The vocabulary of the embedded model. Token 0 ends a sequence."""
    folder = files("tokenbus.workers.gpu.embedded") / "model"
    text = (folder / "tokenizer.json").read_text()
    return TokenizerVocabulary.from_json(text, size=4096, eos=(0,), fingerprint="embedded")


def tokens_of(text: str) -> list[int]:
    return vocabulary().tokenize(text.encode())


def variable_calls() -> VariableCalls:
    """A worker's operations on variables. The storage of a state worker answers them."""
    storage = VariableStorage()

    def post(frames: list[bytes], link: int) -> None:
        answer = storage.apply(decode_as(Variable, frames[2], "msgpack"))
        calls.on_answer(encode_body(answer, "msgpack"))

    calls = VariableCalls(post)
    return calls


class Run:
    """Runs a request to its end. The fields have the results by sequence."""

    def __init__(
        self,
        program: Program,
        *,
        prompt: str = "",
        arg: bytes = b"",
        choose: Choose | None = None,
        seed: int = 0,
        limits: Limits | None = None,
        max_tokens: int = 300,
        perform: Callable[[Variable], VariableAnswer] | None = None,
    ) -> None:
        """``perform`` does the operations on variables and contexts."""
        chance = random.Random(seed)
        self._choose = choose or (lambda _seq, _tokens, may: chance.choice(may))
        self._max_tokens = max_tokens
        self.tokens: dict[int, list[int]] = {0: []}
        self.ended: dict[int, str] = {}
        self.errors: dict[int, str] = {}
        self.codes: dict[int, str | None] = {}
        self.logs: dict[int, str] = {}
        self.sampled = 0
        self.sent_back = 0
        """Number of tokens that the controllers have dropped."""
        self.prompts: dict[int, list[int]] = {}
        """The prompts with which sequences began anew."""
        self.pins: list[Pin] = []
        ask = perform or variable_calls().perform
        self._group = SequenceGroup(1, 1, limits or Limits(), arg, max_tokens, False, ask)
        self._play(self._group.begin(program, vocabulary(), tokens_of(prompt)))

    def text(self, seq: int = 0) -> str:
        """The text of the sequence, after its prompt."""
        return b"".join(map(vocabulary().token, self.tokens[seq])).decode("utf-8", "replace")

    @property
    def texts(self) -> list[str]:
        """The texts of all sequences, in the order of their numbers."""
        return [self.text(seq) for seq in sorted(self.tokens)]

    def _play(self, results: list[StepResult]) -> None:
        rounds: deque[Round] = deque()
        while True:
            sampled: list[Round] = []
            for result in results:
                sampled += self._apply(result)
            woken, more = self._group.record(results)
            self._group.free()
            rounds += [*sampled, *woken]
            if more:
                results = more
            elif rounds:
                results = rounds.popleft()()
            else:
                woken, results = self._group.wake_idle()
                rounds += woken
                if not (woken or results):
                    break
        assert set(self.ended) == set(self.tokens), "a sequence has not ended"

    def _apply(self, result: StepResult) -> list[Round]:
        seq, tokens = result.seq, self.tokens[result.seq]
        self.logs[seq] = self.logs.get(seq, "") + result.logs
        if result.prompt:
            self.prompts[seq] = list(result.prompt)
            tokens.clear()
        if result.pin is not None:
            self.pins.append(result.pin)
        del tokens[len(tokens) - result.backtrack :]
        tokens += result.ff_tokens
        self.sent_back += result.backtrack
        if result.action == "fork":
            for child in result.children:
                self.tokens[child] = list(tokens)
        elif result.action in ("stop", "error"):
            self.ended[seq] = result.action
            if result.error:
                self.errors[seq], self.codes[seq] = result.error, result.code
        elif result.action == "sample":
            return [lambda: self._sample(result)]
        elif result.action == "score":
            return [lambda: self._score(result)]
        elif result.action == "look":
            return [lambda: self._look(result)]
        return []

    def _look(self, result: StepResult) -> list[StepResult]:
        """The log-probability of token t is -t / 8."""
        top = {token: -token / 8 for token in range(result.query.top if result.query else 0)}
        seen = Distribution(logprob=0.0, rank=0, entropy=1.0, top=top)
        stepped = self._group.step(result.seq, [], False, None, distributions=[seen])
        assert stepped is not None
        return stepped[1]()

    def _score(self, result: StepResult) -> list[StepResult]:
        """Answers with the scores of texts. The log-probability of token t is always -t / 8."""
        scores = [[-token / 8 for token in text] for text in result.texts]
        stepped = self._group.step(result.seq, [], False, None, scores=scores)
        assert stepped is not None
        return stepped[1]()

    def _sample(self, result: StepResult) -> list[StepResult]:
        seq, tokens = result.seq, self.tokens[result.seq]
        size = vocabulary().size
        masked = result.attachment is not None or result.row is not None
        mask = self._group.mask(seq) if masked else None
        may = list(range(size)) if mask is None else list(allowed(mask, size))
        token = self._choose(seq, tokens, may)
        assert token in may, f"the mask forbids {vocabulary().token(token)!r}"
        tokens.append(token)
        self.sampled += 1
        over = len(tokens) >= self._max_tokens
        stepped = self._group.step(seq, [token], over, None)
        assert stepped is not None
        return stepped[1]()


def play_class(kind: type[Controller], **how: object) -> Run:
    return Run(PythonProgram(kind), **how)  # type: ignore[arg-type]


def play_script(script: Script, **how: object) -> Run:
    return Run(ScriptProgram(script), **how)  # type: ignore[arg-type]


def writes(text: str) -> Choose:
    """Samples the longest allowed token that continues this text; the end if no token does."""

    def choose(_seq: int, tokens: list[int], may: list[int]) -> int:
        rest = text[len(b"".join(map(vocabulary().token, tokens)).decode()) :].encode()
        fits = [t for t in may if vocabulary().token(t) and rest.startswith(vocabulary().token(t))]
        return max(fits, key=lambda t: len(vocabulary().token(t))) if fits else 0

    return choose


def says(text: str) -> Choose:
    """Samples the tokens of this text one by one, whatever was appended, and then the end."""
    rest = deque(tokens_of(text))
    return lambda _seq, _tokens, _may: rest.popleft() if rest else 0
