"""Python controllers, run as a controller worker runs them, with a sampler for a model."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import warnings
from collections import deque
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenbus.protocol.bodies import decode_as, encode_body
from tokenbus.protocol.errors import Code, RequestError
from tokenbus.protocol.worker_messages import StepResult, Variable
from tokenbus.workers.controller.host import Host, allowed
from tokenbus.workers.controller.interface import Action, Program
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.logs import Log
from tokenbus.workers.controller.python import (
    Context,
    Controller,
    Decision,
    PythonProgram,
    ScriptProgram,
    TokenSet,
    append,
    fork,
    go_on,
    load_program,
    sample,
    splice,
    stop,
    suspend,
)
from tokenbus.workers.controller.python.script import Script
from tokenbus.workers.controller.python.script_constraints import Grammar, regex
from tokenbus.workers.controller.sequence_group import Round, SequenceGroup
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary
from tokenbus.workers.controller.variable_calls import SequenceVariables, VariableCalls
from tokenbus.workers.state.variables import VariableStorage

from ....counts import examples

Choose = Callable[[int, list[int], list[int]], int]
"""(seq, its tokens, what may be sampled) -> a token."""


@cache
def vocabulary() -> TokenizerVocabulary:
    """That of the embedded model; token 0 ends a sequence."""
    folder = files("tokenbus.workers.gpu.embedded") / "model"
    text = (folder / "tokenizer.json").read_text()
    return TokenizerVocabulary.from_json(text, size=4096, eos=(0,), fingerprint="embedded")


def tokens_of(text: str) -> list[int]:
    return vocabulary().tokenize(text.encode())


def variable_calls() -> VariableCalls:
    """A worker's way to the variables, with a state worker's storage at its end."""
    storage = VariableStorage()

    def post(frames: list[bytes]) -> None:
        answer = storage.apply(decode_as(Variable, frames[2], "msgpack"))
        calls.on_answer(encode_body(answer, "msgpack"))

    calls = VariableCalls(post)
    return calls


class Run:
    """A request played to its end: what became of each sequence."""

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
    ) -> None:
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
        """Tokens that the model has to drop."""
        ask = variable_calls().perform
        self._group = SequenceGroup(1, 1, limits or Limits(), arg, max_tokens, False, ask)
        self._play(self._group.begin(program, vocabulary(), tokens_of(prompt)))

    def text(self, seq: int = 0) -> str:
        """What the sequence became, after its prompt."""
        return b"".join(map(vocabulary().token, self.tokens[seq])).decode("utf-8", "replace")

    @property
    def texts(self) -> list[str]:
        """Of all sequences, in the order of their ids."""
        return [self.text(seq) for seq in sorted(self.tokens)]

    def _play(self, results: list[StepResult]) -> None:
        rounds: deque[Round] = deque()
        while True:
            sampled: list[Round] = []
            for result in results:
                sampled += self._told(result)
            woken, more = self._group.record(results)
            self._group.free()
            rounds += [*sampled, *woken]
            if more:
                results = more
            elif rounds:
                results = rounds.popleft()()
            else:
                break
        assert set(self.ended) == set(self.tokens), "a sequence was left behind"

    def _told(self, result: StepResult) -> list[Round]:
        seq, tokens = result.seq, self.tokens[result.seq]
        self.logs[seq] = self.logs.get(seq, "") + result.logs
        del tokens[len(tokens) - result.backtrack :]
        tokens += result.ff_tokens
        self.sent_back += result.backtrack
        if result.then == "fork":
            for child in result.children:
                self.tokens[child] = list(tokens)
        elif result.then in ("stop", "error"):
            self.ended[seq] = result.then
            if result.error:
                self.errors[seq], self.codes[seq] = result.error, result.code
        elif result.then == "sample":
            return [lambda: self._sample(result)]
        return []

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
    """A model that wants to write this text, and to end then."""

    def choose(_seq: int, tokens: list[int], may: list[int]) -> int:
        rest = text[len(b"".join(map(vocabulary().token, tokens)).decode()) :].encode()
        fits = [t for t in may if vocabulary().token(t) and rest.startswith(vocabulary().token(t))]
        return max(fits, key=lambda t: len(vocabulary().token(t))) if fits else 0

    return choose


def says(text: str) -> Choose:
    """A model that says this, token by token, whatever was there before; then it ends."""
    rest = deque(tokens_of(text))
    return lambda _seq, _tokens, _may: rest.popleft() if rest else 0


# --- token sets -----------------------------------------------------------------------------------


sets = st.sets(st.integers(0, 99))


@given(sets, sets)
def test_token_sets_are_sets(left: set[int], right: set[int]) -> None:
    a, b = TokenSet(100, left), TokenSet(100, right)
    assert set(a | b) == left | right
    assert set(a & b) == left & right
    assert set(a ^ b) == left ^ right
    assert set(a - b) == left - right
    assert set(~a) == set(range(100)) - left
    assert (len(a), bool(a), list(a)) == (len(left), bool(left), sorted(left))
    assert all((token in a) == (token in left) for token in range(-1, 101))
    assert (a == b) == (left == right)
    assert list(allowed(a.mask, 100)) == sorted(left)
    assert len(a.mask) == 16


def test_a_token_set_has_all_none_or_those_whose_bytes_pass_a_test() -> None:
    assert len(TokenSet.all(100)) == 100
    assert not TokenSet.none(100)
    digits = TokenSet.where(vocabulary(), bytes.isdigit)
    assert {vocabulary().token(token) for token in digits} >= {b"%d" % i for i in range(10)}
    assert all(vocabulary().token(token).isdigit() for token in digits)


def test_a_token_set_refuses_what_is_no_token_of_its_vocabulary() -> None:
    with pytest.raises(ValueError, match="token 100 is not in the vocabulary, which is 0 to 99"):
        TokenSet(100, [100])
    with pytest.raises(ValueError, match="vocabularies of 100 and 64 tokens"):
        TokenSet(100) | TokenSet(64)


# --- classes --------------------------------------------------------------------------------------


class Digits(Controller):
    """As many digits as the argument says; the log counts them."""

    def __init__(self) -> None:
        self.digits = TokenSet.where(self.host.vocabulary, bytes.isdigit)
        self.seen = 0

    def init_prompt(self, prompt: list[int]) -> None:
        self.log("prompt", self.text(prompt))

    def mid_process(self, fork_group: list[int]) -> Decision:
        assert fork_group == [self.seq]
        return stop() if self.seen == self.arg else sample(self.digits)

    def post_process(self, tokens: list[int], backtrack: int) -> None:
        self.seen += len(tokens)
        self.log(self.seen, end=";")


def test_a_class_constrains_what_is_sampled() -> None:
    run = play_class(Digits, prompt="count: ", arg=b"5")
    assert re.fullmatch("[0-9]{5}", run.text())
    assert run.ended == {0: "stop"}
    assert run.logs == {0: "prompt count: \n1;2;3;4;5;"}


class Splicer(Controller):
    """Writes by itself, takes some of it back, and writes on."""

    def __init__(self) -> None:
        self.script = [append("one two"), splice(1, " three"), splice(2), append(tokens_of("!"))]
        self.told: list[tuple[list[int], int]] = []

    def mid_process(self, fork_group: list[int]) -> Decision:
        return self.script.pop(0) if self.script else stop()

    def post_process(self, tokens: list[int], backtrack: int) -> Decision:
        self.told.append((tokens, backtrack))
        self.log(self.text(tokens), backtrack)
        return go_on()


def test_a_class_appends_and_backtracks() -> None:
    run = play_class(Splicer)
    one_two, three = tokens_of("one two"), tokens_of(" three")
    expected = ((one_two[:-1] + three)[:-2]) + tokens_of("!")
    assert run.tokens[0] == expected
    assert [line.rsplit(" ", 1)[1] for line in run.logs[0].splitlines()] == ["0", "1", "2", "0"]
    assert run.sampled == 0


class Appender(Controller):
    """Appends before its first token."""

    done = False

    def pre_process(self) -> Decision:
        if self.done:
            return go_on()
        self.done = True
        return append("Say: ")


def test_the_default_class_ends_where_the_model_does() -> None:
    run = play_class(Appender, choose=says("hello"))
    assert run.text() == "Say: hello"
    assert run.ended == {0: "stop"}


class Forker(Controller):
    """Two sequences: the first waits for what the second writes into a variable."""

    def __init__(self) -> None:
        self.path: list[str] = []
        self.forked = False

    def pre_process(self) -> Decision:
        if not self.forked:
            self.forked = True
            return fork(2)
        if self.path == ["first"] and "word" not in self.vars:
            return suspend()
        return go_on()

    def mid_process(self, fork_group: list[int]) -> Decision:
        if len(fork_group) == 2:
            self.path.append("first" if self.seq == fork_group[0] else "second")
            return append(self.path[0] + ":")
        if self.path == ["second"]:
            self.path.append("wrote")
            self.vars["word"] = "hello"
            return stop()
        if self.path == ["first"]:
            self.path.append("read")
            return append(self.vars["word"])
        return stop()


def test_a_clone_has_its_own_state_and_the_requests_variables() -> None:
    run = play_class(Forker)
    assert run.texts == ["first:hello", "second:"]
    assert set(run.ended.values()) == {"stop"}


class OwnClone(Controller):
    """Holds what cannot be copied."""

    held: object
    forked = False

    def __init__(self) -> None:
        self.held = (character for character in "abc")

    def pre_process(self) -> Decision:
        if self.forked:
            return stop()
        self.forked = True
        return fork(2)

    def mid_process(self, fork_group: list[int]) -> Decision:
        return append(f"{self.held}")


class WithClone(OwnClone):
    """Says how to copy it."""

    def clone(self) -> WithClone:
        copied = WithClone.__new__(WithClone)
        copied.held, copied.forked = "copied", True
        return copied


def test_a_class_may_say_how_it_is_copied() -> None:
    run = play_class(OwnClone)
    assert "it cannot be copied for a fork: cannot pickle 'generator'" in run.errors[0]
    assert "override clone()" in run.errors[0]
    assert play_class(WithClone).text(1) == "copied"


WRONG = [
    ("init_prompt", 3, "init_prompt returned 3; right would be nothing"),
    ("pre_process", True, "pre_process returned True; right would be go_on(), stop()"),
    ("pre_process", sample({1}), "pre_process returned sample(…), which is not allowed there"),
    ("pre_process", splice(1), "pre_process returned splice(…), which is not allowed there"),
    ("pre_process", stop, "which must be called: stop()"),
    ("pre_process", fork(0), "pre_process: fork(n) is 0; right would be a number, at least 1"),
    ("pre_process", append([4096]), "a token is 4096; right would be a number, 0 to 4095"),
    ("pre_process", append(7), "append(tokens) with 7; right would be text or a list"),  # type: ignore[arg-type]
    ("mid_process", None, "mid_process returned None; right would be sample(mask), splice("),
    ("mid_process", suspend(), "mid_process returned suspend(…), which is not allowed there"),
    ("mid_process", splice(-1), "backtrack is -1; right would be a number, at least 0"),
    (
        "mid_process",
        sample({4096}),
        "token 4096 is not in the vocabulary, which is 0 to 4095; right would be",
    ),
    ("mid_process", sample(set()), "a mask that allows no token"),
    ("mid_process", sample(7), "'int' object is not iterable; right would be a TokenSet"),  # type: ignore[arg-type]
    ("mid_process", sample(TokenSet(64, [1])), "a mask of 64 tokens; the vocabulary has 4096"),
    ("post_process", sample(), "post_process returned sample(…), which is not allowed there"),
]


@pytest.mark.parametrize(("call", "returned", "message"), WRONG)
def test_a_wrong_answer_is_told_with_what_would_be_right(
    call: str, returned: object, message: str
) -> None:
    kind = type("Wrong", (Controller,), {call: lambda *_: returned})
    run = play_class(kind)
    assert message in run.errors[0]
    assert run.codes == {0: Code.CONTROLLER_FAILED}


class Failing(Controller):
    """Divides by nothing."""

    def mid_process(self, fork_group: list[int]) -> Decision:
        return sample({1 // len(fork_group[1:])})


def test_an_exception_is_told_with_its_line_and_logged_with_its_trace() -> None:
    run = play_class(Failing)
    assert run.codes == {0: Code.CONTROLLER_FAILED}
    assert "Failing raised ZeroDivisionError:" in run.errors[0]
    assert "test_python_controllers.py:" in run.errors[0]
    assert "in mid_process: return sample({1 // len(fork_group[1:])})" in run.errors[0]
    assert "\n" not in run.errors[0]
    assert run.logs[0].startswith("mid_process of ")
    trace = run.logs[0].splitlines()[1:]
    assert trace[0] == "Traceback (most recent call last):"
    assert [line for line in trace if line.startswith("  File ")] == [
        f'  File "{__file__}", line {Failing.mid_process.__code__.co_firstlineno + 1}, '
        "in mid_process"
    ]
    assert trace[-1] == "ZeroDivisionError: integer division or modulo by zero"


def test_what_led_to_an_exception_is_in_the_log_too() -> None:
    class Twice(Controller):
        def pre_process(self) -> Decision:
            try:
                return json.loads("{")  # type: ignore[no-any-return]
            except ValueError as error:
                raise RuntimeError("one line\n  and another") from error

    run = play_class(Twice)
    assert "RuntimeError: one line and another, at " in run.errors[0]
    assert "direct cause" in run.logs[0]
    files = re.findall(r'File "([^"]*)"', run.logs[0])
    assert files == [__file__, __file__], "neither ours nor those of the standard library"


@pytest.mark.parametrize(("name", "value"), [("x" * 257, "y"), ("x", "y" * 2**20 + "y")])
def test_a_variable_that_is_too_long_is_told_with_the_authors_line(name: str, value: str) -> None:
    class Sets(Controller):
        def pre_process(self) -> Decision:
            self.vars[name] = value
            return stop()

    async def main(ctx: Context) -> None:
        ctx.vars[name] = value

    assert "in pre_process: self.vars[name] = value" in play_class(Sets).errors[0]
    assert "in main: ctx.vars[name] = value" in play_script(main).errors[0]


def test_the_line_told_is_the_authors_where_a_library_raised() -> None:
    class Parses(Controller):
        def pre_process(self) -> Decision:
            return json.loads("{")  # type: ignore[no-any-return]

    error = play_class(Parses).errors[0]
    assert "JSONDecodeError" in error
    assert 'in pre_process: return json.loads("{")' in error


def test_leaving_the_program_is_an_error_like_another() -> None:
    class Leaves(Controller):
        def pre_process(self) -> Decision:
            raise SystemExit(3)

    assert "raised SystemExit: 3" in play_class(Leaves).errors[0]


def test_a_round_that_takes_too_long_is_told_in_the_log() -> None:
    class Slow(Controller):
        def pre_process(self) -> Decision:
            sum(range(2_000_000))
            return stop()

    limits = Limits(pre_s=1e-4, mid_s=1e-4, post_s=1e-4)
    run = play_class(Slow, limits=limits)
    assert run.ended == {0: "stop"}
    assert re.search(r"a round, up to its pre_process, took [\d.]+ ms of CPU", run.logs[0])
    assert "took" not in play_class(Slow, limits=Limits(pre_s=60)).logs[0]


def test_the_argument_is_json_or_text() -> None:
    class Says(Controller):
        def mid_process(self, fork_group: list[int]) -> Decision:
            self.log(repr(self.arg))
            return stop()

    cases = [(b"", "None"), (b'{"a": [1]}', "{'a': [1]}"), (b"a text", "'a text'")]
    for arg, expected in cases:
        assert play_class(Says, arg=arg).logs[0] == expected + "\n"


# --- scripts --------------------------------------------------------------------------------------


def test_a_script_writes_fixed_text_and_ends() -> None:
    async def main(ctx: Context) -> str:
        await ctx.fixed("The answer is ")
        await ctx.fixed(b"42")
        await ctx.fixed("")
        return "done"

    run = play_script(main, prompt="Q: ")
    assert run.text() == "The answer is 42"
    assert (run.ended, run.logs, run.sampled) == ({0: "stop"}, {0: "done\n"}, 0)


def test_a_script_sees_its_prompt_its_argument_and_its_text() -> None:
    async def main(ctx: Context) -> None:
        ctx.log(ctx.prompt == tokens_of("def f"), ctx.arg, ctx.seq)
        await ctx.fixed("one ")
        here = ctx.label()
        await ctx.fixed("two")
        ctx.log(ctx.text_since(here), ctx.tokens_since(here) == tokens_of("two"))
        ctx.log(ctx.tokens == tokens_of("def f") + tokens_of("one ") + tokens_of("two"))

    run = play_script(main, prompt="def f", arg=b'{"a":1}')
    assert run.logs[0] == "True {'a': 1} 0\ntwo True\nTrue\n"


def test_a_text_of_a_regex_ends_where_the_model_ends_it() -> None:
    async def main(ctx: Context) -> None:
        number = await ctx.gen(regex="[0-9]+")
        await ctx.fixed(f" is {int(number) + 1} less one")

    run = play_script(main, choose=says("120"))
    assert run.text() == "120 is 121 less one"
    assert run.sent_back == 1, "the token that ends a sequence is taken back"


def test_a_text_of_a_regex_ends_where_nothing_may_follow() -> None:
    async def main(ctx: Context) -> None:
        ctx.log(await ctx.gen(regex="[0-9]{3}"), await ctx.gen(regex=""), await ctx.gen(regex="x?"))

    run = play_script(main, choose=says("120x"))
    assert (run.logs[0], run.text(), run.sampled) == ("120  x\n", "120x", 4)


def test_a_text_ends_after_max_tokens() -> None:
    async def main(ctx: Context) -> None:
        here = ctx.label()
        text = await ctx.gen(max_tokens=3)
        assert len(ctx.tokens_since(here)) == 3
        assert ctx.text_since(here) == text
        await ctx.gen(regex="[0-9]+", max_tokens=5)

    run = play_script(main, choose=says("a b c1234567"))
    assert run.sampled == 8
    assert run.text() == "a b c12345"


def test_a_script_backtracks_to_a_label() -> None:
    async def main(ctx: Context) -> None:
        await ctx.fixed("The answer is ")
        start = ctx.label()
        number = await ctx.gen(regex=r"[0-9]+", max_tokens=5)
        if int(number) > 10:
            await ctx.fixed("too much", following=start)
        after = ctx.label()
        await ctx.fixed("!", following=after)
        ctx.log(ctx.text_since(start))

    run = play_script(main, choose=says("99"))
    assert run.text() == "The answer is too much!"
    assert run.logs[0] == "too much!\n"
    assert play_script(main, choose=says("9")).text() == "The answer is 9!"


def test_a_label_that_was_taken_back_is_an_error() -> None:
    async def main(ctx: Context) -> None:
        start = ctx.label()
        await ctx.fixed("a b c d")
        late = ctx.label()
        await ctx.fixed("x", following=start)
        await ctx.fixed("y", following=late)

    run = play_script(main)
    assert "was cut back to 1" in run.errors[0]
    assert 'in main: await ctx.fixed("y", following=late)' in run.errors[0]


def test_what_is_no_label_is_refused() -> None:
    async def fixed(ctx: Context) -> None:
        await ctx.fixed("x", following=99)  # type: ignore[arg-type]

    async def text_since(ctx: Context) -> None:
        ctx.text_since("start")  # type: ignore[arg-type]

    assert (
        "fixed(following=label) with 99; right would be a label from ctx.label(), at "
        in (play_script(fixed).errors[0])
    )
    error = play_script(text_since).errors[0]
    assert "text_since(label) with 'start'; right would be a label from ctx.label()" in error
    assert 'in text_since: ctx.text_since("start")' in error


def test_a_text_stops_in_the_middle_of_a_token() -> None:
    assert len(tokens_of("    ")) == 1
    run = play_script(_until_two_spaces, choose=says("return    x"))
    assert run.logs[0] == "'return  '\n"
    assert run.text() == "return  |"
    assert run.sent_back == 1


async def _until_two_spaces(ctx: Context) -> None:
    ctx.log(repr(await ctx.gen(stop_at="  ")))
    await ctx.fixed("|")


def test_a_stop_text_may_lie_over_several_tokens() -> None:
    async def main(ctx: Context) -> None:
        ctx.log(repr(await ctx.gen(stop_at=["turn x\n", "never"])))

    run = play_script(main, choose=says("return x\n\n    return y"))
    assert run.logs[0] == "'return x\\n'\n"
    assert run.text() == "return x\n"


@given(st.text("ab \n", max_size=12), st.text("ab \n", min_size=1, max_size=3), st.integers(0, 9))
@settings(max_examples=examples(50))
def test_what_is_kept_ends_with_the_first_stop_text(said: str, stop_at: str, seed: int) -> None:
    chance = random.Random(seed)

    def choose(_seq: int, tokens: list[int], may: list[int]) -> int:
        done = b"".join(map(vocabulary().token, tokens))
        rest = said.encode()[len(done) :]
        fits = [t for t in may if (text := vocabulary().token(t)) and rest.startswith(text)]
        return chance.choice(fits) if fits else 0

    async def main(ctx: Context) -> None:
        ctx.log(await ctx.gen(stop_at=stop_at), end="")

    run = play_script(main, choose=choose)
    before, found, _ = said.partition(stop_at)
    assert run.text() == run.logs[0] == before + found


def test_a_choice_is_one_of_its_texts() -> None:
    options = ["yes", "yes sir", 'no "\n', "é / \\d"]

    async def main(ctx: Context) -> None:
        ctx.log(await ctx.gen(choice=options), end="")

    seen = {play_script(main, seed=seed).logs[0] for seed in range(60)}
    assert seen == set(options)
    assert play_script(main, choose=writes("yes sir")).text() == "yes sir"


def test_only_allowed_tokens_are_sampled() -> None:
    async def main(ctx: Context) -> None:
        digits = ctx.token_set(bytes.isdigit)
        await ctx.gen(allow=digits, max_tokens=20)
        await ctx.gen(allow=TokenSet(digits.size, tokens_of("x")), max_tokens=1)
        await ctx.gen(allow={ctx.prompt[0], 0})

    run = play_script(main, prompt=" return", seed=3)
    assert re.fullmatch("[0-9]{20,}x( return)*", run.text())


@pytest.mark.parametrize(
    "regex",
    [
        r"[0-9]+",
        r"(ab|a)*c",
        r"[A-Z][a-z]{2,5}, [0-9]{4}",
        r"[0-9]{3}-[0-9]{4}|none",
        r"é+x?",
        r".{4}",
    ],
)
def test_sampled_texts_match_their_regex(regex: str) -> None:
    async def main(ctx: Context) -> None:
        ctx.log(await ctx.gen(regex=regex), end="")

    for seed in range(40):
        run = play_script(main, seed=seed)
        if run.sampled < 300:
            assert re.fullmatch(regex, run.logs[0])
            assert run.text() == run.logs[0]


class Person(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    age: int
    tags: list[str] = []
    home: dict[str, bool] | None = None


SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b c"]}, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}},
            "additionalProperties": False,
        },
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_sampled_json_is_of_its_schema() -> None:
    async def main(ctx: Context) -> None:
        ctx.log(await ctx.gen(json_schema=SCHEMA), end="")

    for seed in range(40):
        run = play_script(main, seed=seed)
        assert run.ended == {0: "stop"}, run.errors
        person = msgspec.json.decode(run.logs[0], type=Person)
        assert len(person.name) <= 8
        assert 0 <= person.age <= 120
        assert len(person.tags) <= 3
        assert set(person.tags) <= {"a", "b c"}


def test_a_lark_grammar_constrains_too() -> None:
    async def main(ctx: Context) -> None:
        ctx.log(await ctx.gen(lark='start: "(" start ")" | "x"'), end="")

    for seed in range(20):
        text = play_script(main, seed=seed).logs[0]
        assert text.count("(") == text.count(")")
        assert text.strip("()") == "x"


WRONG_GENS = [
    ({"regex": "[a"}, "gen(regex='[a'): llguidance: "),
    ({"lark": "start: foo"}, 'unknown name: "foo"'),
    ({"json_schema": {"type": "objct"}}, "Invalid type: objct"),
    ({"json_schema": "{"}, "gen(json_schema=…): "),
    ({"regex": "a", "lark": "b"}, "gen(regex, lark): only one of these is allowed at a time"),
    ({"regex": 3}, "gen(regex=3); right would be text"),
    ({"regex": "[0-9"}, 'invalid regex "[0-9" (in regex): regex parse error: unclosed character'),
    ({"choice": []}, "gen(choice=[]); right would be a list of at least one text"),
    ({"choice": ["a", 3]}, "gen(choice=['a', 3]); right would be a list of at least one text"),
    ({"choice": "yes"}, "gen(choice='yes'); right would be a list of at least one text, as in"),
    ({"choice": b"yes"}, "gen(choice=b'yes'); right would be a list of at least one text"),
    ({"choice": 5}, "gen(choice=5); right would be a list of at least one text"),
    ({"allow": [4096]}, "token 4096 is not in the vocabulary, which is 0 to 4095"),
    ({"allow": []}, "right would be some of 4096 tokens"),
    ({"stop_at": ""}, "right would be text that is not empty"),
    ({"max_tokens": 0}, "right would be a number, at least 1"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_GENS)
def test_a_wrong_gen_fails_at_the_call(arguments: dict[str, object], message: str) -> None:
    async def main(ctx: Context) -> None:
        await ctx.gen(**arguments)  # type: ignore[arg-type]

    error = play_script(main).errors[0]
    assert message in error
    assert "\n" not in error
    assert "in main: await ctx.gen(**arguments)" in error


def test_all_that_llguidance_says_is_in_the_log() -> None:
    async def main(ctx: Context) -> None:
        await ctx.gen(lark="start: ((\nx")

    run = play_script(main)
    assert "llguidance: 1(10): Expected token ')', found" in run.errors[0]
    assert "   1 | start: ((" in run.logs[0]
    assert "   1 | start: ((" not in run.errors[0]


def test_a_script_may_catch_what_was_wrong_and_go_on_in_its_forks_too() -> None:
    async def main(ctx: Context) -> None:
        try:
            await ctx.gen(regex="[a")
        except Exception as error:
            ctx.log("llguidance" in str(error))
        await ctx.fixed("abc"[await ctx.fork(3)])

    run = play_script(main)
    assert run.texts == ["a", "b", "c"]
    assert run.logs == {0: "True\n", 1: "", 2: ""}


# --- forks of scripts -----------------------------------------------------------------------------


def test_forks_of_forks_run_again_to_where_they_were_and_go_their_own_ways() -> None:
    async def main(ctx: Context) -> None:
        await ctx.fixed("start ")
        label = ctx.label()
        word = await ctx.gen(regex="[a-z]{4}")
        ctx.log(f"chose {word}")
        outer = await ctx.fork(2)
        await ctx.fixed(f" {outer}")
        if outer == 1:
            await ctx.fixed(f"{word[:2]}", following=label)
        own = await ctx.gen(regex="[0-9]{2}")
        inner = await ctx.fork(3)
        await ctx.fixed(f" {word} {outer}.{inner} {own} of {ctx.seq}")
        ctx.log(ctx.text_since(label))

    run = play_script(main, seed=5)
    assert len(run.tokens) == 6
    word = run.text(0)[6:10]
    for seq in run.tokens:
        text = run.text(seq)
        assert run.logs[seq].endswith(f"{text.removeprefix('start ')}\n")
        assert (seq == 0) == run.logs[seq].startswith(f"chose {word}\n")
        match = re.fullmatch(rf"start (.*?)(\d\d) {word} ([01])\.([012]) (\d\d) of {seq}", text)
        assert match is not None, text
        assert match[1] == (word[:2] if match[3] == "1" else f"{word} 0")
        assert match[2] == match[5]
    futures = {re.search(r"([01])\.([012])", run.text(seq))[0] for seq in run.tokens}  # type: ignore[index]
    assert len(futures) == 6


def test_a_script_forks_twice_without_a_token_between() -> None:
    async def main(ctx: Context) -> None:
        await ctx.fixed(f"{await ctx.fork(2)}{await ctx.fork(2)}")

    run = play_script(main)
    assert sorted(run.texts) == ["00", "01", "10", "11"]
    assert run.sent_back == 0, "on the way nothing goes to the model"


def test_a_fork_into_one_is_none() -> None:
    async def main(ctx: Context) -> None:
        await ctx.fixed(f"{await ctx.fork(1)}")

    assert play_script(main).texts == ["0"]


def test_forks_talk_through_variables_and_wait_for_them() -> None:
    async def main(ctx: Context) -> None:
        ctx.vars["round"] = "one"
        index = await ctx.fork(2)
        if index == 0:
            word = await ctx.wait_var("word")
            await ctx.fixed(f"got {word} and {ctx.vars.get('nothing', 'no more')}")
            ctx.vars.append("word", "!")
            ctx.vars["answer"] = "done"
        else:
            await ctx.gen(regex="[a-z]", max_tokens=1)
            ctx.vars.set("word", "hello")
            await ctx.wait_var("answer")
            read = ctx.vars.read("word")
            assert read is not None
            ctx.log(ctx.vars["word"], read.version, "round" in ctx.vars)
            assert ctx.vars.read("round").version == 1  # type: ignore[union-attr]

    run = play_script(main)
    assert run.errors == {}
    assert run.text(0) == "got hello and no more"
    assert run.logs[1] == "hello! 2 True\n"


def test_a_write_may_ask_for_a_version() -> None:
    async def main(ctx: Context) -> None:
        first = ctx.vars.set("x", "1", when_version_is=0)
        again = ctx.vars.set("x", "2", when_version_is=0)
        ctx.log(first.ok, again.ok, again.version, again.value, ctx.vars["x"])

    assert play_script(main).logs[0] == "True False 1 b'1' 1\n"


def test_a_variable_that_is_missing_or_no_text_is_an_error() -> None:
    async def missing(ctx: Context) -> None:
        ctx.vars["nothing"]

    async def binary(ctx: Context) -> None:
        ctx.vars["x"] = b"\xff"
        ctx.vars["x"]

    assert "raised KeyError: 'nothing', at" in play_script(missing).errors[0]
    assert "vars.read(name).value gives its bytes" in play_script(binary).errors[0]


def test_waiting_for_what_nobody_writes_is_a_deadlock() -> None:
    async def main(ctx: Context) -> None:
        await ctx.fork(2)
        await ctx.wait_var("nothing")

    run = play_script(main)
    assert set(run.codes.values()) == {Code.DEADLOCK}


def test_a_sequence_that_stops_leaves_its_forks() -> None:
    async def main(ctx: Context) -> None:
        if await ctx.fork(2) == 0:
            await ctx.stop()
            ctx.log("never")
        await ctx.fixed("on")

    run = play_script(main)
    assert run.texts == ["", "on"]
    assert run.logs == {0: "", 1: ""}


def test_the_finally_blocks_of_a_script_run_at_its_end() -> None:
    ended = []

    async def main(ctx: Context) -> None:
        try:
            await ctx.gen(max_tokens=2)
            await ctx.stop()
        finally:
            ended.append(ctx.label().position)

    play_script(main, choose=says("a b c"))
    assert ended == [2]


@given(st.integers(0, 2**32), st.data())
@settings(max_examples=examples(20))
def test_any_tree_of_forks_gives_each_leaf_its_own_history(seed: int, data: st.DataObject) -> None:
    depth = data.draw(st.integers(1, 3))

    async def main(ctx: Context) -> None:
        history: list[str] = []
        for _ in range(depth):
            history.append(await ctx.gen(regex="[a-z]{1,2}|[0-9]"))
            history.append(str(await ctx.fork(2)))
            ctx.vars.append("log", "x")
        await ctx.fixed("=" + ",".join(history))

    run = play_script(main, seed=seed)
    assert run.errors == {}
    paths = set()
    for text in run.texts:
        written, told = text.split("=")
        history = told.split(",")
        assert "".join(history[::2]) == written
        paths.add(tuple(history[1::2]))
    assert len(paths) == len(run.texts) == 2**depth


def test_a_copy_in_the_middle_of_a_text_goes_on_with_it() -> None:
    async def main(ctx: Context) -> None:
        ctx.log(await ctx.gen(regex="ab[cd]"), end="")

    storage = VariableStorage()

    def host(seq: int) -> Host:
        variables = SequenceVariables(1, seq, storage.apply, lambda: None)
        return Host(1, seq, b"", vocabulary(), variables, Log(1000), Limits())

    first, second = host(0), host(1)
    mask = memoryview(bytearray(512))
    one = ScriptProgram(main).start(first)
    one.init_prompt([])
    for letter in "ab":
        one.pre_process()
        one.mid_process([0], mask)
        one.post_process(tokens_of(letter), 0)
    other = one.fork(second)
    for controller, seq, letter in ((one, 0, "c"), (other, 1, "d")):
        assert controller.pre_process().action is Action.CONTINUE
        assert controller.mid_process([seq], mask).masked
        assert set(allowed(mask, 4096)) == {*tokens_of("c"), *tokens_of("d")}
        controller.post_process(tokens_of(letter), 0)
        assert controller.pre_process().action is Action.STOP
        controller.close()
    assert (first.log.take(), second.log.take()) == ("abc", "abd")


def test_a_vocabulary_without_an_end_is_never_allowed_to_end() -> None:
    letters = [bytes([byte]) for byte in range(256)] + [b"ab"]
    without = TokenizerVocabulary.from_tokens(letters, (), "letters")
    mask = memoryview(bytearray(b"\xff" * 36))
    text = Grammar(without, regex("[ab]+x?"))
    assert text.mask(mask)
    assert list(allowed(mask, 288)) == [ord("a"), ord("b"), 256]
    assert not text.advance([256])
    assert text.complete
    assert text.mask(mask)
    assert list(allowed(mask, 288)) == [ord("a"), ord("b"), ord("x"), 256]
    assert text.advance([ord("x")])
    assert not text.mask(mask)


# --- scripts that are wrong -----------------------------------------------------------------------


def test_a_script_that_asks_something_else_in_its_fork_is_told_so() -> None:
    runs = []

    async def main(ctx: Context) -> None:
        runs.append(1)
        await ctx.fixed("a")
        await ctx.fixed("b" * len(runs))
        await ctx.fork(2)

    error = play_script(main).errors[0]
    assert "the script is not deterministic" in error
    assert "its question 2 was fixed(text='bb'), but the first time it was fixed(text='b')" in error
    assert 'in main: await ctx.fixed("b" * len(runs))' in error


def test_a_script_that_reads_more_or_ends_early_in_its_fork_is_told_so() -> None:
    runs: list[int] = []

    async def reads(ctx: Context) -> None:
        runs.append(1)
        await ctx.fixed("a")
        if len(runs) > 1:
            ctx.vars.get("x")
        await ctx.fork(2)

    error = play_script(reads).errors[0]
    assert "was vars.get(name='x'), but the first time it was fork(count=2)" in error
    runs.clear()

    async def ends(ctx: Context) -> None:
        runs.append(1)
        if len(runs) < 2:
            await ctx.fork(2)

    assert "was its end, but the first time it was fork(count=2)" in play_script(ends).errors[0]


def test_catching_it_does_not_make_a_script_deterministic() -> None:
    runs: list[int] = []

    async def main(ctx: Context) -> None:
        runs.append(1)
        try:
            await ctx.fixed("b" * len(runs))
        except Exception:
            pass
        await ctx.fork(2)

    assert "the script is not deterministic" in play_script(main).errors[0]


def test_a_script_that_raises_is_told_with_its_line() -> None:
    async def main(ctx: Context) -> None:
        word = await ctx.gen(regex="[a-z]+", max_tokens=1)
        await ctx.fixed(str(int(word)))

    error = play_script(main).errors[0]
    assert "raised ValueError: invalid literal for int()" in error
    assert "in main: await ctx.fixed(str(int(word)))" in error


def test_a_script_awaits_only_what_its_context_gives() -> None:
    class Other:
        def __await__(self):  # type: ignore[no-untyped-def]
            yield 7

    async def main(ctx: Context) -> None:
        await Other()

    assert (
        "the script awaits 7; it may only await the calls of its ctx"
        in (play_script(main).errors[0])
    )


def test_an_ask_that_is_not_awaited_before_the_next_one_is_an_error() -> None:
    async def main(ctx: Context) -> None:
        await ctx.fixed("a")
        ctx.fixed("hello")  # type: ignore[unused-coroutine]
        await ctx.gen(max_tokens=2)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = play_script(main)
    assert (
        "main: ctx.fixed(…) was not awaited, so it has no effect; right would be "
        "await ctx.fixed(…), at test_python_controllers.py:"
    ) in run.errors[0]
    assert 'in main: ctx.fixed("hello")' in run.errors[0]
    assert run.sampled == 0


def test_an_ask_that_is_not_awaited_at_the_end_is_an_error() -> None:
    async def main(ctx: Context) -> object:
        await ctx.fixed("a")
        return ctx.stop()

    error = play_script(main).errors[0]
    assert "right would be await ctx.stop(…), at" in error
    assert "in main: return ctx.stop()" in error


def test_an_ask_that_is_not_awaited_explains_what_its_use_raises() -> None:
    async def main(ctx: Context) -> None:
        number = ctx.gen(regex="[0-9]")
        int(number)  # type: ignore[call-overload]

    run = play_script(main)
    assert "await ctx.gen(…), at" in run.errors[0]
    assert 'in main: number = ctx.gen(regex="[0-9]")' in run.errors[0]
    assert "TypeError: int() argument must be" in run.logs[0]


def test_an_ask_may_be_awaited_later_but_only_once() -> None:
    async def main(ctx: Context) -> None:
        asked = ctx.fixed("a")
        ctx.log("made")
        await asked
        await asked

    run = play_script(main)
    assert run.logs[0].startswith("made\n")
    assert "cannot reuse already awaited coroutine" in run.errors[0]


def test_what_is_awaited_of_others_is_an_error_even_where_it_is_none() -> None:
    class Other:
        def __await__(self):  # type: ignore[no-untyped-def]
            yield None

    async def main(ctx: Context) -> None:
        await Other()

    assert "the script awaits None" in play_script(main).errors[0]


# --- by name --------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of an operator's, in the current directory."""
    source = """
        from tokenbus.workers.controller.python import Controller, PythonProgram

        class Upper(Controller):
            tokenbus_name = "upper"

        class Plain(Controller):
            pass

        class Wants(Controller):
            def __init__(self, x):
                pass

        class Misspelt(Controller):
            def mid_proces(self, fork_group):
                pass

        class Camel(Plain):
            def initPrompt(self, prompt):
                pass

        class Few(Controller):
            def mid_process(self):
                pass

        class Helped(Controller):
            def my_process(self):
                pass

            def _mid_process(self):
                pass

            def post_process(self, tokens, *others):
                pass

            def post_processing(self):
                pass

        class Other:
            pass

        async def main(ctx):
            await ctx.fixed("x")

        async def two(ctx, arg):
            pass

        async def bare():
            pass

        def sync(ctx):
            pass

        program = PythonProgram(Plain)
    """
    path = tmp_path / "operators_own.py"
    path.write_text(textwrap.dedent(source))
    (tmp_path / "operators_broken.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "operators_failing.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in __import__("sys").path if entry])
    return path


@pytest.mark.usefixtures("module")
def test_a_class_a_script_and_a_program_are_loaded_by_name() -> None:
    for attribute, name in (
        ("Upper", "upper"),
        ("Plain", None),
        ("main", None),
        ("program", None),
        ("Helped", None),
    ):
        spec = f"operators_own:{attribute}"
        registered, program = load_program(spec)
        assert registered == (name or spec)
        assert Run(program, choose=says("a")).ended == {0: "stop"}


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("operators_own", "right would be module:Name"),
        ("operators_nothing:X", "no module operators_nothing found from "),
        ("operators_own.sub:X", "no module operators_own.sub found from "),
        ("operators_broken:X", "imports nothing_of_that_name, which is not installed"),
        ("operators_failing:X", "raised ZeroDivisionError: division by zero"),
        ("operators_own:Missing", "module operators_own has no Missing"),
        ("operators_own:Other", "does not extend tokenbus.workers.controller.python.Controller"),
        ("operators_own:sync", "is not a controller; a script is an async def"),
        (
            "operators_own:bare",
            "is async def bare(), which cannot be called with one argument, the context:",
        ),
        (
            "operators_own:two",
            "missing a required argument: 'arg'; right would be async def two(ctx)",
        ),
        (
            "operators_own:Misspelt",
            "has a method mid_proces, which nothing calls, and no mid_process",
        ),
        ("operators_own:Camel", "has a method initPrompt, which nothing calls, and no init_prompt"),
        ("operators_own:Few", "Few.mid_process(self) cannot be called: too many positional"),
        ("operators_own:Wants", "has an __init__ that requires arguments"),
        ("operators_own:__name__", "is not a controller; right would be a subclass of Controller"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_the_reason(spec: str, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        load_program(spec)


@pytest.mark.process
@pytest.mark.usefixtures("module")
def test_serving_says_what_is_served_and_how_to_try_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tokenbus.workers.controller"]
    worker = subprocess.Popen(
        [*command, "operators_own:Upper", "operators_own:main"],
        env=os.environ | {"TOKENBUS_RUN_DIR": str(tmp_path / "run")},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert worker.stderr is not None
        first = worker.stderr.readline()
        assert (
            "serves upper, operators_own:main; try: tokenbus controller run upper --prompt" in first
        )
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.communicate(timeout=300)
