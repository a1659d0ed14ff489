"""When a worker leaves or is lost, the broker logs one line for all of its streams."""

from __future__ import annotations

import logging

import pytest
from tokenbus.broker.outgoing import Side
from tokenbus.protocol.worker_messages import Drain, Unregister

from ..worlds.broker import Bench, generate, peer_of

CRASH = "its connection closed"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The broker's log lines at the level of a running system."""
    caplog.set_level(logging.INFO, "tokenbus.broker")
    return caplog


def begin(streams: int, **settings: float) -> Bench:
    """A broker whose worker ``a`` runs this number of streams."""
    bench = Bench(expiry_s=1000.0, session_expiry_s=1000.0, **settings)
    bench.worker("a", capacity=8)
    for stream in range(streams):
        bench.client("c", "GENERATE", generate(stream))
    return bench


def crash(bench: Bench, worker: str) -> None:
    bench.sent += bench.broker.on_gone(Side.BACK, peer_of(worker), bench.now)


def lines(log: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    """The lines of at least this level since the last call."""
    found = [r.getMessage() for r in log.records if r.levelno >= level]
    log.clear()
    return found


def test_a_crash_is_one_warning_that_says_where_its_streams_go(
    log: pytest.LogCaptureFixture,
) -> None:
    bench = begin(5)
    bench.worker("b", capacity=3)
    lines(log)
    crash(bench, "a")
    [line] = lines(log)
    assert line == (
        f"lost worker a: {CRASH}; of its 5 streams, 3 continue at other workers and 2 wait for a "
        "worker, for at most 120 s"
    )


def test_streams_that_cannot_continue_are_counted(log: pytest.LogCaptureFixture) -> None:
    bench = begin(2, max_journal_bytes=0)
    lines(log)
    crash(bench, "a")
    assert lines(log, logging.WARNING) == [
        f"lost worker a: {CRASH}; of its 2 streams, 2 end with an error"
    ]


def test_streams_that_waited_are_one_line_when_they_continue_or_end(
    log: pytest.LogCaptureFixture,
) -> None:
    bench = begin(3)
    crash(bench, "a")
    lines(log)
    bench.worker("b", capacity=2)
    assert "2 streams that waited for a worker continue" in lines(log)
    crash(bench, "b")
    lines(log)
    bench.pass_time(130.0)
    assert lines(log) == [
        "3 streams that waited for a worker end with an error: no worker that can continue them "
        "has registered for 120 s"
    ]


def test_a_planned_drain_has_other_words_and_no_warning(log: pytest.LogCaptureFixture) -> None:
    bench = begin(2)
    bench.worker("b", capacity=8)
    lines(log)
    bench.send("a", "DRAIN", Drain(reason="SIGTERM"))
    bench.send("a", "UNREGISTER", Unregister(reason="SIGTERM"))
    assert lines(log) == [
        "worker a drains: SIGTERM; it has 2 streams",
        "worker a hands over its streams",
        "worker a has left: SIGTERM; of its 2 streams, 2 continue at other workers",
    ]


def test_a_worker_that_gives_up_or_dies_while_it_drains_is_a_warning(
    log: pytest.LogCaptureFixture,
) -> None:
    bench = begin(1)
    bench.send("a", "UNREGISTER", Unregister(reason="its device is lost"))
    [line] = lines(log, logging.WARNING)
    assert line.startswith("lost worker a: its device is lost; of its 1 stream, 1 waits for a ")
    bench.worker("b")
    bench.send("b", "DRAIN", Drain(reason="SIGTERM"))
    crash(bench, "b")
    [line] = lines(log, logging.WARNING)
    assert line.startswith(f"lost worker b: {CRASH}")


def test_a_worker_without_streams_says_so(log: pytest.LogCaptureFixture) -> None:
    bench = begin(0)
    lines(log)
    crash(bench, "a")
    assert lines(log) == [f"lost worker a: {CRASH}; it had no streams"]
