"""Scripts that fork: each fork has its own history, and all forks share the variables."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenbus.protocol.errors import Code
from tokenbus.protocol.worker_messages import Variable, VariableAnswer
from tokenbus.workers.controller.host import Host, allowed
from tokenbus.workers.controller.interface import Action
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.logs import Log
from tokenbus.workers.controller.python import Context, ScriptProgram
from tokenbus.workers.controller.variable_calls import SequenceVariables
from tokenbus.workers.variables import VariableStorage

from ....counts import examples
from .runs import play_script, says, tokens_of, vocabulary


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
    assert run.sent_back == 0, "no token was sampled and dropped"


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
    # The sequences are not woken ``Limits.idle_wakes`` times before the error.
    assert {error.split(": ", 1)[1] for error in run.errors.values()} == {
        "all remaining sequences of the request wait for variables ('nothing'), so no sequence "
        "can write these variables"
    }


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


def test_only_a_write_of_its_variable_wakes_a_sequence_that_waits_for_it() -> None:
    storage, reads = VariableStorage(), []

    def perform(operation: Variable) -> VariableAnswer:
        if operation.op == "get":
            reads.append(operation.name)
        return storage.apply(operation)

    async def main(ctx: Context) -> None:
        if await ctx.fork(2):
            await ctx.gen(max_tokens=20)
            ctx.vars["other"] = "x"
            await ctx.gen(max_tokens=5)
            ctx.vars["go"] = "y"
        else:
            await ctx.fixed(await ctx.wait_var("go"))

    run = play_script(main, perform=perform)
    assert run.text(0) == "y"
    assert reads == ["go", "go"]
