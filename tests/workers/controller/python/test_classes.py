"""Controllers written as classes: the effects of their decisions, and the texts of their errors."""

from __future__ import annotations

import json
import re

import pytest
from tokenbus.protocol.errors import Code
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.python import (
    Context,
    Controller,
    Decision,
    TokenSet,
    append,
    fork,
    go_on,
    sample,
    splice,
    stop,
    suspend,
)

from .runs import play_class, play_script, says, tokens_of


class Digits(Controller):
    """Samples as many digits as the argument says, and logs the count."""

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


def test_a_class_constrains_the_sampled_tokens() -> None:
    run = play_class(Digits, prompt="count: ", arg=b"5")
    assert re.fullmatch("[0-9]{5}", run.text())
    assert run.ended == {0: "stop"}
    assert run.logs == {0: "prompt count: \n1;2;3;4;5;"}


class Splicer(Controller):
    """Appends text, drops a part of it, and appends more."""

    def __init__(self) -> None:
        self.script = [append("one two"), splice(1, " three"), splice(2), append(tokens_of("!"))]

    def mid_process(self, fork_group: list[int]) -> Decision:
        return self.script.pop(0) if self.script else stop()

    def post_process(self, tokens: list[int], backtrack: int) -> Decision:
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
    """Appends text before the first token is sampled."""

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
    """Forks once. The first sequence waits for a variable, which the second sequence sets."""

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


def test_a_clone_has_a_separate_state_and_shares_variables() -> None:
    run = play_class(Forker)
    assert run.texts == ["first:hello", "second:"]
    assert set(run.ended.values()) == {"stop"}


class Special(Controller):
    """Logs the special tokens that its argument names."""

    def pre_process(self) -> Decision:
        assert isinstance(self.arg, list)
        self.log([self.special_token(name) for name in self.arg])
        return stop()


async def special(ctx: Context) -> None:
    ctx.log([ctx.special_token(name) for name in ("eos", "turn_end")])


def test_special_tokens_are_found_by_name() -> None:
    assert play_class(Special, arg=b'["eos", "bos", "turn_start"]').logs == {0: "[0, None, None]\n"}
    assert play_script(special).logs == {0: "[0, None]\n"}
    wrong = play_class(Special, arg=b'["end"]').errors[0]
    assert "special_token('end'); expected one of unk, pad, sep, bos, eos" in wrong


class OwnClone(Controller):
    """Has an attribute that cannot be copied."""

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
    """Defines how a fork copies the attribute."""

    def clone(self) -> WithClone:
        copied = WithClone.__new__(WithClone)
        copied.held, copied.forked = "copied", True
        return copied


def test_a_class_may_define_how_it_is_copied() -> None:
    run = play_class(OwnClone)
    assert "cannot be copied for a fork: cannot pickle 'generator'" in run.errors[0]
    assert "override clone()" in run.errors[0]
    assert play_class(WithClone).text(1) == "copied"


WRONG = [
    ("init_prompt", 3, "init_prompt returned 3; expected nothing"),
    ("pre_process", True, "pre_process returned True; expected go_on(), stop()"),
    ("pre_process", sample({1}), "pre_process returned sample(…), which is not allowed there"),
    ("pre_process", splice(1), "pre_process returned splice(…), which is not allowed there"),
    ("pre_process", stop, "which must be called: stop()"),
    ("pre_process", fork(0), "pre_process: fork(n) is 0; expected a number, at least 1"),
    ("pre_process", append([4096]), "a token is 4096; expected a number, 0 to 4095"),
    ("pre_process", append(7), "append(tokens) with 7; expected text or a list"),  # type: ignore[arg-type]
    ("mid_process", None, "mid_process returned None; expected sample(mask, bias), look("),
    ("mid_process", suspend(), "mid_process returned suspend(…), which is not allowed there"),
    ("mid_process", splice(-1), "backtrack is -1; expected a number, at least 0"),
    (
        "mid_process",
        sample({4096}),
        "token 4096 is not in the vocabulary, which is 0 to 4095; expected",
    ),
    ("mid_process", sample(set()), "a mask that allows no token"),
    ("mid_process", sample(7), "'int' object is not iterable; expected a TokenSet"),  # type: ignore[arg-type]
    ("mid_process", sample(TokenSet(64, [1])), "a mask of 64 tokens; the vocabulary has 4096"),
    ("post_process", sample(), "post_process returned sample(…), which is not allowed there"),
]


@pytest.mark.parametrize(("call", "returned", "message"), WRONG)
def test_a_wrong_answer_is_reported_with_what_would_be_right(
    call: str, returned: object, message: str
) -> None:
    kind = type("Wrong", (Controller,), {call: lambda *_: returned})
    run = play_class(kind)
    assert message in run.errors[0]
    assert run.codes == {0: Code.CONTROLLER_FAILED}


class Failing(Controller):
    """Divides by zero."""

    def mid_process(self, fork_group: list[int]) -> Decision:
        return sample({1 // len(fork_group[1:])})


def test_an_exception_is_reported_with_its_line_and_logged_with_its_trace() -> None:
    run = play_class(Failing)
    assert run.codes == {0: Code.CONTROLLER_FAILED}
    assert "Failing raised ZeroDivisionError:" in run.errors[0]
    assert "test_classes.py:" in run.errors[0]
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


def test_the_cause_of_an_exception_is_in_the_log_too() -> None:
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
    assert files == [__file__, __file__], "the trace names other files"


@pytest.mark.parametrize(("name", "value"), [("x" * 257, "y"), ("x", "y" * 2**20 + "y")])
def test_a_variable_that_is_too_long_is_reported_with_the_authors_line(
    name: str, value: str
) -> None:
    class Sets(Controller):
        def pre_process(self) -> Decision:
            self.vars[name] = value
            return stop()

    async def main(ctx: Context) -> None:
        ctx.vars[name] = value

    assert "in pre_process: self.vars[name] = value" in play_class(Sets).errors[0]
    assert "in main: ctx.vars[name] = value" in play_script(main).errors[0]


def test_the_reported_line_is_the_authors_where_a_library_raised() -> None:
    class Parses(Controller):
        def pre_process(self) -> Decision:
            return json.loads("{")  # type: ignore[no-any-return]

    error = play_class(Parses).errors[0]
    assert "JSONDecodeError" in error
    assert 'in pre_process: return json.loads("{")' in error


def test_an_exit_of_the_program_is_reported_as_an_error() -> None:
    class Leaves(Controller):
        def pre_process(self) -> Decision:
            raise SystemExit(3)

    assert "raised SystemExit: 3" in play_class(Leaves).errors[0]


def test_a_round_that_takes_too_long_is_in_the_log() -> None:
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
