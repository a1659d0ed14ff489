"""The pauses of streams when a process stops for a while, in simulated time. A stream pauses at
most ``MOVE_S`` longer than the process was stopped. If the process is a worker, the stream also
pauses at most ``MOVE_S`` longer than a lease."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from . import workers
from .clients import Reader
from .workers import GpuWorker
from .world import TICK_S, World

STREAMS = 4
LENGTH = 10_000
"""Number of tokens of a stream; the tests read fewer."""
MOVE_S = 2 * TICK_S
"""The duration of a move in simulated time: the tick in which the broker notices the loss, and the
next tick."""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A system with three workers, and two clients with running streams."""
    monkeypatch.setattr(workers, "CAPACITY", 20)
    logging.disable(logging.ERROR)
    world = World()
    for _ in range(3):
        world.start_gpu()
    clients = [world.start_client(), world.start_client()]
    for client in clients:
        for seed in range(STREAMS):
            client.submit(1, LENGTH, "", seed)
    for _ in range(20):
        world.tick()
    assert all(reader.next[0] for reader in world.readers())
    yield world
    world.close()
    logging.disable(logging.NOTSET)


def pauses(world: World, seconds: float, go_on: Callable[[], None]) -> list[float]:
    """Lets ``seconds`` pass after the caller has stopped a process, and continues the process with
    ``go_on``. Returns the longest pause of each stream, in seconds."""
    last = {reader: (world.network.now, reader.next[0]) for reader in world.readers()}
    longest = dict.fromkeys(last, 0.0)

    def tick() -> None:
        world.tick()
        now = world.network.now
        for reader, (since, pos) in last.items():
            if reader.next[0] != pos:
                longest[reader] = max(longest[reader], now - since)
                last[reader] = now, reader.next[0]

    for _ in range(round(seconds / TICK_S)):
        tick()
    go_on()
    for _ in range(160):
        tick()
    for reader, (since, _) in last.items():
        longest[reader] = max(longest[reader], world.network.now - since)
    return list(longest.values())


def notices(readers: list[Reader]) -> set[str]:
    return {notice.event for reader in readers for notice in reader.notices}


@pytest.mark.parametrize("seconds", [1.0, 4.5, 6.5, 8.0, 12.0, 20.0])
def test_streams_go_on_at_once_when_the_broker_does(world: World, seconds: float) -> None:
    """After a long stop, all workers have closed their connections, so no request becomes a
    suspect."""
    world.network.stopped = True
    assert max(pauses(world, seconds, world.network.go_on)) <= seconds + MOVE_S
    assert not any(reader.error for reader in world.readers())
    # No client has sent a request again.
    assert notices(world.readers()) <= {"moved"}


@pytest.mark.parametrize("seconds", [1.0, 6.5, 8.0, 12.0, 14.0])
def test_streams_go_on_at_once_when_their_client_does(world: World, seconds: float) -> None:
    client, other = world.clients
    client.stopped = True

    def go_on() -> None:
        client.stopped = False
        # The client may check the time before it handles the messages that have arrived.
        client.on_time()

    longest = pauses(world, seconds, go_on)
    assert max(longest[:STREAMS]) <= seconds + MOVE_S
    assert max(longest[STREAMS:]) <= MOVE_S
    assert not notices(client.readers + other.readers)


@pytest.mark.parametrize("seconds", [4.0, 6.0, 8.0])
def test_streams_of_a_worker_that_stands_still_move_when_its_lease_ends(
    world: World, seconds: float
) -> None:
    stops = next(w for w in world.workers if isinstance(w, GpuWorker) and w.streams)
    stops.stopped = True

    def go_on() -> None:
        stops.stopped = False

    assert max(pauses(world, seconds, go_on)) <= min(seconds, 5.0) + MOVE_S
    assert not any(reader.error for reader in world.readers())
    assert notices(world.readers()) == ({"moved"} if seconds > 5.0 else set())
