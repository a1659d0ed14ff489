"""In a run, a sequence without a constraint samples several tokens before the next STEP
(``StepResult.run``)."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenbus.protocol.bodies import decode_as
from tokenbus.protocol.header import Flag
from tokenbus.protocol.worker_messages import Start, Step
from tokenbus.workers.controller.scripts.generation import MAX_RUN
from tokenbus.workers.gpu.model.loader import LoadedModel
from tokenbus.workers.gpu.serving.steered import Run
from tokenbus.workers.variables import VariableStorage

from ...counts import examples
from ...worlds.gpu_worker_loop import Loop
from ..controller.scripts.script_runs import program
from .controlled import Workers, check_nothing_is_left
from .moved import (
    TURNS,
    finished,
    give,
    merged,
    same_entries,
    token_messages,
    transcript,
)

# The interpreter is compiled in a process.
pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_waiting")]
ANY = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
SCRIPT = """
async def main(ctx):
    tokens, stop = ctx.arg["tokens"], ctx.arg["stop"]
    first = await ctx.gen(max_tokens=tokens, stop_at=stop)
    me = await ctx.fork(2)
    await ctx.fixed(" <%d> " % me)
    ctx.vars["text %d" % me] = await ctx.gen(max_tokens=3 * tokens)
    other = await ctx.wait_var("text %d" % (1 - me))
    print(first, "|", other)
    await ctx.gen(stop_at=stop)
"""
BODY: dict[str, Any] = {"prompt": "def f(a):\n    ", "controller": "c", "max_tokens": 40}


class World(Workers):
    """A GPU worker, and a controller worker that runs ``SCRIPT``."""

    def __init__(
        self, folder: Path, loaded: LoadedModel, rng: Random, overlap: bool, **how: Any
    ) -> None:
        """``how``: ``storage``, and further arguments of ``Controllers``."""
        storage = how.pop("storage", None) or VariableStorage()
        how["program"] = program(SCRIPT, "python")
        super().__init__(Loop(folder, loaded, overlap=overlap), storage, rng, **how)

    def steps(self) -> list[int]:
        """The number of tokens that each STEP has reported for a sequence that continues."""
        found = [decode_as(Step, frames[2]) for frames in self.loop.sent(b"STEP")]
        return [len(s.tokens) for step in found for s in step.sequences if s.ended is None]


ARGUMENTS = st.fixed_dictionaries(
    {"tokens": st.integers(1, 12), "stop": st.sampled_from(["e", "\n", "return", "qqqq"])}
)
SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.just(1.0),
        "text": st.just(True),
        "stop": st.just(["tu"]),
        "ignore_eos": st.just(True),
        "max_tokens": st.integers(1, 30),
    },
)


@settings(max_examples=examples(5), suppress_health_check=ANY)
@given(
    argument=ARGUMENTS,
    sampling=SAMPLING,
    rng=st.integers(0, 2**32).map(Random),
    overlap=st.booleans(),
    shared=st.booleans(),
)
def test_runs_change_no_entry(
    tmp_path: Path,
    embedded: LoadedModel,
    argument: dict[str, Any],
    sampling: dict[str, Any],
    rng: Random,
    overlap: bool,
    shared: bool,
) -> None:
    body = BODY | sampling | {"controller_arg": argument}
    plain = World(tmp_path, embedded, rng, overlap, runs=False, shared=shared)
    give(plain.loop, b"GENERATE", body, 0)
    wanted = plain.finish()
    runs = World(tmp_path, embedded, rng, overlap, shared=shared)
    give(runs.loop, b"GENERATE", body, 0)
    same_entries(merged(runs.finish()), merged(wanted), embedded, body)
    assert sum(plain.steps()) == len(plain.steps())
    assert len(runs.steps()) <= len(plain.steps())
    check_nothing_is_left(runs.loop)


@settings(max_examples=examples(4), suppress_health_check=ANY)
@given(
    argument=ARGUMENTS,
    sampling=SAMPLING,
    rng=st.integers(0, 2**32).map(Random),
    overlap=st.booleans(),
    data=st.data(),
)
def test_a_stream_moves_in_the_middle_of_a_run(
    tmp_path: Path,
    embedded: LoadedModel,
    argument: dict[str, Any],
    sampling: dict[str, Any],
    rng: Random,
    overlap: bool,
    data: st.DataObject,
) -> None:
    body = BODY | sampling | {"controller_arg": argument}
    storage = VariableStorage()
    whole = World(tmp_path, embedded, rng, overlap, storage=storage)
    give(whole.loop, b"GENERATE", body, 0)
    wanted = whole.finish()
    before = wanted[: data.draw(st.integers(0, len(wanted) - 1), "cut")]
    second = World(tmp_path, embedded, rng, overlap, storage=storage)
    give(second.loop, b"GENERATE", body, Flag.MOVED, transcript(before))
    same_entries(merged([*before, *second.finish()]), merged(wanted), embedded, body)
    check_nothing_is_left(second.loop)


@settings(max_examples=examples(4), suppress_health_check=ANY)
@given(argument=ARGUMENTS, sampling=SAMPLING, rng=st.integers(0, 2**32).map(Random))
def test_controllers_are_lost_in_the_middle_of_a_run(
    tmp_path: Path,
    embedded: LoadedModel,
    argument: dict[str, Any],
    sampling: dict[str, Any],
    rng: Random,
) -> None:
    body = BODY | sampling | {"controller_arg": argument}
    whole = World(tmp_path, embedded, rng, True)
    give(whole.loop, b"GENERATE", body, 0)
    wanted = whole.finish()
    second = World(tmp_path, embedded, rng, True)
    give(second.loop, b"GENERATE", body, 0)
    second.turn()
    for _ in range(TURNS):
        if finished(second.loop):
            break
        if rng.random() < 0.1:
            second.lose_controllers()
        second.turn()
    same_entries(merged(token_messages(second.loop)), merged(wanted), embedded, body)
    check_nothing_is_left(second.loop)


def test_a_text_without_a_stop_has_few_rounds(tmp_path: Path, embedded: LoadedModel) -> None:
    argument = {"tokens": MAX_RUN, "stop": "qqqq"}
    body = BODY | {"controller_arg": argument, "max_tokens": 300, "ignore_eos": True}
    world = World(tmp_path, embedded, Random(1), True)
    give(world.loop, b"GENERATE", body, 0)
    world.finish()
    assert max(world.steps()) == MAX_RUN
    assert len(world.steps()) < 20


def test_the_gpu_worker_takes_runs(tmp_path: Path, embedded: LoadedModel) -> None:
    world = World(tmp_path, embedded, Random(1), False)
    give(world.loop, b"GENERATE", BODY | {"controller_arg": {"tokens": 2, "stop": "e"}}, 0)
    world.turn()
    [start] = [decode_as(Start, frames[2]) for frames in world.loop.sent(b"START")]
    assert start.takes_runs


@pytest.mark.parametrize(
    ("run", "tokens", "ends"),
    [
        (Run(3, None), [1, 2, 3], 2),
        (Run(1, None), [1], 0),
        (Run(9, np.array([0, 1 << 3], np.uint32)), [3, 34, 35, 36], 2),
        (Run(2, None, asks=True), [1, 2], 1),
    ],
)
def test_a_run_ends_with_its_last_token_or_an_ending(
    run: Run, tokens: list[int], ends: int
) -> None:
    taken = [run.take(token, -token / 8) for token in tokens[: ends + 1]]
    assert taken == [False] * ends + [True]
    assert run.tokens == tokens[: ends + 1]
    assert run.logprobs == ([-token / 8 for token in run.tokens] if run.asks else [])
