"""A script catches the error of a constraint that is not valid: in each language, and in both
runtimes of Python."""

from __future__ import annotations

import pytest
from tokenbus.workers.controller.scripts.controller import MAX_REFUSALS

from .test_scores_and_prompts import KINDS, play

pytestmark = pytest.mark.process  # The interpreters are compiled in processes.

PYTHON = """
async def main(ctx):
    await ctx.fixed("x")
    for given in ({"yacc": "%%"}, {"regex": "ok"}, {"yacc": "wrong"}):
        try:
            print("text", await ctx.gen(**given))
        except ControllerError as error:
            print(error)
    i = await ctx.fork(2)
    try:
        await ctx.gen(yacc="%%%d" % i)
    except ControllerError as error:
        print(i, error)
    await ctx.fixed("y%d" % i)
"""
JAVASCRIPT = """
async function main(ctx) {
  await ctx.fixed("x");
  for (const given of [{ yacc: "%%" }, { regex: "ok" }, { yacc: "wrong" }])
    try {
      ctx.log("text", await ctx.gen(given));
    } catch (error) {
      ctx.log(error.message);
    }
  const i = await ctx.fork(2);
  try {
    await ctx.gen({ yacc: `%%${i}` });
  } catch (error) {
    ctx.log(i, error.message);
  }
  await ctx.fixed(`y${i}`);
}
"""


@KINDS
def test_a_script_catches_the_error_and_continues(kind: str) -> None:
    run = play(kind, PYTHON, JAVASCRIPT)
    assert not run.errors
    assert run.texts == ["xoky0", "xoky1"]
    first, text, last, fork = run.logs[0].splitlines()
    assert first.startswith("gen(yacc): yacc: ")
    assert last.startswith("gen(yacc): yacc: ")
    assert text == "text ok"
    assert fork.startswith("0 gen(yacc): yacc: ")
    assert run.logs[1].startswith("1 gen(yacc): yacc: ")


@KINDS
def test_the_number_of_refusals_has_a_bound(kind: str) -> None:
    run = play(
        kind,
        """
async def main(ctx):
    while True:
        try:
            await ctx.gen(yacc="%%")
        except ControllerError:
            ctx.log("refused")
""",
        """
async function main(ctx) {
  for (;;) {
    try {
      await ctx.gen({ yacc: "%%" });
    } catch (error) {
      ctx.log("refused");
    }
  }
}
""",
    )
    assert "gen(yacc): yacc: " in run.errors[0]
    assert run.logs[0].splitlines()[:MAX_REFUSALS] == ["refused"] * MAX_REFUSALS
