"""One script runs in MicroPython, as a client uploads it, and in CPython, as an operator serves
it."""

from __future__ import annotations

import pytest
from tokenbus.workers.controller.python.printed import captured
from tokenbus.workers.controller.python.script import ScriptProgram as ServedScript
from tokenbus.workers.controller.scripts.controller import ScriptProgram

from ..played import UNHURRIED
from ..python.runs import Run
from . import script_runs
from .script_runs import constraints

pytestmark = pytest.mark.process  # Compilers of grammars and of the interpreter are processes.

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
KINDS = pytest.mark.parametrize("kind", ["uploaded", "served"])


def play(kind: str, text: str, **how: object) -> Run:
    if kind == "uploaded":
        return script_runs.play(text, "python", **how)
    names: dict[str, object] = {}
    exec(compile(text, "answer.py", "exec"), names)
    served = ScriptProgram(ServedScript(names["main"]), constraints().get)  # type: ignore[arg-type]
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
    assert ("answer.py:4 in main: " in error) is (kind == "served")
