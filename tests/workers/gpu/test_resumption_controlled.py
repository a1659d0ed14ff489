"""A controlled stream that continues at other workers has the same entries as an undisturbed
stream."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenbus.protocol.header import Flag
from tokenbus.workers.gpu.model.loader import LoadedModel
from tokenbus.workers.variables import VariableStorage

from ...counts import examples
from ...worlds.gpu_worker_loop import Loop
from .controlled import Workers, check_nothing_is_left, script
from .moved import (
    TURNS,
    check_notice,
    finished,
    give,
    merged,
    same_entries,
    token_messages,
)
from .moved import transcript as transcript_of

pytestmark = pytest.mark.usefixtures("no_waiting")

ANY = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


BODY = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 20), "prompt": st.just("def f(a):\n    ")},
    optional={
        "temperature": st.just(1.0),
        "text": st.just(True),
        "stop": st.sampled_from([["re"], [" a", "\n"], [10]]),
        "frequency_penalty": st.just(0.8),
        "ignore_eos": st.just(True),
        "n": st.integers(2, 3),
        "save": st.just("kept"),
    },
)


@settings(max_examples=examples(6), suppress_health_check=ANY)
@given(body=BODY, rng=st.randoms(use_true_random=False), overlap=st.booleans(), data=st.data())
def test_a_controlled_stream_moves_after_any_message(
    tmp_path: Path,
    embedded: LoadedModel,
    body: dict[str, Any],
    rng: Random,
    overlap: bool,
    data: st.DataObject,
) -> None:
    body = body | {"controller": "c", "controller_arg": script(rng, 8)}
    storage = VariableStorage()
    whole = Workers(Loop(tmp_path, embedded, overlap=overlap), storage, rng)
    give(whole.loop, b"GENERATE", body, 0)
    wanted = whole.finish()
    before = wanted[: data.draw(st.integers(0, len(wanted) - 1), "cut")]
    second = Workers(Loop(tmp_path, embedded, overlap=overlap), storage, rng)
    give(second.loop, b"GENERATE", body, Flag.MOVED, transcript_of(before))
    got = [*before, *second.finish()]
    same_entries(merged(got), merged(wanted), embedded, body)
    check_notice(second.loop)
    assert second.loop.sent(b"BUFFER") == whole.loop.sent(b"BUFFER")
    check_nothing_is_left(second.loop)


@settings(max_examples=examples(6), suppress_health_check=ANY)
@given(body=BODY, rng=st.randoms(use_true_random=False), overlap=st.booleans())
def test_lost_controllers_are_started_again_at_any_moment(
    tmp_path: Path, embedded: LoadedModel, body: dict[str, Any], rng: Random, overlap: bool
) -> None:
    body = body | {"controller": "c", "controller_arg": script(rng, 8)}
    whole = Workers(Loop(tmp_path, embedded, overlap=overlap), VariableStorage(), rng)
    give(whole.loop, b"GENERATE", body, 0)
    wanted = whole.finish()
    second = Workers(Loop(tmp_path, embedded, overlap=overlap), VariableStorage(), rng)
    give(second.loop, b"GENERATE", body, 0)
    second.turn()
    lost = 0
    for _ in range(TURNS):
        if finished(second.loop):
            break
        if lost < 5 and rng.random() < 0.1:
            second.lose_controllers()
            lost += 1
        second.turn()
    same_entries(merged(token_messages(second.loop)), merged(wanted), embedded, body)
    assert second.loop.sent(b"BUFFER") == whole.loop.sent(b"BUFFER")
    assert not second.loop.sent(b"ERROR")
    check_nothing_is_left(second.loop)


OTHER = [["sample", None], ["set", "y", "1"]]
WAITS = [["splice", 0, [40]], ["wait", "y"]]
TWICE = [
    [["log", "aa"], ["append", [33, 34]], ["fork", [[*WAITS, ["log", "zzzz"]], OTHER]]],
    [
        ["sample", None],
        ["log", "a"],
        ["splice", 1, [35]],
        ["fork", [[*WAITS, ["log", "z"]], OTHER]],
    ],
    [["log", "aa"], ["fork", [[*WAITS, ["log", "b"], ["fork", [[["log", "z"]], []]]], OTHER]]],
    [["fork", [[["splice", 0, [40]], ["fork", [[*WAITS, ["log", "z"]], []]]], OTHER]]],
]
"""Scripts that log and fork, and then suspend a sequence. Some of them fork again without an entry
between the forks."""


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("todo", TWICE)
def test_logs_and_forks_of_suspended_sequences_are_not_mixed_up(
    tmp_path: Path, embedded: LoadedModel, todo: list[Any], n: int
) -> None:
    body = {"prompt": "def f(a):\n    ", "max_tokens": 8, "controller": "c", "n": n}
    body |= {"controller_arg": {"do": todo}}
    storage = VariableStorage()
    whole = Workers(Loop(tmp_path, embedded, overlap=False), storage, Random(0))
    give(whole.loop, b"GENERATE", body, 0)
    wanted = whole.finish()
    for cut in range(len(wanted)):
        second = Workers(Loop(tmp_path, embedded, overlap=False), storage, Random(0))
        give(second.loop, b"GENERATE", body, Flag.MOVED, transcript_of(wanted[:cut]))
        same_entries(merged([*wanted[:cut], *second.finish()]), merged(wanted), embedded, body)
