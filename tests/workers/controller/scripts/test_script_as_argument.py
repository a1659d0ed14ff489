"""A script that is the argument of its request, as AICI's clients send it, and the controller that
runs it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenbus.protocol.errors import ControllerError
from tokenbus.workers.controller.host import Host
from tokenbus.workers.controller.interface import Program
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.logs import Log
from tokenbus.workers.controller.scripts.controller import ScriptProgram
from tokenbus.workers.controller.scripts.modules import script_module
from tokenbus.workers.controller.variable_calls import SequenceVariables
from tokenbus.workers.variables import VariableStorage

from ..played import UNHURRIED, engine
from ..python.runs import Run, vocabulary
from .script_runs import compiled, constraints

pytestmark = pytest.mark.process  # Grammars and the interpreter are compiled in processes.

PYTHON = b"""
async def main(ctx):
    ctx.log(await ctx.fork(2), "null" if ctx.arg is None else ctx.arg, end="")
"""
JAVASCRIPT = b"""
async function main(ctx) {
  const index = await ctx.fork(2);
  ctx.log(`${index} ${ctx.arg}`);
}
"""
APPENDS = b"""
class Main(Controller):
    def pre_process(self):
        return append([7, 8])
"""


def program(language: str) -> Program:
    module = script_module(engine, language, compiled(language), None)
    return ScriptProgram(module, constraints().get)


def host(seq: int, arg: bytes, limits: Limits = UNHURRIED) -> Host:
    variables = SequenceVariables(1, seq, VariableStorage().apply, lambda: None)
    return Host(1, seq, arg, vocabulary(), variables, Log(1000), limits)


@pytest.mark.parametrize(("language", "script"), [("python", PYTHON), ("javascript", JAVASCRIPT)])
def test_the_script_has_no_argument_in_any_sequence(language: str, script: bytes) -> None:
    run = Run(program(language), arg=script, limits=UNHURRIED)
    assert not run.errors
    assert [run.logs[seq].strip() for seq in sorted(run.logs)] == ["0 null", "1 null"]


def test_limits_that_change_after_the_start_apply() -> None:
    given = host(0, APPENDS)
    controller = program("python").start(given)
    controller.init_prompt(())
    given.limits = replace(UNHURRIED, appended_tokens=1)
    with pytest.raises(ControllerError, match="2 tokens to append; at most 1 are allowed"):
        controller.pre_process()
    controller.close()


def test_a_fork_has_the_limits_of_its_own_host() -> None:
    controller = program("python").start(host(0, PYTHON))
    controller.init_prompt(())
    small = replace(UNHURRIED, memory_bytes=65_536)
    with pytest.raises(ControllerError, match="memory"):
        controller.fork(host(1, PYTHON, small))
    controller.close()
