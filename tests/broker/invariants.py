"""Checks the invariants of the broker's tables, which hold after each event."""

from __future__ import annotations

from collections import Counter

from tokenbus.broker.core import Broker
from tokenbus.broker.session import Session
from tokenbus.broker.stream_log import MAX_ENDS


def check(broker: Broker) -> None:
    """Raises AssertionError if the broker's tables disagree, or if an exception was raised in the
    broker."""
    assert broker.state.counters.internal_errors == 0, "an exception was raised in the broker"
    _check_sessions(broker)
    _check_requests(broker)
    _check_workers(broker)


def check_empty(broker: Broker) -> None:
    """Raises AssertionError if a table still has a request, a reservation or a journal entry after
    all requests have ended."""
    state = broker.state
    assert not state.requests
    assert not state.queues
    assert state.num_queued == 0
    for worker in state.workers.values():
        assert not worker.requests
        assert not worker.steers
    assert not state.waiting
    for session in broker.state.sessions:
        assert not session.streams
        assert not session.log.ends
        assert session.log.oldest is None
        assert session.log.size == 0
    recent = broker.state.recent
    assert (recent.size, recent.total, recent.logs) == (0, 0, {})


def _check_sessions(broker: Broker) -> None:
    table = broker.state.sessions
    _check_journals(broker)
    for session in table:
        assert table.by_id[session.id] is session
        # A session that was restored from a worker's report has no token until its client connects.
        assert not session.token or table.of(session.token, session.key) is session
        if session.peer is not None:
            assert table.by_peer[session.peer] is session
        assert session.buffer_bytes == sum(map(len, session.buffers.values()))
        for stream_id, request in session.streams.items():
            assert request.stream_id == stream_id
            assert request.open
            assert broker.state.requests[request.id] is request
            assert stream_id not in session.log.ends, "a stream with an end is live"
        _check_ends(session)
    for peer, session in table.by_peer.items():
        assert session.peer == peer
        assert table.by_id[session.id] is session


def _check_ends(session: Session) -> None:
    log = session.log
    assert len(log.ends) <= MAX_ENDS
    times = [end.since for end in log.ends.values()]
    assert times == sorted(times)
    for stream_id, end in log.ends.items():
        assert end.stream_id == stream_id
        assert end.position <= log.position
        assert not (end.position and stream_id in log.lost)
        assert end.position or session.peer is None or session.greeted or stream_id in log.lost
    assert log.lost.keys() <= log.ends.keys()
    sent = {end.position: end for end in log.ends.values() if end.position}
    assert log._sent == dict(sorted(sent.items()))


def _check_journals(broker: Broker) -> None:
    recent, settings = broker.state.recent, broker.settings
    sizes = [session.log.size for session in broker.state.sessions]
    assert recent.total >= sum(sizes)
    assert max(sizes, default=0) + recent.size <= settings.max_journal_bytes
    assert recent.total + recent.size <= settings.max_total_journal_bytes


def _check_requests(broker: Broker) -> None:
    state = broker.state
    queued = {id(r): r for queue in state.queues.values() for r in queue}
    moving = {id(r): r for r in state.waiting}
    assert not queued.keys() & moving.keys(), "a request is queued, and waits to move"
    queued |= moving
    assert len(queued) == state.num_queued, "a request waits twice"
    assert all(state.queues.values()), "an empty queue is kept"
    for request in queued.values():
        assert state.requests[request.id] is request
    for number, request in state.requests.items():
        assert request.id == number
        in_session = request.session.streams.get(request.stream_id) is request
        assert in_session == request.open
        if request.worker is None:
            assert id(request) in queued, "a request has no worker and no queue"
            assert request.open
        else:
            assert id(request) not in queued, "a request has a worker and a queue"
            assert state.workers[request.worker.id] is request.worker
            assert request.worker.requests[number] is request
        if request.steered_by is not None:
            assert request.steered_by.steers[number] is request
            assert state.workers[request.steered_by.id] is request.steered_by


def _check_workers(broker: Broker) -> None:
    state = broker.state
    names = [worker.name for worker in state.workers.values()]
    assert len(set(names)) == len(names), "a worker is registered twice"
    for worker in state.workers.values():
        for number, request in worker.requests.items():
            assert state.requests[number] is request
            assert request.worker is worker
        in_flight = {**worker.in_flight._sent, **worker.in_flight._asked}
        assert in_flight.keys() <= worker.requests.keys()
        assert worker.in_flight.bytes == sum(in_flight.values())
        for number, request in worker.steers.items():
            assert state.requests[number] is request
            assert request.steered_by is worker
    steered = [r for worker in state.workers.values() for r in worker.steers.values()]
    placed: Counter[tuple[str, str | None]] = Counter((r.steered.owner, None) for r in steered)
    placed.update((r.steered.owner, r.fields.by) for r in steered if r.fields.by)
    assert broker.dispatcher._controllers._placed == placed
