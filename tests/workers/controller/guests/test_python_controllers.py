"""Python controllers of the operator run in guest processes, which end if a controller hangs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenbus.protocol.errors import ControllerError, RequestError
from tokenbus.workers.controller.guests import process as process_module
from tokenbus.workers.controller.guests.channel import Channel
from tokenbus.workers.controller.guests.messages import Begin, Done, Fork, ToGuest
from tokenbus.workers.controller.guests.process import GuestProcess
from tokenbus.workers.controller.host import Host
from tokenbus.workers.controller.interface import Action
from tokenbus.workers.controller.logs import Log
from tokenbus.workers.controller.python import load_program
from tokenbus.workers.controller.variable_calls import SequenceVariables
from tokenbus.workers.variables import VariableStorage

from ..played import EOS, WORDS, Run
from .remote_guests import LIMITS, VOCABULARY, Runtime, Sequence, running

pytestmark = pytest.mark.process

HANGING = """
import ctypes, sys, threading, time
import tokenbus.workers.controller.python as tb

class Calm(tb.Controller):
    def __init__(self):
        self.rounds = 0
    def mid_process(self, fork_group):
        self.rounds += 1
        return tb.sample(tb.TokenSet(self.host.vocabulary.size, [self.rounds]))

class Loops(Calm):
    def post_process(self, tokens, backtrack):
        while True:
            try:
                time.sleep(0.0001 * self.rounds)
            except BaseException:
                pass

class Blocks(Calm):
    def post_process(self, tokens, backtrack):
        ctypes.PyDLL(None).pause()

class Prints(Calm):
    def mid_process(self, fork_group):
        print("round", self.rounds)
        print("or an error", file=sys.stderr)
        with open(__file__) as file:
            self.log(file.readline().strip() or "an empty line")
        return super().mid_process(fork_group)

class Fails(Calm):
    def post_process(self, tokens, backtrack):
        return 1 / (self.rounds - 1)

async def forks(ctx):
    await ctx.fork(2)
    await ctx.wait_var("a")

class Argued(Calm):
    def mid_process(self, fork_group):
        self.log(self.arg)
        return super().mid_process(fork_group)
"""
NAMES = ("Calm", "Loops", "Blocks", "Prints", "Fails", "forks", "Argued")
ROOT = Path(__file__).parents[4]
SAME = ("Alternating", "survey", "meeting", "Pair")
"""Controllers of the chaos test: classes and scripts that fork, suspend, and use variables."""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    folder = tmp_path_factory.mktemp("controllers")
    (folder / "hanging.py").write_text(HANGING)
    names = [f"hanging:{name}" for name in NAMES]
    names += [f"tests.chaos.python_controllers:{name}" for name in SAME]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.chdir(folder)
        with running(controllers=tuple(names)) as made:
            yield made


def least(_seq: int, tokens: list[int], may: set[int]) -> int:
    ordered = sorted(may - {EOS})
    return ordered[len(tokens) % len(ordered)] if ordered else EOS


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("killed", [False, True], ids=["", "killed"])
def test_a_request_has_the_tokens_that_it_has_on_a_thread(
    runtime: Runtime, name: str, killed: bool
) -> None:
    calls = 0

    def choose(seq: int, tokens: list[int], may: set[int]) -> int:
        nonlocal calls
        calls += 1
        if killed and calls % 5 == 0:
            runtime.kill()
        return least(seq, tokens, may)

    registered, program = load_program(f"tests.chaos.python_controllers:{name}")
    served = runtime.served(registered, f"{name} {killed}")
    made = Run(served, WORDS, choose, "20", max_tokens=60)
    usual = Run(program, WORDS, least, "20", max_tokens=60)
    assert (made.tokens, made.logs, made.ended) == (usual.tokens, usual.logs, usual.ended)
    assert made.dropped == usual.dropped


@pytest.mark.parametrize(
    ("name", "bound", "why"),
    [
        ("Loops", "GRACE_S", "it used "),
        ("Loops", "MAX_WALL_S", "it did not answer within 0.1 s"),
        ("Blocks", "MAX_WALL_S", "it did not answer within 0.1 s"),
    ],
)
def test_a_class_that_hangs_is_killed_and_other_streams_go_on(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, name: str, bound: str, why: str
) -> None:
    tenant = f"{name} {bound}"
    calm = Sequence(runtime.served("hanging:Calm", tenant))
    other = Sequence(runtime.served("hanging:Calm", "another"))
    hung = Sequence(runtime.served(f"hanging:{name}", tenant))
    before = other.controller._process  # type: ignore[attr-defined]
    # Only ``bound`` ends the call, however late the watchdog checks it.
    monkeypatch.setattr(process_module, "GRACE_S", 3600.0)
    monkeypatch.setattr(process_module, bound, 0.1)
    with pytest.raises(ControllerError) as caught:
        hung.round()
    monkeypatch.undo()
    assert caught.value.code == "controller_timeout"
    assert caught.value.message.startswith(
        f"the process of the controller hanging:{name} was ended during its call: {why}"
    )
    calm.round()
    other.round()
    assert calm.allowed() == other.allowed() == [2]
    assert other.controller._process is before  # type: ignore[attr-defined]


def test_trusted_code_keeps_its_output_and_its_files(runtime: Runtime) -> None:
    made = Run(runtime.served("hanging:Prints"), WORDS, least, max_tokens=2)
    lines = "".join(made.logs[0]).splitlines()
    assert lines[:3] == ["round 0", "or an error", "an empty line"]


def test_a_script_suspends_after_a_fork_in_one_request(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    request = GuestProcess.request

    def counted(process: GuestProcess, channel: Channel, what: ToGuest, limit_s: float) -> Done:
        sent.append(type(what).__name__)
        return request(process, channel, what, limit_s)

    variables = SequenceVariables(1, 0, VariableStorage().apply, lambda: None)
    host = Host(1, 0, b"", VOCABULARY, variables, Log(1024), LIMITS, 99)
    controller = runtime.served("hanging:forks").start(host)
    controller.init_prompt([1, 2])
    assert controller.pre_process().action is Action.FORK
    monkeypatch.setattr(GuestProcess, "request", counted)
    assert controller.mid_process((0, 1), memoryview(bytearray(512))).action is Action.AGAIN
    assert controller.pre_process().action is Action.SUSPEND
    assert sent == ["Mid"]
    controller.close()


def test_a_fork_has_the_argument_which_is_sent_once(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    args: list[bytes] = []
    request = GuestProcess.request

    def noted(process: GuestProcess, channel: Channel, what: ToGuest, limit_s: float) -> Done:
        if isinstance(what, Begin | Fork):
            args.append(what.host.arg)
        return request(process, channel, what, limit_s)

    monkeypatch.setattr(GuestProcess, "request", noted)
    variables = SequenceVariables(1, 0, VariableStorage().apply, lambda: None)
    parent, child = (
        Host(1, seq, b"the argument", VOCABULARY, variables, Log(1024), LIMITS, 99)
        for seq in (0, 1)
    )
    first = runtime.served("hanging:Argued").start(parent)
    first.init_prompt([1, 2])
    second = first.fork(child)
    mask = memoryview(bytearray(4 * -(-VOCABULARY.size // 32)))
    assert second.mid_process((0, 1), mask).action is Action.CONTINUE
    assert child.log.take() == "the argument\n"
    runtime.kill()
    assert second.post_process([5], 0).action is Action.CONTINUE
    assert child.log.take().endswith("the argument\n")
    assert args == [b"the argument", b""] * 2
    for controller in (first, second):
        controller.close()


def test_an_error_names_the_line(runtime: Runtime) -> None:
    failing = Sequence(runtime.served("hanging:Fails"))
    with pytest.raises(ControllerError) as caught:
        failing.round()
    assert caught.value.message == (
        "hanging:Fails raised ZeroDivisionError: division by zero, at hanging.py:34 in "
        "post_process: return 1 / (self.rounds - 1)"
    )


def test_a_name_that_is_not_served_is_unknown(runtime: Runtime) -> None:
    assert runtime.runtime.served("tenant", "hanging:Missing") is None


def test_a_controller_that_cannot_be_loaded_is_refused_at_the_start() -> None:
    with pytest.raises(RequestError, match="absent:Name: no module absent found from"):
        Runtime(1, ("absent:Name",))


def test_variables_of_the_environment_reach_trusted_code_only(runtime: Runtime) -> None:
    calm = Sequence(runtime.served("hanging:Calm"))
    calm.round()
    pid = calm.controller._process.pid  # type: ignore[attr-defined]
    assert b"PYTHONPATH=" + os.fsencode(ROOT) in Path(f"/proc/{pid}/environ").read_bytes()
