"""Programs that call tools: real tools, real records of the calls, and replays after any event."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, Self

import msgspec
import pytest
from tokenbus.protocol.errors import ControllerError
from tokenbus.protocol.header import decode_header
from tokenbus.protocol.worker_messages import Call, CallAnswer, StepResult, Variable, VariableAnswer
from tokenbus.workers.bus import FromBus
from tokenbus.workers.controller.interface import Program
from tokenbus.workers.controller.python import Context, ScriptProgram
from tokenbus.workers.controller.sequence_group import SequenceGroup
from tokenbus.workers.controller.tool_calls import GIVE_UP_S, GroupTools, ToolCalls
from tokenbus.workers.tool.calls import Calls
from tokenbus.workers.tool.functions import Function
from tokenbus.workers.tool.worker import running_loop

from .played import program as native
from .python.runs import vocabulary
from .replayed import Stream
from .scripts.script_runs import program

LONG_S = 300.0


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = running_loop()
    yield loop
    loop.call_soon_threadsafe(loop.stop)


class Tools:
    """The tool worker of a request, which remains when the controller worker changes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, hold: int = 0) -> None:
        """``hold``: the number of the call, from 1, that returns only after ``release``."""
        self._loop = loop
        self._hold = hold
        self.release = threading.Event()
        self.made: list[str] = []
        """The calls that were made, by function and arguments."""
        self.to: ToolCalls
        """The calls of the current controller worker, which receive the answers."""
        served = {f.info.name: f for f in (Function(f, LONG_S) for f in (self.add, self.fail))}
        self._calls = Calls(served, self._answer, threads=4, capacity=100)

    def add(self, a: int, b: int = 1) -> int:
        self.made.append(f"{a}+{b}")
        if len(self.made) == self._hold:
            assert self.release.wait(LONG_S)
        return a + b

    def fail(self) -> None:
        self.made.append("fail")
        raise ValueError("no luck")

    def post(self, frames: list[bytes], link: int) -> None:
        message = FromBus(b"CALL", decode_header(frames[1]), frames[2], [], link)
        self._loop.call_soon_threadsafe(self._calls.begin, message)

    def _answer(self, frames: list[bytes], link: int) -> None:
        self.to.on_answer(frames[2], link)


class ToolStream(Stream):
    """A request whose program calls the functions of ``Tools``."""

    def __init__(self, tools: Tools, make: Callable[[], Program], **how: Any) -> None:
        self.tools = tools
        self._lock = threading.Lock()
        super().__init__(make, vocabulary(), **how)

    def _new_group(self) -> SequenceGroup:
        # The calls of the earlier group are dropped, as those of a lost worker.
        calls = self.tools.to = ToolCalls(self.tools.post)
        self.answered: SimpleQueue[None] = SimpleQueue()
        answered = self.answered
        group = SequenceGroup(
            1, 1, self.limits, self.arg.encode(), self.max_tokens, False, self._perform
        )
        group.tools = GroupTools(
            calls, 0, self._perform, lambda store: store(), lambda: answered.put(None)
        )
        return group

    def _perform(self, operation: Variable) -> VariableAnswer:
        with self._lock:
            answer = self.storage.apply(operation)
        assert answer.error is None
        return answer

    def _play(self, results: list[StepResult]) -> None:
        super()._play(results)
        while self.group.num_sequences:
            self.answered.get(timeout=60.0)
            rounds, failed = self.group.wake_for_answer()
            for each in (failed, *(round_() for round_ in rounds)):
                super()._play(each)

    def run(self, cut: int | None = None, ahead: int = 0) -> Self:
        super().run(cut, ahead)
        return self

    def resume(self, cut: int | None = None, ahead: int = 0) -> Self:
        super().resume(cut, ahead)
        return self

    def shown(self) -> list[tuple[list[int], str, str]]:
        return [(life.tokens, life.logs, life.end) for _, life in sorted(self.lives.items())]


async def calls_tools(ctx: Context) -> None:
    await ctx.fixed(str(await ctx.call("add", a=40)))
    await ctx.gen(choice=["x", "yy"])
    index = await ctx.fork(2)
    try:
        await ctx.call("fail")
    except ControllerError as error:
        ctx.log(index, error.message)
    await ctx.gen(choice=["z", "ww"])
    ctx.log(await ctx.call("add", a=index, b=10))


JAVASCRIPT = """
async function main(ctx) {
  await ctx.fixed(`${await ctx.call("add", { a: 40 })}`);
  await ctx.gen({ choice: ["x", "yy"] });
  const index = await ctx.fork(2);
  try {
    await ctx.call("fail");
  } catch (error) {
    ctx.log(index, error.message);
  }
  await ctx.gen({ choice: ["z", "ww"] });
  ctx.log(await ctx.call("add", { a: index, b: 10 }));
}
"""
PYTHON = """
async def main(ctx):
    await ctx.fixed(str(await ctx.call("add", a=40)))
    await ctx.gen(choice=["x", "yy"])
    index = await ctx.fork(2)
    try:
        await ctx.call("fail")
    except ControllerError as error:
        print(index, error)
    await ctx.gen(choice=["z", "ww"])
    print(await ctx.call("add", a=index, b=10))
"""
C_SOURCE = r"""
#include "tokenbus.h"

// Calls add, appends its answer, forks, and calls fail in each sequence.
static tb_tool_call call;
static tb_bytes answer;
static int stage, index;

static bool answered(const char *tool, const char *given) {
    if (!call.len) call = tb_call(tool, given, strlen(given));
    if (!tb_call_answer(&call, &answer)) return false;
    call.len = 0;
    return true;
}

tb_answer tb_pre_process(void) {
    if (stage == 0) {
        if (!answered("add", "{\"a\":40}")) return tb_suspend();
        stage = 1;
        tb_tokens tokens = tb_tokenize(answer.data, answer.len);
        return tb_append(tokens.ids, tokens.n);
    }
    if (stage == 1) return tb_fork(2);
    if (stage == 3) {
        if (!answered("fail", "{}")) return tb_suspend();
        if (!tb_call_failed(&answer)) tb_fail("it has no error");
        tb_log("%u %s\n", index, answer.data);
        stage = 4;
    }
    if (!answered("add", index ? "{\"a\":1,\"b\":10}" : "{\"a\":0,\"b\":10}")) return tb_suspend();
    if (tb_call_failed(&answer)) tb_fail("it has an error");
    tb_log("%s\n", answer.data);
    return tb_stop();
}

tb_answer tb_mid_process(const uint32_t *group, uint32_t n) {
    index = n == 2 && group[1] == tb_seq_id();
    stage = 2;
    return tb_sample(0);
}

tb_answer tb_post_process(const uint32_t *tokens, uint32_t n, uint32_t backtrack) {
    (void)tokens, (void)n, (void)backtrack;
    if (stage == 2) stage = 3;
    return tb_go_on();
}
"""
MADE = ["0+10", "1+10", "40+1", "fail", "fail"]
PROGRAMS: dict[str, Callable[[], Program]] = {
    "trusted": lambda: ScriptProgram(calls_tools),
    "javascript": lambda: program(JAVASCRIPT),
    "python": lambda: program(PYTHON, "python"),
    "c": lambda: native(C_SOURCE),
}

# The first use of an interpreter compiles it in a process.
EACH = pytest.mark.parametrize(
    "kind",
    ["trusted", *(pytest.param(kind, marks=pytest.mark.process) for kind in list(PROGRAMS)[1:])],
)


@EACH
def test_programs_in_each_language_call_tools(loop: asyncio.AbstractEventLoop, kind: str) -> None:
    tools = Tools(loop)
    stream = ToolStream(tools, PROGRAMS[kind]).run()
    (zero, zero_log, end), (one, one_log, _) = stream.shown()
    assert end == "controller"
    assert sorted(tools.made) == MADE
    if kind == "c":
        error = '{"error":"the tool \'fail\' failed: ValueError: no luck","code":"tool_failed"}'
        assert (zero_log, one_log) == (
            f'0 {error}\n{{"value":10}}\n',
            f'1 {error}\n{{"value":11}}\n',
        )
        return
    assert (zero_log, one_log) == (
        "0 the tool 'fail' failed: ValueError: no luck\n10\n",
        "1 the tool 'fail' failed: ValueError: no luck\n11\n",
    )
    for tokens in (zero, one):
        assert b"".join(map(vocabulary().token, tokens)).startswith(b"41")


@EACH
def test_a_replay_after_any_event_makes_no_call_twice(
    loop: asyncio.AbstractEventLoop, kind: str
) -> None:
    whole = ToolStream(Tools(loop), PROGRAMS[kind]).run()
    for cut in range(whole.events):
        tools = Tools(loop)
        stream = ToolStream(tools, PROGRAMS[kind]).run(cut).resume()
        assert stream.shown() == whole.shown(), f"cut after {cut} events"
        assert sorted(tools.made) == MADE, f"cut after {cut} events"


def test_a_call_that_runs_when_the_worker_dies_is_not_repeated(
    loop: asyncio.AbstractEventLoop,
) -> None:
    """The first worker is lost while the program waits. The next worker gets the answer."""
    tools = Tools(loop, hold=1)
    stream = ToolStream(tools, PROGRAMS["trusted"]).run(cut=0)
    tools.release.set()
    assert stream.resume().shown()[0][1].endswith("\n10\n")
    assert sorted(tools.made) == MADE


class LosesCalls(Tools):
    """Tools that receive no call while ``alive`` is False. So each call seems to belong to a
    controller worker that died after it had marked the call and before it sent the call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.alive = False

    def post(self, frames: list[bytes], link: int) -> None:
        if self.alive:
            super().post(frames, link)


def test_a_call_that_may_have_been_made_ends_with_an_error(
    loop: asyncio.AbstractEventLoop,
) -> None:
    async def once(ctx: Context) -> None:
        try:
            await ctx.call("add", a=1)
        except Exception as error:
            ctx.log(error)

    tools = LosesCalls(loop)
    stream = ToolStream(tools, lambda: ScriptProgram(once)).run(cut=0)
    tools.alive = True
    [(_, logs, end)] = stream.resume().shown()
    assert "was interrupted, and its answer is lost" in logs
    assert (end, tools.made) == ("controller", [])


def test_a_call_whose_mark_was_acknowledged_late_is_made(loop: asyncio.AbstractEventLoop) -> None:
    """Each operation is done twice, so the program gets the second answer to the mark, which is a
    repeated answer. The mark names the same attempt, so the call is made."""
    tools = Tools(loop)

    class Repeats(ToolStream):
        def _perform(self, operation: Variable) -> VariableAnswer:
            super()._perform(operation)
            return super()._perform(operation)

    Repeats(tools, PROGRAMS["trusted"]).run()
    assert sorted(tools.made) == MADE


def test_the_record_of_a_call_is_read_only_when_the_tool_has_answered(
    loop: asyncio.AbstractEventLoop,
) -> None:
    async def once(ctx: Context) -> None:
        await ctx.call("add", a=1)

    operations: list[str] = []

    class Records(ToolStream):
        def _perform(self, operation: Variable) -> VariableAnswer:
            operations.append(operation.op)
            return super()._perform(operation)

    Records(Tools(loop), lambda: ScriptProgram(once)).run()
    assert operations == ["set", "set", "get"]


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("", {}, "expected the name of a tool"),
        ("x" * 129, {}, "the name of a tool has 129 characters"),
        ("add", {"a": object()}, "its arguments are not values of JSON"),
        ("add", {"a": "x" * 65536}, "have 65544 bytes; at most 65536 are allowed"),
        ("add", {"a": "x"}, "Expected `int`, got `str`"),
    ],
)
def test_a_call_that_is_not_valid_fails(
    loop: asyncio.AbstractEventLoop, name: str, arguments: dict[str, Any], error: str
) -> None:
    async def wrong(ctx: Context) -> None:
        await ctx.call(name, **arguments)

    [(_, _, end)] = ToolStream(Tools(loop), lambda: ScriptProgram(wrong)).run().shown()
    assert error in end


def test_a_call_that_is_never_answered_fails_in_the_end() -> None:
    sent: list[Call] = []
    answers: list[CallAnswer] = []
    decode = msgspec.msgpack.Decoder(Call).decode
    calls = ToolCalls(lambda frames, link: sent.append(decode(frames[2])))
    calls.send(0, Call(1, 0, 1, "add"), answers.append)
    calls.expire(0.0)
    assert answers == []
    calls.expire(float("inf"))
    [answer] = answers
    assert answer.error == f"the call of a tool was not answered within {GIVE_UP_S:g} s"
    assert len(sent) == 1
