"""Decisions that are malformed, cannot be applied or never arrive end only their own sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tokenbus.protocol.worker_messages import StepResult, StepSequence
from tokenbus.workers.gpu.model.loader import LoadedModel, load_model
from tokenbus.workers.machine import machine_id

from ...worlds.engine_client import GREEDY, LENGTH, PROMPT, SEEDED, alone
from ...worlds.steered_engine import TIMEOUT_S, Bench, counting, freely, one_thread, sample

LATER_S = TIMEOUT_S + 10


@pytest.fixture(scope="module")
def embedded() -> Iterator[LoadedModel]:
    with one_thread():
        yield load_model("embedded")


@pytest.fixture
def bench(embedded: LoadedModel) -> Bench:
    return Bench(counting(embedded))


def ends(bench: Bench, request: int) -> list[tuple[int, str | None, str | None]]:
    """The ends of a request's sequences: their numbers, reasons and codes."""
    return [(o.seq, o.finish_reason, o.code) for o in bench.received[request] if o.finish_reason]


def entry(one: StepResult) -> Any:
    """A decision as a message contains it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(one))


def deliver(
    bench: Bench,
    *entries: Any,
    masks: list[bytes] | None = None,
    worker: int = 0,
    usual: tuple[int, ...] = (),
) -> None:
    """The worker receives a RESULT with these entries. ``usual``: ``Result.usual``."""
    body = msgspec.msgpack.encode({"sequences": entries, "usual": usual, "host": machine_id()})
    bench._receive_outputs(bench.steering.on_result(worker or bench.worker, body, masks or []))


# --- malformed ------------------------------------------------------------------------------------


MALFORMED = {
    "an unknown action": [1, 0, "jump"],
    "a number for a list": [1, 0, "sample", 0, 7],
    "too short": [1, 0],
    "a row without a file": [1, 0, "sample", 0, [], 0],
    "a row beyond the file": [1, 0, "sample", 0, [], 5000],
    "a row before the file": [1, 0, "sample", 0, [], -1],
    "an attachment that is not there": [1, 0, "sample", 0, [], None, 3],
    "an attachment before the first": [1, 0, "sample", 0, [], None, -1],
    "an attachment of odd size": [1, 0, "sample", 0, [], None, 0],
    "a mask of another size": [1, 0, "sample", 0, [], None, 1],
    "a fork into none": [1, 0, "fork"],
    "a fork into itself": [1, 0, "fork", 0, [], None, None, [0]],
    "a fork into one twice": [1, 0, "fork", 0, [], None, None, [1, 1]],
    "a negative backtrack": [1, 0, "sample", -2, [5]],
}


@pytest.mark.parametrize("bad", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("ready", [False, True], ids=["before the logits", "with them"])
def test_a_malformed_decision_ends_its_sequence_and_the_others_of_its_message_are_applied(
    bench: Bench, embedded: LoadedModel, bad: Any, ready: bool
) -> None:
    bench.add(1, PROMPT, GREEDY)
    bench.add(2, PROMPT, SEEDED)
    if ready:
        bench.step()
    bench.starts.clear()
    if bad == MALFORMED["a row without a file"]:
        bench._host = "elsewhere"
        bench.send(StepResult(1, 0, "suspend"))
        bench.step()
    deliver(bench, bad, entry(StepResult(2, 0, "sample")), masks=[b"odd", b"four"])
    bench.run(freely)
    [end] = ends(bench, 1)
    assert end[:2] == (0, "error")
    assert bench.client(1).errors[0]
    assert bench.tokens(2) == alone(embedded, PROMPT, SEEDED)
    bench.check_nothing_is_left()


@pytest.mark.parametrize("row", [-1, 5000])
@pytest.mark.parametrize("number", [1, 2], ids=["the first result", "the second"])
def test_a_usual_result_with_a_wrong_row_ends_its_sequence_only(
    bench: Bench, embedded: LoadedModel, row: int, number: int
) -> None:
    bench.add(1, PROMPT, GREEDY)
    bench.add(2, PROMPT, SEEDED)
    bench.starts.clear()
    if number == 2:
        bench.send(StepResult(1, 0, "sample"), StepResult(2, 0, "sample"))
        bench.step()
        bench.updates.clear()
    deliver(bench, entry(StepResult(2, 0, "sample")), usual=(1, 0, row, 9, 0, 3))
    bench.run(freely)
    assert ends(bench, 1)[0] == (0, "error", "controller_failed")
    assert f"row {row} of a mask file" in str(bench.client(1).errors[0])
    assert bench.tokens(2) == alone(embedded, PROMPT, SEEDED)
    bench.check_nothing_is_left()


def test_an_entry_for_an_unknown_sequence_is_skipped(bench: Bench, embedded: LoadedModel) -> None:
    bench.add(1, PROMPT, GREEDY)
    bench.starts.clear()
    deliver(bench, "?", {"request": 1}, [], ["1", 0], entry(StepResult(1, 0, "sample")))
    bench.run(freely)
    assert bench.tokens(1) == alone(embedded, PROMPT, GREEDY)
    bench.check_nothing_is_left()


def test_a_malformed_last_decision_does_not_keep_the_end_back(bench: Bench) -> None:
    bench.add(1, PROMPT, GREEDY)

    def answers(update: StepSequence) -> list[StepResult]:
        if update.ended is None:
            return freely(update)
        deliver(bench, [1, 0, "jump"])
        return []

    bench.run(answers)
    assert ends(bench, 1) == [(0, "error", "controller_failed")]
    assert len(bench.tokens(1)) == LENGTH
    bench.check_nothing_is_left()


def test_a_malformed_decision_of_a_fork_that_is_not_made_yet_ends_the_fork(
    bench: Bench, embedded: LoadedModel
) -> None:
    bench.add(1, PROMPT, GREEDY)
    bench.starts.clear()
    update = StepSequence(1, 0, [])
    forked = StepResult(1, 0, "fork", children=[1])
    deliver(bench, entry(forked), [1, 1, "jump"], entry(sample(update)))
    bench.run(freely)
    assert ends(bench, 1)[0] == (1, "error", "controller_failed")
    assert bench.tokens(1) == alone(embedded, PROMPT, GREEDY)
    bench.check_nothing_is_left()


# --- decisions for which no sequence waits --------------------------------------------------------


def test_a_second_decision_for_one_token_has_no_effect(bench: Bench, embedded: LoadedModel) -> None:
    bench.add(1, PROMPT, GREEDY)
    bench.starts.clear()
    update = StepSequence(1, 0, [])
    bench.send(
        sample(update), sample(update, backtrack=0, ff_tokens=[7, 7]), StepResult(1, 0, "stop")
    )
    bench.run(freely)
    assert bench.tokens(1) == alone(embedded, PROMPT, GREEDY)
    bench.check_nothing_is_left()


def test_another_controller_worker_s_decision_has_no_effect(
    bench: Bench, embedded: LoadedModel
) -> None:
    bench.add(1, PROMPT, GREEDY)
    bench.starts.clear()
    bench.send(StepResult(1, 0, "suspend"))
    bench.step()
    deliver(bench, entry(StepResult(1, 0, "stop")), worker=bench.worker + 1)
    bench.send(StepResult(1, 0, "sample"))
    bench.run(freely)
    assert bench.tokens(1) == alone(embedded, PROMPT, GREEDY)
    bench.check_nothing_is_left()


# --- decisions that never arrive ------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 5])
def test_a_decision_that_never_arrives_ends_its_sequence_alone(
    bench: Bench, embedded: LoadedModel, tokens: int
) -> None:
    bench.add(1, PROMPT, GREEDY)
    bench.add(2, PROMPT, SEEDED)
    given = 0

    def answers(update: StepSequence) -> list[StepResult]:
        nonlocal given
        if update.request == 2:
            return freely(update)
        given += 1
        if given > tokens:
            bench.now += LATER_S
            return []
        return freely(update)

    bench.run(answers)
    assert bench.tokens(1) == alone(embedded, PROMPT, GREEDY)[:tokens]
    assert ends(bench, 1) == [(0, "error", "controller_failed")]
    assert f"did not send a decision within {TIMEOUT_S:g} s" in bench.client(1).errors[0]
    assert bench.tokens(2) == alone(embedded, PROMPT, SEEDED)
    bench.check_nothing_is_left()
    assert [s.ended for step in bench.steps for s in step.sequences if s.request == 1][-1:] == (
        ["error"] if tokens else []
    )


def end_undecided(bench: Bench) -> None:
    """Forks request 1, whose sequence 0 then ends because its decision does not arrive in time."""
    bench.add(1, PROMPT, GREEDY)
    bench.starts.clear()
    update = StepSequence(1, 0, [])
    bench.send(StepResult(1, 0, "fork", children=[1]), sample(update, 1))
    bench.step()
    bench.now += LATER_S
    bench.send(sample(update, 1))
    bench.step()
    assert ends(bench, 1) == [(0, "error", "controller_failed")]


def test_a_decision_that_arrives_after_its_sequence_has_ended_has_no_effect(bench: Bench) -> None:
    end_undecided(bench)
    late = sample(StepSequence(1, 0, []))
    bench.send(late, *(sample(update) for update in bench.updates if update.seq == 1))
    bench.updates.clear()
    bench.step()
    assert StepSequence(1, 0, [], "error") in bench.updates
    bench.run(freely)
    assert len(bench.tokens(1, 1)) == LENGTH
    bench.check_nothing_is_left()


@pytest.mark.parametrize("action", ["sample", "look", "score", "suspend"])
def test_a_controller_that_waits_after_its_sequence_has_ended_receives_the_end(
    bench: Bench, action: str
) -> None:
    """Otherwise the controller would wait until the whole request ends, and no sequence of the
    request would be woken after a time."""
    end_undecided(bench)
    bench.updates = [one for one in bench.updates if one.seq == 1]
    before = len(bench.steps)
    texts = [[5]] if action == "score" else []
    bench.send(StepResult(1, 0, action, texts=texts))  # type: ignore[arg-type]
    bench.run(lambda update: freely(update) if update.seq else [])
    later = [one for step in bench.steps[before:] for one in step.sequences]
    assert [one.ended for one in later if one.seq == 0] == ["error"]
    bench.check_nothing_is_left()


def test_the_last_round_that_never_ends_does_not_keep_the_last_token_back(
    bench: Bench, embedded: LoadedModel
) -> None:
    bench.add(1, PROMPT, GREEDY)

    def answers(update: StepSequence) -> list[StepResult]:
        if update.ended is not None:
            bench.now += LATER_S
            return []
        return freely(update)

    bench.run(answers)
    assert bench.tokens(1) == alone(embedded, PROMPT, GREEDY)
    assert ends(bench, 1) == [(0, "error", "controller_failed")]
    bench.check_nothing_is_left()


def test_a_suspended_sequence_may_wait_for_any_time(bench: Bench, embedded: LoadedModel) -> None:
    bench.add(1, PROMPT, GREEDY)
    bench.starts.clear()
    bench.send(StepResult(1, 0, "suspend"))
    for _ in range(3):
        bench.now += LATER_S
        bench.step()
    bench.send(StepResult(1, 0, "sample"))
    bench.run(freely)
    assert bench.tokens(1) == alone(embedded, PROMPT, GREEDY)


def test_a_fork_may_wait_for_its_logits_for_any_time(bench: Bench) -> None:
    bench.add(1, PROMPT, GREEDY)
    bench.starts.clear()
    update = StepSequence(1, 0, [])
    deliver(
        bench,
        entry(StepResult(1, 0, "fork", children=[1])),
        entry(sample(update)),
        entry(sample(update, 1)),
    )
    bench.now += LATER_S
    bench.run(freely)
    assert {reason for _, reason, _ in ends(bench, 1)} == {"length"}
    bench.check_nothing_is_left()
