"""The bound on work that ``max_tokens`` does not bound: scored texts and dropped tokens."""

from __future__ import annotations

import pytest
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.python import Context
from tokenbus.workers.controller.python.script import Script

from .runs import play_script, tokens_of


async def scores(ctx: Context) -> None:
    for _ in range(100):
        await ctx.score([[1, 2, 3], [4]])


async def goes_back(ctx: Context) -> None:
    start = ctx.label()
    for _ in range(100):
        await ctx.fixed("a text", following=start)


@pytest.mark.parametrize(("script", "tokens"), [(scores, 4), (goes_back, len(tokens_of("a text")))])
def test_a_script_does_not_work_without_end(script: Script, tokens: int) -> None:
    run = play_script(script, limits=Limits(used_bytes=10 * 4 * tokens))
    assert run.errors == {
        0: "the request's writes to variables, new prompts, scored texts, dropped tokens and looks "
        f"have {11 * 4 * tokens} bytes in all; at most {10 * 4 * tokens} are allowed"
    }
    assert run.codes == {0: "controller_failed"}
