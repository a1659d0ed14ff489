"""Plays all runs with one failure, runs with three deaths, and the runs with two failures that once
violated a promise."""

from __future__ import annotations

import itertools

import pytest

from .search import Failure, choices, play

FOUND = {
    "a worker reports a stream that was adopted from another worker and has ended": (
        Failure(11, "broker", "restart"),
        Failure(17, "0", "cut"),
    ),
    "a request is sent again, and its sequences end in another order": (
        Failure(5, "broker", "restart"),
        Failure(11, "0", "kill"),
    ),
    "a worker that drains is lost together with the broker": (
        Failure(5, "0", "drain"),
        Failure(5, "broker", "restart"),
    ),
}


@pytest.mark.parametrize("brokers", [1, 2])
def test_no_single_failure_violates_a_promise(brokers: int) -> None:
    _, touched, violation = play((), brokers)
    assert not violation
    singles = list(choices(touched, None, brokers))
    assert len(singles) > 100
    for failure in singles:
        _, _, violation = play((failure,), brokers)
        assert not violation, f"{failure}\n{violation}"


@pytest.mark.parametrize("brokers", [1, 2])
@pytest.mark.parametrize("order", [*itertools.permutations(("0", "client", "broker"))])
def test_a_worker_a_client_and_a_broker_die(order: tuple[str, ...], brokers: int) -> None:
    """The three processes die in each order, at the same turn or one after the other."""
    kinds = {"0": "kill", "client": "die", "broker": "restart"}
    for turn in range(1, 24, 3):
        for apart in (0, 1, 4):
            deaths = [
                Failure(turn + number * apart, process, kinds[process])
                for number, process in enumerate(order)
            ]
            _, _, violation = play(tuple(deaths), brokers)
            assert not violation, f"{deaths}\n{violation}"


@pytest.mark.parametrize("failures", FOUND.values(), ids=FOUND)
def test_runs_that_once_violated_a_promise(failures: tuple[Failure, ...]) -> None:
    _, _, violation = play(failures)
    assert not violation, violation


def test_a_violation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search finds a violation in a broker that forgets the stored entries of moved streams."""
    monkeypatch.setattr("tokenbus.broker.stream_log.StreamLog.repeats", lambda *_: None)
    monkeypatch.setattr(
        "tokenbus.broker.moves.encode_body", lambda _entries, _encoding: b"\xdd\x00\x00\x00\x00"
    )
    _, touched, _ = play(())
    assert any(play((failure,))[2] for failure in choices(touched, None))
