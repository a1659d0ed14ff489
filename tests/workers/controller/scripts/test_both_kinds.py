"""One script runs in MicroPython, as a client uploads it, and in CPython, as an operator serves
it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tokenbus.workers.controller.interface import Program
from tokenbus.workers.controller.python import PythonProgram
from tokenbus.workers.controller.python.printed import captured
from tokenbus.workers.controller.python.script import ScriptProgram as ServedScript
from tokenbus.workers.controller.scripts.controller import ScriptProgram

from ..played import UNHURRIED
from ..python.runs import Run
from . import script_runs
from .script_runs import constraints

pytestmark = pytest.mark.process  # Grammars and the interpreter are compiled in processes.

SCRIPT = r"""
async def main(ctx):
    await ctx.gen(yacc='%start s\n%%\ns : "x" "y" ;\n')
    await ctx.gen(substring="hello world", max_tokens=4)
    print(repr(await ctx.gen(substring="one two", substring_end=".")))
    i = await ctx.fork(2)
    await ctx.gen(yacc='%start s\n%%\ns : "z" s | "w" ;\n', stop_at="zz", max_tokens=9)
    ctx.vars.set("v%d" % i, ctx.text(ctx.tokenize("h\u00e9")))
    print(await ctx.wait_var("v%d" % (1 - i)), ctx.vars.has("none"), ctx.eos)
"""
WRONG = """
async def main(ctx):
    await ctx.fixed("a")
    await ctx.gen(yacc="%start")
"""
CLASS = """
from tokenbus.workers.controller.python import (
    Controller, TokenSet, append, fork, sample, splice, stop, suspend
)

class Main(Controller):
    def __init__(self):
        self.rounds = 0
        self.letters = TokenSet.where(self.host.vocabulary, lambda text: text in (b"a", b"b"))

    def init_prompt(self, prompt):
        self.log("prompt", len(prompt), self.arg, self.host.vocabulary.size)

    def pre_process(self):
        self.rounds += 1
        if self.rounds == 2:
            return append("one ")
        if self.rounds == 4:
            return fork(2)
        if self.rounds == 6 and self.seq == 0 and not self.vars.has("end"):
            self.rounds = 5
            return suspend()

    def mid_process(self, fork_group):
        if self.rounds == 4:
            self.mine = fork_group.index(self.seq)
        if self.rounds == 5:
            return splice(1, self.host.vocabulary.tokenize(b"%d" % self.mine))
        if self.rounds == 7:
            return stop()
        words = self.host.vocabulary
        only = self.letters - TokenSet(words.size, words.tokenize(b"b"))
        return sample(only if self.rounds == 1 else self.letters, bias={5: -1.0})

    def post_process(self, tokens, backtrack):
        self.log(self.rounds, self.text(tokens), backtrack)
        if self.rounds == 6 and self.seq:
            self.vars["end"] = "yes"
            return stop()
"""
KINDS = pytest.mark.parametrize("kind", ["uploaded", "served"])


def play(kind: str, text: str, **how: object) -> Run:
    if kind == "uploaded":
        return script_runs.play(text, "python", **how)
    names: dict[str, Any] = {"__name__": "answer"}
    exec(compile(text, "answer.py", "exec"), names)
    guests: Program = (
        PythonProgram(names["Main"]) if "Main" in names else ServedScript(names["main"])
    )
    served = ScriptProgram(guests, constraints().get)
    with captured():
        return Run(served, limits=UNHURRIED, **how)  # type: ignore[arg-type]


def test_the_texts_of_both_kinds_are_the_same() -> None:
    runs = [play(kind, SCRIPT, seed=5) for kind in ("uploaded", "served")]
    for run in runs:
        assert not run.errors
        assert run.text().startswith("xy")
        assert run.logs[0].splitlines()[-1] == "hé False 0"
    assert runs[0].texts == runs[1].texts


@KINDS
def test_a_grammar_that_is_not_valid_is_an_error(kind: str) -> None:
    error = play(kind, WRONG).errors[0]
    assert "gen(yacc): " in error
    assert ("answer.py:4 in main" in error) is (kind == "served")


def test_a_class_with_the_four_calls_runs_in_both_kinds() -> None:
    runs = [play(kind, CLASS, prompt="Q", arg=b"[1]", seed=2) for kind in ("uploaded", "served")]
    for run in runs:
        assert not run.errors
        assert run.logs[0].splitlines()[:3] == ["prompt 1 [1] 4096", "1 a 0", "2 one  0"]
        assert run.text().startswith("aone ")
        assert run.text(1)[6] == "1"
    assert (runs[0].texts, runs[0].logs) == (runs[1].texts, runs[1].logs)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (
            "def mid_process(self, group): return 5",
            "TypeError: mid_process returned 5; expected",
        ),
        ("def mid_process(self, group): return sample([])", "no token is allowed"),
        ("def mid_process(self, group): return splice(-1)", "splice.backtrack=-1."),
        ("def mid_process(self, group): return append([9999])", "tokens that are not valid"),
        ("def post_process(self, tokens, back): 1 / 0", "line 3: ZeroDivisionError"),
    ],
)
def test_a_wrong_answer_of_an_uploaded_class_is_an_error(body: str, error: str) -> None:
    assert re.search(error, play("uploaded", f"\nclass Main(Controller):\n  {body}\n").errors[0])
