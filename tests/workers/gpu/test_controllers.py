"""Decisions of controllers in an engine: their effect on tokens, forks, steps and messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tokenbus.protocol.messages import FinishReason
from tokenbus.protocol.sampling import Sampling
from tokenbus.protocol.worker_messages import StepResult, StepSequence
from tokenbus.workers.controller.masks import MaskRows
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig
from tokenbus.workers.gpu.model.loader import LoadedModel, load_model

from ...worlds.engine_client import GREEDY, LENGTH, PROMPT, SEEDED, only
from ...worlds.engine_client import alone as alone_once
from ...worlds.steered_engine import (
    Answers,
    Bench,
    CountingEngine,
    counting,
    freely,
    one_thread,
    sample,
)

SIZE = 4096
ALL = np.full(SIZE // 32, 0xFFFF_FFFF, dtype=np.uint32)


@pytest.fixture(scope="module")
def embedded() -> Iterator[LoadedModel]:
    with one_thread():
        yield load_model("embedded")


@pytest.fixture
def engine(embedded: LoadedModel, overlap: bool) -> CountingEngine:
    return counting(embedded, overlap)


@pytest.fixture
def bench(engine: CountingEngine) -> Bench:
    return Bench(engine)


_alone: dict[tuple[object, ...], list[int]] = {}


def alone(embedded: LoadedModel, prompt: list[int], sampling: Sampling) -> list[int]:
    """The tokens of a new engine for a prompt. They are computed once."""
    key = (*prompt, sampling.max_tokens, sampling.seed)
    if key not in _alone:
        _alone[key] = alone_once(embedded, prompt, sampling)
    return _alone[key]


def begun(bench: Bench, request: int = 1, sampling: Sampling = GREEDY) -> None:
    """Adds a request, and computes its prompt. Its controller has not answered."""
    bench.add(request, PROMPT, sampling)
    bench.starts.clear()
    bench.step()
    assert bench.client(request).tokens == {0: []}


def at(tokens: int, then: Callable[[StepSequence], list[StepResult]]) -> Answers:
    """A controller that samples ``tokens`` tokens of sequence 0, decides once by ``then``, and
    samples again."""
    seen = 0

    def answers(update: StepSequence) -> list[StepResult]:
        nonlocal seen
        if update.ended is None and update.seq == 0 and seen == tokens:
            seen += 1
            return then(update)
        seen += update.ended is None and update.seq == 0
        return freely(update)

    return answers


# --- masks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_a_controller_that_allows_everything_changes_no_token(
    bench: Bench, embedded: LoadedModel, sampling: Sampling, masked: bool
) -> None:
    bench.add(1, PROMPT, sampling)
    bench.add(2, PROMPT[:9], sampling, controller=False)
    bench.send(StepResult(1, 0, "sample", attachment=0), masks=[ALL])
    bench.starts.clear()
    for _ in range(4 * LENGTH):
        for update in bench.updates:
            results = freely(update)
            if masked and update.ended is None:
                results[0].attachment = 0
            bench.send(*results, masks=[ALL])
        bench.updates.clear()
        bench.step()
    assert bench.live == {1: 0, 2: 0}
    assert bench.tokens(1) == alone(embedded, PROMPT, sampling)
    assert bench.tokens(2) == alone(embedded, PROMPT[:9], sampling)
    assert bench.client(1).reasons == {0: "length"}
    bench.check_nothing_is_left()


def test_nothing_is_sampled_before_the_first_decision(bench: Bench) -> None:
    begun(bench)
    for _ in range(5):
        bench.step()
    assert bench.tokens(1) == []
    assert not bench.engine.has_work, "a deferred sequence counts as work"
    bench.send(StepResult(1, 0, "sample"))
    bench.step()
    assert len(bench.tokens(1)) == 1
    [update] = bench.updates
    assert (update.tokens, update.ended) == (bench.tokens(1), None)


def test_masks_through_the_shared_file_and_through_attachments_give_the_same_tokens(
    embedded: LoadedModel, overlap: bool
) -> None:
    def masks() -> Callable[[], np.ndarray]:
        turn = itertools.count(1)
        return lambda: only(SIZE, *range(next(turn), SIZE, 37))

    def sent(host: str | None) -> tuple[Bench, list[int]]:
        bench, mask = Bench(counting(embedded, overlap), host), masks()
        bench.add(1, PROMPT, SEEDED)
        bench.send(StepResult(1, 0, "sample", attachment=0), masks=[mask()])
        for _ in range(LENGTH):
            bench.step()
            for update in bench.updates:
                result = freely(update)[0]
                result.attachment = 0 if update.ended is None else None
                bench.send(result, masks=[mask()])
            bench.updates.clear()
        bench.step()
        return bench, bench.tokens(1)

    elsewhere, wanted = sent("another machine")
    assert {step.masks for step in elsewhere.steps} == {""}
    assert elsewhere.live == {1: 0}

    bench, mask = Bench(counting(embedded, overlap)), masks()
    bench.add(1, PROMPT, SEEDED)
    bench.send(StepResult(1, 0, "sample", attachment=0), masks=[mask()])
    bench.step()
    step = bench.steps[0]
    rows = MaskRows(step.masks, step.rows, step.row_bytes)
    row = rows.take()
    assert row is not None
    for _ in range(LENGTH):
        for update in bench.updates:
            result = freely(update)[0]
            if update.ended is None:
                rows.view(row)[:] = mask().tobytes()
                result.row = row
            bench.send(result)
        bench.updates.clear()
        bench.step()
    assert bench.tokens(1) == wanted
    assert all(token % 37 == place + 1 for place, token in enumerate(wanted))


# --- tokens that a controller appends -------------------------------------------------------------


def test_tokens_of_the_first_round_join_the_prefill(
    engine: CountingEngine, bench: Bench, embedded: LoadedModel
) -> None:
    forced = [100, 200, 300]
    bench.add(1, PROMPT, GREEDY)
    bench.send(StepResult(1, 0, "sample", 0, forced))
    bench.step()
    # If steps overlap, the forward of the next token has been launched.
    assert engine.forwarded == len(PROMPT) + len(forced) + engine.overlaps
    rest = Sampling(max_tokens=LENGTH - 3, ignore_eos=True)
    assert bench.tokens(1) == forced + alone(embedded, PROMPT + forced, rest)[:1]
    bench.starts.clear()
    bench.run(freely)
    assert bench.tokens(1) == forced + alone(embedded, PROMPT + forced, rest)


def test_appended_tokens_take_one_forward_and_are_reported_once(
    engine: CountingEngine, bench: Bench
) -> None:
    begun(bench)
    bench.send(StepResult(1, 0, "sample", 0, [100, 200, 300, 400]))
    forwards = engine.forwarded
    bench.step()
    assert bench.tokens(1)[:4] == [100, 200, 300, 400]
    assert len(bench.tokens(1)) == 4 or engine.forwarded - forwards <= 5 + engine.overlaps
    while len(bench.tokens(1)) < 5:
        bench.step()
    assert engine.forwarded - forwards <= 5 + engine.overlaps
    assert [update.tokens for update in bench.updates] == [bench.tokens(1)[4:]]


def test_a_splice_drops_tokens_that_the_client_has(bench: Bench, embedded: LoadedModel) -> None:
    bench.add(1, PROMPT, GREEDY)
    bench.run(at(6, lambda update: [sample(update, backtrack=2, ff_tokens=[100, 200])]))
    head = [*alone(embedded, PROMPT, GREEDY)[:4], 100, 200]
    rest = Sampling(max_tokens=LENGTH - 6, ignore_eos=True)
    assert bench.tokens(1) == head + alone(embedded, PROMPT + head, rest)
    assert sum(o.backtrack for o in bench.received[1]) == 2


def test_appended_tokens_beyond_max_tokens_end_with_length(bench: Bench) -> None:
    bench.add(1, PROMPT, GREEDY)
    bench.run(at(5, lambda update: [sample(update, ff_tokens=[7] * 100)]))
    assert bench.tokens(1)[5:] == [7] * (LENGTH - 5)
    assert bench.client(1).reasons == {0: "length"}
    bench.check_nothing_is_left()


def test_a_splice_that_the_engine_refuses_ends_its_sequence_and_leaves_nothing(
    bench: Bench,
) -> None:
    begun(bench)
    bench.send(StepResult(1, 0, "sample", 3))
    bench.step()
    assert "drops 3 tokens" in bench.client(1).errors[0]
    assert bench.live == {1: 0}
    bench.check_nothing_is_left()


# --- forks ----------------------------------------------------------------------------------------


def fork(update: StepSequence, *children: int, **more: Any) -> StepResult:
    return StepResult(update.request, update.seq, "fork", children=list(children), **more)


def test_forks_in_the_first_round_compute_the_prompt_once(
    embedded: LoadedModel, overlap: bool
) -> None:
    wanted = {}
    for when in ("before the forward", "after it"):
        engine = counting(embedded, overlap)
        bench = Bench(engine)
        bench.add(1, PROMPT, SEEDED)
        bench.starts.clear()
        if when == "after it":
            bench.step()
        update = StepSequence(1, 0, [])
        bench.send(fork(update, 1, 2), *(sample(update, seq) for seq in range(3)))
        bench.step()
        bench.step()
        bench.step()
        assert engine.forwarded <= len(PROMPT) + 2 * 3, when
        bench.run(freely)
        assert {o.seq: o.parent for o in bench.received[1] if o.parent is not None} == {1: 0, 2: 0}
        bench.check_nothing_is_left()
        wanted[when] = bench.client(1).tokens
    assert wanted["before the forward"] == wanted["after it"]
    assert wanted["after it"][0] == alone(embedded, PROMPT, SEEDED)
    assert len({tuple(tokens) for tokens in wanted["after it"].values()}) == 3


@pytest.mark.parametrize("early", [False, True], ids=["with logits", "before them"])
def test_tokens_appended_by_a_fork_are_computed_once(
    embedded: LoadedModel, overlap: bool, early: bool
) -> None:
    forced = list(range(100, 160))
    engine = counting(embedded, overlap)
    bench = Bench(engine)
    sampling = Sampling(max_tokens=70, ignore_eos=True)
    bench.add(1, PROMPT, sampling)
    bench.starts.clear()
    if not early:
        bench.step()
    update = StepSequence(1, 0, [])
    bench.send(fork(update, 1, 2, ff_tokens=forced), *(sample(update, seq) for seq in range(3)))
    for _ in range(3):
        bench.step()
    assert engine.forwarded <= len(PROMPT) + len(forced) + 1 + 3 * 2
    bench.run(freely)
    rest = Sampling(max_tokens=10, ignore_eos=True)
    tokens = forced + alone(embedded, PROMPT + forced, rest)
    assert bench.client(1).tokens == dict.fromkeys(range(3), tokens)
    bench.check_nothing_is_left()


@pytest.mark.parametrize("early", [False, True], ids=["with logits", "before them"])
def test_a_fork_that_splices_and_forks_in_its_first_round(bench: Bench, early: bool) -> None:
    bench.add(1, PROMPT, GREEDY)
    bench.starts.clear()
    if not early:
        bench.step()
    update, child = StepSequence(1, 0, []), StepSequence(1, 1, [])
    bench.send(
        fork(update, 1),
        fork(update, 2, ff_tokens=[100]),
        sample(update),
        sample(update, 2),
        fork(child, 3, ff_tokens=[200, 300]),
        StepResult(1, 1, "stop"),
        sample(update, 3),
    )
    bench.run(freely)
    tokens = bench.client(1).tokens
    assert {o.seq: o.parent for o in bench.received[1] if o.parent is not None} == {
        1: 0,
        2: 0,
        3: 1,
    }
    assert tokens[1] == [200, 300]
    assert [len(tokens[seq]) for seq in (0, 2, 3)] == [LENGTH] * 3
    assert tokens[0] == tokens[2]
    assert (tokens[0][:1], tokens[3][:2]) == ([100], [200, 300])
    bench.check_nothing_is_left()


def test_each_fork_samples_under_its_own_mask(bench: Bench) -> None:
    begun(bench)
    update = StepSequence(1, 0, [])
    results = [fork(update, 1, 2), *(sample(update, seq, attachment=seq) for seq in range(3))]
    bench.send(*results, masks=[only(SIZE, 10 + seq) for seq in range(3)])
    bench.step()
    assert bench.client(1).tokens == {0: [10], 1: [11], 2: [12]}
    assert sorted((update.seq, *update.tokens) for update in bench.updates) == [
        (0, 10),
        (1, 11),
        (2, 12),
    ]


def test_children_continue_if_their_parent_stops_in_the_round_of_the_fork(
    bench: Bench, embedded: LoadedModel
) -> None:
    def forked(update: StepSequence) -> list[StepResult]:
        return [fork(update, 1, 2), StepResult(1, 0, "stop"), sample(update, 1), sample(update, 2)]

    bench.add(1, PROMPT, GREEDY)
    bench.run(at(4, forked))
    wanted = alone(embedded, PROMPT, GREEDY)
    client = bench.client(1)
    assert client.tokens == {0: wanted[:4], 1: wanted, 2: wanted}
    assert client.reasons == {0: "controller", 1: "length", 2: "length"}
    bench.check_nothing_is_left()


def test_a_fork_that_splices_before_the_fork_point_leaves_its_parent_alone(
    bench: Bench, embedded: LoadedModel
) -> None:
    def forked(update: StepSequence) -> list[StepResult]:
        return [fork(update, 1), sample(update), sample(update, 1, backtrack=5, ff_tokens=[100])]

    bench.add(1, PROMPT, GREEDY)
    bench.run(at(6, forked))
    wanted = alone(embedded, PROMPT, GREEDY)
    head = [*wanted[:1], 100]
    rest = Sampling(max_tokens=LENGTH - 2, ignore_eos=True)
    assert bench.tokens(1, 0) == wanted
    assert bench.tokens(1, 1) == head + alone(embedded, PROMPT + head, rest)
    bench.check_nothing_is_left()


def test_a_parent_that_reaches_max_tokens_by_appending_is_not_forked(
    bench: Bench,
) -> None:
    for request, early in ((1, True), (2, False)):
        bench.add(request, PROMPT, GREEDY)
        bench.starts.clear()
        if not early:
            bench.step()
        update = StepSequence(request, 0, [])
        bench.send(fork(update, 1, ff_tokens=[7] * 50), sample(update), sample(update, 1))
        bench.run(freely)
        assert bench.client(request).tokens == {0: [7] * LENGTH}
        assert bench.client(request).reasons == {0: "length"}
        bench.check_nothing_is_left()


def test_forks_that_the_engine_refuses_are_reported_as_ended(
    embedded: LoadedModel, overlap: bool
) -> None:
    config = EngineConfig(kv_cache_bytes=32 * 2**20, max_forks=3, overlap=overlap)
    bench = Bench(Engine(embedded, config))
    begun(bench)
    update = StepSequence(1, 0, [])
    bench.send(
        fork(update, 1, 2), sample(update), *(StepResult(1, seq, "suspend") for seq in (1, 2))
    )
    bench.step()
    bench.updates.clear()
    bench.send(fork(update, 3), sample(update), sample(update, 3))
    bench.step()
    assert "3 are allowed" in bench.client(1).errors[0]
    assert {update.seq for update in bench.updates if update.ended is not None} == {0, 3}


# --- suspension -----------------------------------------------------------------------------------


def test_a_suspended_sequence_may_fork_when_it_is_resumed(
    bench: Bench, embedded: LoadedModel
) -> None:
    begun(bench)
    bench.send(StepResult(1, 0, "sample"))
    bench.step()
    update = bench.updates.pop()
    bench.send(StepResult(1, 0, "suspend"))
    bench.step()
    bench.send(fork(update, 1), sample(update), sample(update, 1))
    bench.run(freely)
    assert bench.client(1).tokens == dict.fromkeys(range(2), alone(embedded, PROMPT, GREEDY))
    bench.check_nothing_is_left()


def test_a_fork_that_suspends_immediately_resumes_with_the_logits_of_its_text(
    bench: Bench, embedded: LoadedModel
) -> None:
    begun(bench)
    update = StepSequence(1, 0, [])
    bench.send(fork(update, 1), sample(update), StepResult(1, 1, "suspend"))
    for _ in range(10):
        bench.step()
        bench.send(*(one for update in bench.updates for one in freely(update)))
        bench.updates.clear()
    assert bench.tokens(1, 1) == []
    assert len(bench.tokens(1, 0)) == 10
    bench.send(StepResult(1, 1, "suspend"))
    bench.step()
    bench.send(sample(update, 1))
    bench.run(freely)
    assert bench.client(1).tokens == dict.fromkeys(range(2), alone(embedded, PROMPT, GREEDY))


# --- deferred sequences ---------------------------------------------------------------------------


def test_a_step_does_not_wait_for_a_sequence_that_was_deferred_before(bench: Bench) -> None:
    begun(bench, 1)
    bench.waited = 0
    bench.add(2, PROMPT[:9], GREEDY, controller=False)
    bench.send(StepResult(1, 0, "sample"), while_waiting=True)
    bench.step()
    assert (len(bench.tokens(1)), len(bench.tokens(2))) == (0, 1)
    assert bench.waited == 0, "a step waited for a deferred sequence"


def test_a_decision_that_comes_while_the_step_waits_is_in_time(bench: Bench) -> None:
    bench.add(1, PROMPT, GREEDY)
    bench.add(2, PROMPT[:9], GREEDY, controller=False)
    bench.send(StepResult(1, 0, "sample"), while_waiting=True)
    bench.step()
    assert (len(bench.tokens(1)), len(bench.tokens(2)), bench.waited) == (1, 1, 1)


def test_a_slow_controller_delays_its_own_sequence_only(
    bench: Bench, embedded: LoadedModel
) -> None:
    bench.add(1, PROMPT, SEEDED)
    bench.add(2, PROMPT[:9], GREEDY, controller=False)
    bench.add(3, PROMPT[:17], SEEDED)
    bench.send(StepResult(1, 0, "sample"), StepResult(3, 0, "sample"))
    for number in range(8 * LENGTH):
        for update in list(bench.updates):
            if update.request == 3 or number % 4 == 3:
                bench.updates.remove(update)
                bench.send(*freely(update))
        bench.step()
        assert len(bench.tokens(2)) == min(LENGTH, number + 1)
        assert len(bench.tokens(3)) >= min(LENGTH - 1, number + 1)
        if number < 4 * (LENGTH - 2):
            assert len(bench.tokens(1)) == (number + 1) // 4 + 1
    assert bench.live == {1: 0, 2: 0, 3: 0}
    assert bench.tokens(1) == alone(embedded, PROMPT, SEEDED)
    assert bench.tokens(2) == alone(embedded, PROMPT[:9], GREEDY)
    assert bench.tokens(3) == alone(embedded, PROMPT[:17], SEEDED)


def test_a_deferred_sequence_that_loses_its_blocks_gets_the_same_tokens(
    embedded: LoadedModel, overlap: bool
) -> None:
    whole = Engine(embedded, EngineConfig(kv_cache_bytes=32 * 2**20)).stats()["kv_blocks"] + 1
    few = int(32 * 2**20 / whole * 9)
    bench = Bench(Engine(embedded, EngineConfig(kv_cache_bytes=few, overlap=overlap)))
    begun(bench, 1)
    longer = Sampling(max_tokens=30, ignore_eos=True)
    for request in range(2, 6):
        bench.add(request, PROMPT[: 5 + request], longer, controller=False)
    while any(live for request, live in bench.live.items() if request > 1):
        bench.step()
    assert bench.engine.stats()["preemptions"] > 0
    bench.send(StepResult(1, 0, "sample"))
    bench.run(freely)
    assert bench.tokens(1) == alone(embedded, PROMPT, GREEDY)
    for request in range(2, 6):
        assert bench.tokens(request) == alone(embedded, PROMPT[: 5 + request], longer)


# --- ends -----------------------------------------------------------------------------------------


def test_the_client_receives_an_end_after_the_last_decision_of_the_controller(
    bench: Bench,
) -> None:
    bench.add(1, PROMPT, Sampling(max_tokens=2, ignore_eos=True))
    bench.send(StepResult(1, 0, "sample"))
    bench.step()
    bench.send(*freely(bench.updates.pop()))
    bench.step()
    [last] = bench.updates
    assert (last.ended, len(last.tokens)) == ("length", 1)
    assert (len(bench.tokens(1)), bench.live[1]) == (1, 1)
    bench.send(StepResult(1, 0, "stop", logs="bye"))
    bench.step()
    assert (len(bench.tokens(1)), bench.live[1]) == (2, 0)
    assert bench.received[1][-1].logs == "bye"


def test_an_error_of_the_engine_is_reported_to_the_controller(
    bench: Bench,
) -> None:
    begun(bench)
    update = StepSequence(1, 0, [])
    results = [fork(update, 1), StepResult(1, 0, "suspend"), sample(update, 1, attachment=0)]
    bench.send(*results, masks=[only(SIZE)])
    bench.step()
    assert "forbid all possible tokens" in bench.client(1).errors[1]
    assert [(update.seq, update.tokens, update.ended) for update in bench.updates] == [
        (1, [], "error")
    ]
    bench.send(StepResult(1, 1, "stop"))
    bench.step()
    assert bench.client(1).reasons == {1: "error"}
    bench.send(StepResult(1, 0, "stop"))
    bench.step()
    assert bench.live == {1: 0}


def test_an_end_of_sequence_token_as_the_last_token_ends_with_stop_as_without_a_controller(
    bench: Bench, embedded: LoadedModel
) -> None:
    [eos] = embedded.eos_token_ids
    for request, (ignore, reason) in enumerate([(False, "stop"), (True, "length")]):
        bench.add(request, PROMPT, Sampling(max_tokens=1, ignore_eos=True), ignore_eos=ignore)
        bench.send(StepResult(request, 0, "sample", attachment=0), masks=[only(SIZE, eos)])
        bench.starts.clear()
        bench.run(freely)
        assert bench.tokens(request) == [eos]
        assert bench.client(request).reasons == {0: reason}


@pytest.mark.parametrize("reason", ["stop", "controller"])
def test_a_controller_chooses_the_finish_reason(bench: Bench, reason: FinishReason) -> None:
    bench.add(1, PROMPT, GREEDY)
    bench.run(at(3, lambda update: [StepResult(1, 0, "stop", 0, [50], finish=reason)]))
    assert bench.client(1).reasons == {0: reason}
    assert bench.tokens(1)[3:] == [50]


def test_a_controller_that_stops_with_more_than_max_tokens_ends_with_length(
    bench: Bench,
) -> None:
    bench.add(1, PROMPT, GREEDY)
    bench.run(at(3, lambda update: [StepResult(1, 0, "stop", 0, [50] * 100)]))
    assert bench.client(1).reasons == {0: "length"}
    assert bench.tokens(1)[3:] == [50] * (LENGTH - 3)


def test_a_mask_of_the_wrong_size_ends_its_sequence(bench: Bench) -> None:
    bench.add(1, PROMPT, GREEDY)
    bench.send(StepResult(1, 0, "sample", attachment=0), masks=[only(64, 1)])
    bench.step()
    assert "expected (128,)" in bench.client(1).errors[0]


def test_an_error_of_a_controller_has_its_code(bench: Bench) -> None:
    bench.add(1, PROMPT, GREEDY)
    bench.run(at(3, lambda update: [StepResult(1, 0, "error", error="no!", code="deadlock")]))
    [end] = [o for o in bench.received[1] if o.finish_reason]
    assert (end.finish_reason, end.error, end.code) == ("error", "no!", "deadlock")


def test_aborting_leaves_no_decision_awaited(bench: Bench) -> None:
    for request in range(1, 5):
        bench.add(request, PROMPT, GREEDY)
    bench.starts.clear()
    updates = [StepSequence(request, 0, []) for request in range(5)]
    bench.send(fork(updates[2], 1), sample(updates[2]), sample(updates[2], 1))
    bench.send(StepResult(3, 0, "suspend"))
    bench.send(fork(updates[4], 1), StepResult(4, 0, "suspend"), sample(updates[4], 1))
    for when in range(2):
        bench.step()
        for request in range(1 + 2 * when, 3 + 2 * when):
            bench.engine.abort(request)
            bench.steering.forget(request)
    bench.send(sample(updates[1]), sample(updates[2], 1), sample(updates[3]), sample(updates[4]))
    bench.step()
    bench.check_nothing_is_left()


# --- logs and writes ------------------------------------------------------------------------------


def test_logs_and_writes_are_sent_with_the_next_token_of_their_own_sequence(bench: Bench) -> None:
    begun(bench)
    update = StepSequence(1, 0, [])
    bench.send(
        fork(update, 1, logs="f", storage=[1], ff_tokens=[100]),
        sample(update, logs="a", storage=[2]),
        sample(update, 1, logs="b"),
    )
    for _ in range(3):
        bench.step()
    said = [
        (o.seq, o.pos, o.logs, list(o.storage)) for o in bench.received[1] if o.logs or o.storage
    ]
    assert sorted(said) in (
        [(0, 0, "f", [1]), (0, 1, "a", [2]), (1, 1, "b", [])],
        [(0, 0, "fa", [1, 2]), (1, 1, "b", [])],
    )


def test_the_logs_of_a_suspended_sequence_are_sent_in_order(bench: Bench) -> None:
    bench.add(1, PROMPT, GREEDY)
    bench.send(StepResult(1, 0, "suspend", logs="1"))
    bench.step()
    bench.send(StepResult(1, 0, "suspend", logs="2"))
    bench.step()
    bench.send(StepResult(1, 0, "sample", logs="3"))
    bench.step()
    bench.send(StepResult(1, 0, "stop", logs="4"))
    bench.step()
    assert [(o.pos, o.logs) for o in bench.received[1]] == [(0, "123"), (1, "4")]


def test_the_sequences_of_many_ended_requests_are_removed_together(bench: Bench) -> None:
    """The table of awaited decisions would otherwise be searched once for each request."""
    steering = bench.steering
    for request in range(8):
        bench.add(request, PROMPT, GREEDY)
    table = steering._awaited
    for request in range(4):
        bench.engine.abort(request)
        steering.forget(request)
        assert steering._awaited is table
    bench.now += 10_000.0
    assert {output.request for output in steering.expire()} <= set(range(4, 8))
    bench.add(0, PROMPT, GREEDY)
    assert (0, 0) in steering._awaited
    assert (1, 0) not in steering._awaited
    for request in (0, *range(4, 8)):
        bench.engine.abort(request)
        steering.forget(request)
    bench.check_nothing_is_left()
