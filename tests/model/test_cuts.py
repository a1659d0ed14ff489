"""Links that are cut for a while, in simulated time: no message passes, and the processes notice
the cut only by the silence. If a worker continues a stream after the cut, it does not compute
tokens again."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from tokenbus.broker.settings import BrokerSettings

from . import workers
from .clients import Client
from .workers import GpuWorker
from .world import TICK_S, World

LONG = 10_000
BACK_S = 7.0
"""Maximum time in seconds until all processes are connected again. A process gives up a silent
connection after 5 or 6 s."""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A system with a worker and a client."""
    monkeypatch.setattr(workers, "CAPACITY", 20)
    logging.disable(logging.ERROR)
    world = World()
    world.start_gpu()
    world.start_client()
    run(world, 1.0)
    yield world
    world.close()
    logging.disable(logging.NOTSET)


def run(world: World, seconds: float) -> None:
    for _ in range(round(seconds / TICK_S)):
        world.tick()


def cut(world: World, seconds: float, *ends: GpuWorker | Client) -> None:
    """Cuts the links of ``ends`` for ``seconds``, and then waits until their processes are
    connected again."""
    for end in ends:
        end.pipe.cut = True
    run(world, seconds)
    for end in ends:
        end.pipe.cut = False
    run(world, BACK_S)


def gpu(world: World, number: int = 0) -> GpuWorker:
    worker = world.workers[number]
    assert isinstance(worker, GpuWorker)
    return worker


def notices(world: World) -> list[str]:
    return [notice.event for reader in world.readers() for notice in reader.notices]


@pytest.mark.parametrize("seconds", [2.0, 4.75, 6.0, 20.0, 100.0])
def test_streams_go_on_at_a_worker_that_comes_back(world: World, seconds: float) -> None:
    worker, [client] = gpu(world), world.clients
    reader = client.submit(2, LONG, "", 1)
    run(world, 1.0)
    [stream] = worker.streams.values()
    cut(world, seconds, worker)
    # The worker has the same stream as before, and has continued to compute it.
    assert list(worker.streams.values()) == [stream]
    assert sum(reader.next.values()) >= len(stream.sent) - 12
    assert len(stream.sent) > 12 * seconds
    assert notices(world) == []


def test_streams_that_end_meanwhile_have_ended_when_their_worker_is_back(world: World) -> None:
    worker, [client] = gpu(world), world.clients
    readers = [client.submit(n, 50, "", n) for n in (1, 3)]
    run(world, 1.0)
    cut(world, 20.0, worker)
    assert all(reader.over and reader.error is None for reader in readers)
    assert notices(world) == []
    world.end()


def test_what_waits_in_the_meantime_begins_when_the_worker_is_back(world: World) -> None:
    worker, [client] = gpu(world), world.clients
    gpu(world).pipe.cut = True
    run(world, 1.0)
    # The broker does not treat the worker as lost yet. It sends the request to the worker, and the
    # message is lost.
    reader = client.submit(1, 50, "", 1)
    cut(world, 20.0, worker)
    assert reader.over
    assert reader.error is None


def test_streams_that_went_on_elsewhere_meanwhile_stay_there(world: World) -> None:
    """The readers of the streams fail if a token arrives twice."""
    worker, [client] = gpu(world), world.clients
    reader = client.submit(1, LONG, "", 1)
    run(world, 1.0)
    other = world.start_gpu()
    cut(world, 20.0, worker)
    assert not worker.streams
    assert len(other.streams) == 1
    assert notices(world) == ["moved"]
    assert reader.next[0] > 200


def test_a_stream_that_a_worker_has_lost_meanwhile_is_continued_from_what_was_routed(
    world: World,
) -> None:
    worker, [client] = gpu(world), world.clients
    reader = client.submit(1, LONG, "", 1)
    run(world, 1.0)
    worker.pipe.cut = True
    run(world, 20.0)
    # The worker has reported the stream in its REGISTER, but has dropped the stream meanwhile.
    [(number, stream)] = worker.streams.items()
    worker._registration()
    worker.streams.clear()
    reported = worker._reported
    worker._reported = lambda: {number: stream}  # type: ignore[method-assign]
    worker.carrier.pipe.close(0)  # type: ignore[union-attr]
    worker.carrier.start()
    worker._reported = reported  # type: ignore[method-assign]
    worker.pipe.cut = False
    before = reader.next[0]
    run(world, BACK_S)
    assert reader.next[0] > before
    assert notices(world) == ["moved"]


@pytest.mark.parametrize("seconds", [3.0, 8.0, 20.0, 30.0])
def test_a_client_and_its_worker_come_back_together(world: World, seconds: float) -> None:
    worker, [client] = gpu(world), world.clients
    reader = client.submit(1, LONG, "", 1)
    run(world, 1.0)
    cut(world, seconds, worker, client)
    assert reader.next[0] > 12 * (seconds - 2)
    assert notices(world) == []


@pytest.mark.parametrize("seconds", [8.0, 20.0, 30.0])
def test_a_client_that_comes_back_has_missed_nothing(world: World, seconds: float) -> None:
    [client] = world.clients
    reader = client.submit(1, LONG, "", 1)
    run(world, 1.0)
    cut(world, seconds, client)
    assert reader.next[0] > 12 * seconds
    assert notices(world) == []


def test_a_client_that_stays_away_loses_its_streams(world: World) -> None:
    settings, [client] = BrokerSettings(), world.clients
    client.submit(1, LONG, "", 1)
    run(world, 1.0)
    client.pipe.cut = True
    run(world, settings.session_expiry_s + settings.session_cut_s - 2)
    assert gpu(world).streams
    run(world, 5.0)
    assert not gpu(world).streams


def test_links_that_are_cut_again_and_again_put_no_request_in_quarantine(world: World) -> None:
    worker, [client] = gpu(world), world.clients
    reader = client.submit(1, 60, "", 1)
    # The first cut begins before the stream's first token.
    for _ in range(3):
        cut(world, 20.0, worker)
    assert reader.over
    assert reader.error is None
