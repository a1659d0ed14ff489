"""Values of a wrong type or out of range that a script in a guest process passes to its context.
The script gets an error. The process continues, because other sequences run in it too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tokenbus.protocol.errors import Code, ControllerError
from tokenbus.workers.controller.guests import process
from tokenbus.workers.controller.guests.process import Cause, GuestDied
from tokenbus.workers.controller.guests.remote import RemoteController
from tokenbus.workers.controller.host import Host
from tokenbus.workers.controller.interface import Action, Controller, Program
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.logs import Log
from tokenbus.workers.controller.variable_calls import SequenceVariables
from tokenbus.workers.controller.wasm.compiled_modules import Loaded
from tokenbus.workers.variables import VariableStorage

from ..scripts.script_runs import compiled, vocabulary
from .remote_guests import Runtime, running

pytestmark = pytest.mark.process

LIMITS = Limits(init_s=5.0, script_s=1.0)
CALLS = [
    "ctx.vars.get(b'x')",
    "ctx.vars.get(['x'])",
    "ctx.vars.set('x', 'y', 'z')",
    "ctx.vars.append('x', 'y', True)",
    "await ctx.wait_var(b'x')",
    "await ctx.wait_var(5)",
    "await ctx.fork(2**32)",
    "await ctx.fork(2**64)",
    "await ctx.fork(True)",
]


@pytest.fixture(scope="module")
def guests() -> Iterator[Runtime]:
    with running() as made:
        yield made


def in_argument(guests: Runtime) -> Program:
    """The interpreter that runs the script in the argument of a request."""
    loaded = Loaded("python", compiled("python"))
    return guests.runtime.program("tenant", "script:python", lambda: loaded)


def start(guests: Runtime, script: str, limits: Limits = LIMITS) -> Controller:
    variables = SequenceVariables(1, 0, VariableStorage().apply, lambda: None)
    host = Host(1, 0, script.encode(), vocabulary(), variables, Log(4096), limits, 99)
    return in_argument(guests).start(host)


def decide(controller: Controller) -> None:
    """Runs a script from its beginning to its first decision after ``pre_process``."""
    controller.init_prompt([1])
    if controller.pre_process().action is Action.CONTINUE:
        controller.mid_process((0,), memoryview(bytearray(4 * -(-vocabulary().size // 32))))


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_value_does_not_end_the_process(guests: Runtime, call: str) -> None:
    calm = start(guests, "async def main(ctx):\n    await ctx.receive()")
    calm.init_prompt([1])
    before = guests.table.pids()
    wrong = start(guests, f"async def main(ctx):\n    {call}\n    await ctx.receive()")
    with pytest.raises(ControllerError) as caught:
        decide(wrong)
    assert "process" not in caught.value.message.replace("pre_process", "")
    assert " at `$" not in caught.value.message
    assert guests.table.pids() == before
    wrong.close()
    calm.close()


def test_the_watchdog_lets_a_script_run_up_to_its_limit(
    guests: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "GRACE_S", 0.0)
    short = Limits(init_s=5.0, pre_s=1e-3, mid_s=1e-3, post_s=1e-3, script_s=0.3)
    endless = "async def main(ctx):\n    await ctx.fixed('a')\n    while True: pass"
    controller = start(guests, endless, short)
    controller.init_prompt([1])
    tokens = controller.pre_process().tokens
    controller.post_process(tokens, 0)
    with pytest.raises(ControllerError, match="the script ran for longer than its 300 ms"):
        controller.pre_process()
    controller.close()


def test_a_script_that_ends_its_process_is_refused_and_others_are_not(guests: Runtime) -> None:
    bad, good = (f"async def main(ctx):\n    await ctx.fixed('{name}')" for name in "ab")
    for _ in range(3):
        controller = start(guests, bad)
        assert isinstance(controller, RemoteController)
        controller._note(GuestDied("it used 9.0 s of CPU time", Cause.KILLED))
        controller.close()
    with pytest.raises(ControllerError) as caught:
        start(guests, bad)
    assert caught.value.code == Code.QUARANTINED
    start(guests, good).close()
