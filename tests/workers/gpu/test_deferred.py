"""Sequences are deferred while their decision is missing. They delay no other sequence."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import pytest
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig, TokenOutput
from tokenbus.workers.gpu.engine.scheduler import MAX_ADMITTED
from tokenbus.workers.gpu.model.loader import LoadedModel

from ...worlds.engine_client import alone

PROMPT = list(range(5, 45))
SEEDED = Sampling(max_tokens=12, ignore_eos=True, temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def block_bytes(embedded: LoadedModel) -> int:
    """Bytes of a block of the KV cache."""
    roomy = Engine(embedded, EngineConfig(kv_cache_bytes=32 * 2**20))
    return 32 * 2**20 // int(roomy.stats()["kv_blocks"] + 1)


class Small(Protocol):
    def __call__(self, *, blocks: int, running: int = 8) -> Engine:
        """An engine with this number of blocks, and at most ``running`` running sequences."""


@pytest.fixture
def small(embedded: LoadedModel, block_bytes: int, overlap: bool) -> Small:
    def made(*, blocks: int, running: int = 8) -> Engine:
        room = (blocks + 1) * block_bytes
        config = EngineConfig(kv_cache_bytes=room, max_num_seqs=running, overlap=overlap)
        return Engine(embedded, config)

    return made


def step(engine: Engine, *defer: int) -> list[TokenOutput]:
    """Runs a step in which no decision arrives for these requests."""
    pending = engine.begin()
    for request, seq in pending.ready:
        if request in defer:
            engine.defer(request, seq)
    return engine.finish(pending).as_outputs()


def pass_launched(engine: Engine) -> None:
    """Runs the step that is already scheduled. If steps overlap, this step does not yet include
    later changes."""
    if engine.overlaps:
        step(engine)


def tokens(outputs: list[TokenOutput], request: int) -> list[int]:
    return [o.token for o in outputs if o.request == request and o.token is not None]


def test_a_deferred_sequence_leaves_its_slot_to_the_next(
    small: Small, embedded: LoadedModel
) -> None:
    engine = small(blocks=100, running=1)
    engine.add(1, PROMPT, SEEDED)
    engine.add(2, PROMPT[:9], SEEDED)
    outputs = step(engine, 1)
    for _ in range(5):
        outputs += step(engine)
    assert len(tokens(outputs, 2)) == 5
    assert tokens(outputs, 1) == []
    engine.reschedule(1, 0)
    while engine.has_work:
        outputs += step(engine)
    assert tokens(outputs, 1) == alone(embedded, PROMPT, SEEDED)
    assert tokens(outputs, 2) == alone(embedded, PROMPT[:9], SEEDED)


def test_a_decision_that_takes_the_place_of_another_in_a_step(
    small: Small, embedded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """During a step, one sequence is deferred, and the decision of an earlier deferred sequence
    arrives. The number of sampled rows stays the same, but the rows differ."""
    engine = small(blocks=100)
    engine.add(1, PROMPT, SEEDED)
    engine.add(2, PROMPT[:9], SEEDED)
    outputs = step(engine)
    outputs += step(engine, 2)
    outputs += step(engine)
    pending = engine.begin()
    assert pending.decodes is not None, "this forward has the same sequences as the last"
    engine.defer(1, 0)
    engine.reschedule(2, 0)
    swapped = engine.finish(pending).as_outputs()
    assert Counter(o.request for o in swapped) == {2: 1}
    outputs += swapped
    engine.reschedule(1, 0)
    outputs += step(engine, 2)
    outputs += step(engine)
    pending = engine.begin()
    assert pending.decodes is not None, "this forward has the same sequence as the last"
    engine.defer(1, 0)
    engine.reschedule(1, 0)
    outputs += engine.finish(pending).as_outputs()
    engine.reschedule(2, 0)
    while engine.has_work:
        outputs += step(engine)
    assert not caplog.messages, "a step failed and ran again"
    assert tokens(outputs, 1) == alone(embedded, PROMPT, SEEDED)
    assert tokens(outputs, 2) == alone(embedded, PROMPT[:9], SEEDED)


def test_a_fork_that_takes_the_place_of_a_deferred_sequence_in_a_step(
    small: Small, embedded: LoadedModel
) -> None:
    """The number of sampled rows stays the same, but the rows differ."""
    engine = small(blocks=100)
    prompts = [PROMPT, PROMPT[:9], PROMPT[:21]]
    for request, prompt in enumerate(prompts):
        engine.add(request, prompt, SEEDED)
    outputs = [*step(engine), *step(engine)]
    pending = engine.begin()
    assert pending.decodes is not None, "this forward has the same sequences as the last"
    first, *_, last = (sequence.request for sequence in pending.decodes[0])
    engine.defer(first, 0)
    engine.fork(last, 0, 1)
    outputs += engine.finish(pending).as_outputs()
    engine.reschedule(first, 0)
    while engine.has_work:
        outputs += step(engine)
    for request, prompt in enumerate(prompts):
        own = [output for output in outputs if output.seq == 0]
        assert tokens(own, request) == alone(embedded, prompt, SEEDED)


def test_without_a_slot_the_rescheduled_and_the_earlier_go_first(small: Small) -> None:
    engine = small(blocks=100, running=2)
    for request in (1, 2, 3, 4):
        engine.add(request, PROMPT[: 5 + request], SEEDED)
    assert step(engine, 1, 2) == []
    assert Counter(o.request for o in step(engine)) == {3: 1, 4: 1}
    engine.reschedule(1, 0)
    pass_launched(engine)
    assert Counter(o.request for o in step(engine)) == {1: 1, 3: 1}
    engine.reschedule(2, 0)
    pass_launched(engine)
    assert Counter(o.request for o in step(engine)) == {1: 1, 2: 1}
    outputs = step(engine, 1)
    outputs += step(engine)
    assert Counter(o.request for o in outputs) == {2: 2, 3: 1}
    engine.reschedule(1, 0)
    while engine.has_work:
        outputs += step(engine)
    assert not engine.has_requests
    assert engine.stats()["kv_blocks_used"] == 0


def test_there_is_no_work_while_only_a_decision_can_change_anything(
    small: Small, embedded: LoadedModel
) -> None:
    engine = small(blocks=5)
    engine.add(1, PROMPT, SEEDED)
    outputs = step(engine, 1)
    assert not engine.has_work
    engine.add(2, PROMPT[::-1], SEEDED)
    outputs += step(engine)
    assert not engine.has_work, "request 2 has no blocks until request 1 goes on"
    engine.reschedule(1, 0)
    assert engine.has_work
    while engine.has_work:
        outputs += step(engine)
    assert tokens(outputs, 1) == alone(embedded, PROMPT, SEEDED)
    assert tokens(outputs, 2) == alone(embedded, PROMPT[::-1], SEEDED)


@pytest.mark.parametrize("way", ["reschedule", "end", "abort", "suspend"])
def test_the_number_of_deferred_sequences_is_bounded(
    small: Small, embedded: LoadedModel, way: str
) -> None:
    engine = small(blocks=200, running=2)
    short = Sampling(max_tokens=4, ignore_eos=True, temperature=1.0, seed=5)
    queue = range(1, MAX_ADMITTED * 2 + 5)
    for request in queue:
        engine.add(request, PROMPT[:9], short)
    while engine.has_work:
        # No decision arrives.
        step(engine, *queue)
    kept = MAX_ADMITTED * 2
    assert engine.stats()["running"] == kept
    assert engine.stats()["waiting"] == len(queue) - kept
    match way:
        case "reschedule":
            engine.reschedule(1, 0)
        case "end":
            engine.end(1, 0)
        case "abort":
            engine.abort(1)
        case "suspend":
            engine.suspend(1, 0)
    assert engine.has_work
    while engine.has_work:
        step(engine, *queue[1:])
    assert engine.stats()["waiting"] == len(queue) - kept - 1, "one more was admitted"
    for request in queue[1:]:
        if engine.alive(request, 0):
            engine.reschedule(request, 0)
    outputs: list[TokenOutput] = []
    while engine.has_work:
        outputs += step(engine)
    assert {o.request for o in outputs if o.finish_reason == "length"} == set(queue[1:])
    assert tokens(outputs, queue[-1]) == alone(embedded, PROMPT[:9], short)


@pytest.mark.parametrize("way", ["abort", "end", "suspend", "splice", "smaller"])
def test_any_change_that_admits_a_waiting_sequence_makes_work(
    small: Small, embedded: LoadedModel, way: str
) -> None:
    engine = small(blocks=5)
    engine.add(1, PROMPT, SEEDED)
    step(engine, 1)
    engine.add(2, PROMPT[::-1], SEEDED)
    step(engine)
    assert not engine.has_work
    match way:
        case "abort":
            engine.abort(1)
        case "end":
            engine.end(1, 0)
        case "suspend":
            engine.suspend(1, 0)
        case "splice":
            engine.splice(1, 0, 0, [7])
        case "smaller":
            engine.add(3, PROMPT[:9], SEEDED, priority=1)
    outputs: list[TokenOutput] = []
    while engine.has_work:
        outputs += step(engine)
    wanted = {"splice": [1, 2], "smaller": [3]}.get(way, [2])
    assert sorted({o.request for o in outputs if o.finish_reason == "length"}) == wanted
    if way == "smaller":
        assert not engine.has_work
        engine.reschedule(1, 0)
        while engine.has_work:
            outputs += step(engine)
        assert tokens(outputs, 2) == alone(embedded, PROMPT[::-1], SEEDED)


def test_a_preempted_deferred_sequence_continues_with_the_same_tokens(
    small: Small, embedded: LoadedModel
) -> None:
    engine = small(blocks=6)
    engine.add(1, PROMPT, Sampling(max_tokens=50, ignore_eos=True))
    engine.add(2, PROMPT[:30:2], SEEDED)
    outputs = step(engine, 2)
    while not engine.stats()["preemptions"]:
        outputs += step(engine)
    while engine.alive(1, 0):
        outputs += step(engine, 2)
    assert tokens(outputs, 2) == []
    engine.reschedule(2, 0)
    while engine.has_work:
        outputs += step(engine)
    assert tokens(outputs, 2) == alone(embedded, PROMPT[:30:2], SEEDED)
    assert engine.stats()["kv_blocks_used"] == 0
