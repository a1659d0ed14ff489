"""The broker and the lease of a worker agree on which requests the worker has."""

from __future__ import annotations

from collections.abc import Iterable

from tokenbus.broker.outgoing import Side
from tokenbus.protocol.bodies import decode_as, encode_body
from tokenbus.protocol.frames import Frames
from tokenbus.protocol.header import decode_header
from tokenbus.protocol.worker_messages import Heartbeat, LiveRequest, Register, Registered
from tokenbus.workers.lease import Lease

from ..worlds.broker import Bench, generate, peer_of


class Worker:
    """A worker with a real lease; the test delivers its messages."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.requests: dict[int, LiveRequest] = {}
        self.granted = 0
        """The number of the last lease whose REGISTERED was handled."""
        self.sent: list[str] = []
        self.lease = Lease(self._registration, lambda now: Heartbeat(), bench.now)

    def _registration(self) -> Register:
        live = list(self.requests.values())
        return Register(
            name="w",
            role="gpu",
            version=1,
            pid=1,
            host="h",
            capacity=4,
            patterns=["m"],
            default="m",
            live=live,
        )

    def send(self, messages: Iterable[Frames]) -> None:
        """Delivers messages to the broker; ``bench.sent`` then has the broker's answers."""
        for frames in messages:
            self.sent.append(frames[0].decode())
            self.bench.sent += self.bench.broker.on_worker(peer_of("w"), frames, self.bench.now)

    def receive(self) -> None:
        """Delivers messages in both directions until none is left."""
        bench = self.bench
        while mine := [m for m in bench.sent if m.side is Side.BACK and m.peer == peer_of("w")]:
            bench.sent = [m for m in bench.sent if m not in mine]
            for message in mine:
                self._take([bytes(frame) for frame in message.frames])

    def _take(self, frames: Frames) -> None:
        _, answers = self.lease.on_frames(frames, self.bench.now)
        self.send(answers)
        if frames[0] == b"REGISTERED":
            answer: Registered = decode_as(Registered, frames[2], "msgpack")
            # ``Link.kept`` and ``GpuWorker._registered`` have these steps, too.
            kept = None if answer.worker == self.granted else self.lease.kept(answer)
            self.granted = answer.worker
            for request in list(self.requests):
                if request in answer.unknown or (kept is not None and request not in kept):
                    del self.requests[request]
        elif frames[0] == b"GENERATE":
            header = decode_header(frames[1])
            self.requests[header.request] = LiveRequest(
                request=header.request, session=header.address, stream_id=1
            )

    @property
    def given(self) -> set[int]:
        """The requests that the broker has assigned to the worker."""
        workers = self.bench.broker.state.workers.values()
        return {request for worker in workers for request in worker.requests}


def begun(bench: Bench) -> Worker:
    """A worker that runs the request of a client."""
    worker = Worker(bench)
    worker.send(worker.lease.connected(bench.now))
    worker.receive()
    bench.client("c", "HELLO")
    bench.client("c", "GENERATE", generate(1))
    worker.receive()
    assert len(worker.requests) == 1
    assert worker.given == set(worker.requests)
    return worker


def test_a_change_is_reported_under_the_same_lease() -> None:
    worker = begun(Bench(expiry_s=5.0))
    before = worker.granted
    worker.send(worker.lease.changed())
    worker.receive()
    assert worker.granted == before
    assert worker.given == set(worker.requests) != set()


def test_a_change_that_is_reported_after_the_lease_has_ended_loses_no_request() -> None:
    """The worker was silent for longer than a lease lasts. Its next message is the update of its
    registration."""
    bench = Bench(expiry_s=5.0)
    worker = begun(bench)
    bench.pass_time(7.0)
    assert worker.given == set()
    worker.send(worker.lease.changed())
    worker.receive()
    assert worker.given == set(worker.requests) != set()
    assert worker.lease.registered


def test_a_change_before_the_lease_is_granted_follows_it() -> None:
    bench = Bench(expiry_s=5.0)
    worker = begun(bench)
    bench.pass_time(7.0)
    worker.sent.clear()
    worker.send(worker.lease.connected(bench.now))
    worker.send(worker.lease.changed())
    assert worker.sent == ["REGISTER"]
    worker.receive()
    assert worker.sent == ["REGISTER", "REGISTER"], "the update follows REGISTERED"
    assert worker.given == set(worker.requests) != set()
    assert len(bench.broker.state.workers) == 1


def test_the_answer_to_an_earlier_register_grants_no_lease() -> None:
    """The worker has sent a second REGISTER, because the broker asked for it with REREGISTER. The
    answer to the first arrives. If the worker took this answer as its lease, it would post entries.
    The broker, which has already begun the second lease, would accept them before it has the
    JOURNALs of their streams."""
    bench = Bench(expiry_s=5.0)
    worker = begun(bench)
    bench.pass_time(7.0)
    bench.sent.clear()
    lease = worker.lease
    worker.send(lease.connected(bench.now))
    consumed, answers = lease.on_frames([b"REREGISTER", b"", b""], bench.now)
    assert consumed
    worker.send(answers)
    given = [list(m.frames) for m in bench.sent if m.frames[0] == b"REGISTERED"]
    first, second = [[bytes(frame) for frame in frames] for frames in given]
    assert lease.on_frames(first, bench.now) == (True, [])
    assert not lease.registered
    assert lease.on_frames(second, bench.now) == (False, [])
    assert lease.registered
    [worker_id] = bench.broker.state.workers
    assert lease.worker == worker_id


def test_an_answer_of_an_older_broker_has_no_number() -> None:
    lease = Worker(Bench()).lease
    lease.connected(0.0)
    answer = encode_body(Registered(worker=7, heartbeat_s=1.0, expiry_s=5.0), "msgpack")
    assert lease.on_frames([b"REGISTERED", b"", answer], 0.0) == (False, [])
    assert lease.registered
