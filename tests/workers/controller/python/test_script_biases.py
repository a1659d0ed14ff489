"""Biases of scripts: ``ctx.gen(bias=...)``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenbus.protocol.worker_messages import StepResult
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.python import Context, ScriptProgram
from tokenbus.workers.controller.sequence_group import SequenceGroup
from tokenbus.workers.gpu.sampling.biases import read_bias
from tokenbus.workers.variables import VariableStorage

from .runs import play_script, tokens_of, vocabulary


def bias_sent(group: SequenceGroup, result: StepResult) -> dict[int, float]:
    """The values of a result's bias that are not zero, by token."""
    if not result.biased:
        return {}
    found = read_bias(np.frombuffer(group.bias(0) or b"", dtype=np.uint32), vocabulary().size)
    return {token: v for token in range(vocabulary().size) if (v := found.of(token))}


def test_a_bias_holds_for_all_tokens_of_its_gen_and_no_other() -> None:
    [x] = tokens_of("x")

    async def main(ctx: Context) -> None:
        await ctx.gen(max_tokens=2, bias={x: 2.5})
        await ctx.gen(regex="[a-z]{4}", max_tokens=1, bias={x: -1.0})
        await ctx.gen(max_tokens=1)

    group = SequenceGroup(1, 1, Limits(), b"", 99, True, VariableStorage().apply)
    [result] = group.begin(ScriptProgram(main), vocabulary(), [5])
    seen = []
    for _ in range(4):
        seen.append((bias_sent(group, result), result.attachment is not None))
        group.record([result])
        stepped = group.step(0, [x], False, None)
        assert stepped is not None
        [result] = stepped[1]()
    free = [({x: 2.5}, False), ({x: 2.5}, False)]
    assert seen == [*free, ({x: -1.0}, True), ({}, False)]


def test_a_fork_keeps_the_bias_of_the_script() -> None:
    async def main(ctx: Context) -> None:
        await ctx.gen(max_tokens=1, bias={7: 1.0})
        await ctx.fork(2)
        await ctx.gen(max_tokens=2, bias={8: 1.0})

    run = play_script(main)
    assert not run.errors


@pytest.mark.parametrize("bias", [{-1: 1.0}, {5: float("nan")}, "high"])
def test_a_wrong_bias_raises_at_its_call(bias: Any) -> None:
    async def main(ctx: Context) -> None:
        await ctx.gen(bias=bias)

    [error] = play_script(main).errors.values()
    assert "await ctx.gen(bias=bias)" in error
