"""Wrong scripts: they are not deterministic, raise an exception, or await an object that is not a
call of the context."""

from __future__ import annotations

import warnings

from tokenbus.workers.controller.python import Context

from .runs import play_script


def test_a_script_that_asks_something_else_in_its_fork_gets_an_error() -> None:
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


def test_a_script_that_reads_more_or_ends_early_in_its_fork_gets_an_error() -> None:
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


def test_a_script_that_raises_is_reported_with_its_line() -> None:
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
        "main: ctx.fixed(…) was not awaited, so it has no effect; expected "
        "await ctx.fixed(…), at test_script_errors.py:"
    ) in run.errors[0]
    assert 'in main: ctx.fixed("hello")' in run.errors[0]
    assert run.sampled == 0


def test_an_ask_that_is_not_awaited_at_the_end_is_an_error() -> None:
    async def main(ctx: Context) -> object:
        await ctx.fixed("a")
        return ctx.stop()

    error = play_script(main).errors[0]
    assert "expected await ctx.stop(…), at" in error
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
