"""A GPU worker that is registered with two brokers sends each message to the right broker."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import msgpack
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.header import decode_header, decode_manifest
from tokenbus.protocol.messages import Attach, Cancel, Token
from tokenbus.protocol.transcript import transcript_of
from tokenbus.protocol.worker_messages import (
    Claim,
    Claimed,
    Journal,
    Refused,
    Registered,
    Released,
    Result,
    Start,
    StepResult,
)
from tokenbus.workers.bus import LEASE_ENDED
from tokenbus.workers.gpu import worker as module
from tokenbus.workers.gpu.model.loader import LoadedModel
from tokenbus.workers.gpu.serving import attaching, kept_streams

from ...worlds.gpu_worker_loop import CONTROLLER, Loop


@pytest.fixture
def loop(embedded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loop:
    monkeypatch.setattr(module, "IDLE_S", 0.0)
    return Loop(tmp_path, embedded, brokers=2, capacity=2)


def streams(loop: Loop, link: int) -> list[int]:
    """The stream id of each entry that was sent over a link, in order."""
    bodies = [body for frames in loop.sent(b"TOKEN", link) for body in frames[2:]]
    return [entry["stream_id"] for body in bodies for entry in msgspec.json.decode(body)]


def clear(loop: Loop) -> None:
    for link in loop.worker._bus._links:
        link._outbox.clear()


def claim(loop: Loop, request: int, link: int) -> None:
    """A broker claims the session of a request's client."""
    loop.give(b"CLAIM", Claim(session=100 + request), link=link)


def moved(moves: int, entries: int) -> bytes:
    """The transcript of a stream that has moved, with this number of entries."""
    sent = [
        Token(token=9, stream_id=1, logprob=-1.0, finish_reason=None, pos=pos)
        for pos in range(entries)
    ]
    return transcript_of(encode_body(sent, "msgpack"), "left", "it was lost", 0.1, moves)


def decide(
    loop: Loop, request: int, action: Any, worker: int, *, link: int, attempt: int = 0
) -> None:
    """Delivers the decision of a controller worker. ``attempt``: the attempt that the RESULT names;
    0: none."""
    attempts = {request: attempt} if attempt else {}
    result = Result(sequences=[StepResult(request, 0, action)], host="elsewhere", attempts=attempts)
    loop.give(b"RESULT", result, 0, worker, link=link)


def bodies(loop: Loop, kind: bytes, body: Any, link: int) -> list[Any]:
    return [msgpack.decode(frames[2], type=body) for frames in loop.sent(kind, link)]


def test_the_tokens_of_a_step_go_to_the_broker_of_each_stream(loop: Loop) -> None:
    loop.generate(1, link=0)
    loop.generate(2, link=1)
    for _ in range(4):
        loop.turn()
    assert set(streams(loop, 0)) == {1}
    assert set(streams(loop, 1)) == {2}
    assert len(streams(loop, 0)) == len(streams(loop, 1)) >= 3


def test_a_stream_goes_on_behind_the_broker_that_claims_its_session(loop: Loop) -> None:
    loop.generate(1)
    for _ in range(3):
        loop.turn()
    sent = len(streams(loop, 0))
    claim(loop, 1, link=1)
    loop.worker._receive()
    assert bodies(loop, b"RELEASED", Released, 0) == [Released(requests=[1])]
    [journal] = loop.sent(b"JOURNAL", 1)
    assert decode_header(journal[1])[:2] == (1, 101)
    reported = msgpack.decode(journal[2], type=Journal)
    assert (reported.type, reported.moves) == ("GENERATE", 2)
    assert b'"prompt"' in journal[4]
    kinds = [frames[0] for frames in loop.worker._bus._links[1]._outbox]
    assert kinds[-2:] == [b"JOURNAL", b"CLAIMED"]
    assert bodies(loop, b"CLAIMED", Claimed, 1) == [Claimed(session=101)]
    for _ in range(3):
        loop.turn()
    assert len(streams(loop, 0)) == sent
    assert len(streams(loop, 1)) >= 2


def test_a_controller_starts_again_behind_the_broker_that_claims_its_session(loop: Loop) -> None:
    loop.generate(1, controller="c")
    loop.turn()
    assert len(loop.sent(b"START", 0)) == 1
    claim(loop, 1, link=1)
    loop.turn()
    assert len(loop.sent(b"START", 1)) == 1
    # A decision of the earlier controller worker is ignored.
    loop.decide(1, "stop")
    loop.turn()
    assert loop.worker._streams.get(1) is not None
    decide(loop, 1, "stop", CONTROLLER + 1, link=1, attempt=1)
    for _ in range(3):
        loop.turn()
    assert loop.worker._streams.get(1) is None
    assert streams(loop, 1) == [1]


def test_what_was_decided_before_a_controller_starts_again_is_void(loop: Loop) -> None:
    """The client has left its broker and come back. The same controller worker may get the new
    START, and may have answered STEPs after the END of the first attempt."""
    loop.generate(1, controller="c")
    loop.turn()
    loop.decide(1, "sample")
    for _ in range(2):
        loop.turn()
    sent = len(streams(loop, 0))
    for attempt in (1, 2):
        claim(loop, 1, link=0)
        # When the first of these decisions arrives, the second attempt has begun.
        decide(loop, 1, "error", CONTROLLER, link=0, attempt=attempt - 1)
        for _ in range(3):
            loop.turn()
        [*_, start] = loop.sent(b"START", 0)
        assert msgpack.decode(start[2], type=Start).attempt == attempt
    assert len(streams(loop, 0)) == sent
    assert loop.worker._streams.get(1) is not None
    decide(loop, 1, "sample", CONTROLLER, link=0, attempt=2)
    for _ in range(2):
        loop.turn()
    assert len(streams(loop, 0)) == sent + 1
    # After the first decision of an attempt, decisions need not name the attempt.
    loop.decide(1, "stop")
    for _ in range(3):
        loop.turn()
    assert loop.worker._streams.get(1) is None


def test_a_stream_that_has_ended_is_claimed_too(loop: Loop) -> None:
    loop.generate(1, max_tokens=2)
    while not loop.worker._streams.kept(1):
        loop.turn()
    claim(loop, 1, link=1)
    loop.turn()
    [journal] = loop.sent(b"JOURNAL", 1)
    assert msgpack.decode(journal[2], type=Journal).ended


def long_sessions(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begins streams 1 and 2 of session 101, and stream 3 of session 103. Each has more entries
    than the JOURNALs of a turn may have, and the next turns send no JOURNAL."""
    monkeypatch.setattr(attaching, "MAX_ENTRIES", 8)
    for request in (1, 2, 3):
        loop.generate(request)
    for _ in range(9):
        loop.turn()
    loop.worker._streams.get(2).session = 101  # type: ignore[union-attr]
    loop.worker._reports.spend(24)


def reported(loop: Loop) -> list[tuple[bytes, int]]:
    """The answers to claims over link 1: JOURNAL with its request, and CLAIMED with its session."""
    return [
        (kind, decode_header(head).request or msgpack.decode(body, type=Claimed).session)
        for kind, head, body, *_ in loop.worker._bus._links[1]._outbox
        if kind in (b"JOURNAL", b"CLAIMED")
    ]


def test_claims_of_long_sessions_leave_each_turn_a_step(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions take turns. A stream stays at its broker until its JOURNAL is sent."""
    long_sessions(loop, monkeypatch)
    for request in (1, 3):
        claim(loop, request, link=1)
    loop.turn()
    assert reported(loop) == []
    numbers = [0]
    while len(reported(loop)) < 5:
        sent = len(streams(loop, 0)) + len(streams(loop, 1))
        loop.turn()
        numbers.append(len(loop.sent(b"JOURNAL", 1)))
        assert len(streams(loop, 0)) + len(streams(loop, 1)) == sent + 3
    assert all(now - before <= 1 for before, now in pairwise(numbers))
    assert reported(loop) == [
        (b"JOURNAL", 1),
        (b"JOURNAL", 3),
        (b"JOURNAL", 2),
        (b"CLAIMED", 103),
        (b"CLAIMED", 101),
    ]
    for frames in loop.sent(b"JOURNAL", 1):
        request = decode_header(frames[1]).request
        assert msgpack.decode(frames[2], type=Journal).entries == streams(loop, 0).count(request)
    released = bodies(loop, b"RELEASED", Released, 0)
    assert [number for each in released for number in each.requests] == [1, 3, 2]


def test_the_claim_of_no_session_is_answered_at_once(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_sessions(loop, monkeypatch)
    claim(loop, 1, link=1)
    loop.give(b"CLAIM", Claim(session=0), link=1)
    loop.worker._receive()
    assert reported(loop) == [(b"CLAIMED", 0)]


def test_a_stream_that_ends_while_its_claim_waits_is_reported(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream has too many entries to be kept after its end. The worker still reports it."""
    monkeypatch.setattr(kept_streams, "MAX_TOKENS", 5)
    monkeypatch.setattr(attaching, "MAX_ENTRIES", 8)
    loop.generate(1, max_tokens=10)
    for _ in range(9):
        loop.turn()
    loop.worker._reports.spend(64)
    claim(loop, 1, link=1)
    while loop.worker._streams.get(1):
        loop.turn()
    assert loop.worker._streams.kept(1) is None
    assert reported(loop) == []
    while not loop.sent(b"CLAIMED", 1):
        loop.turn()
    [journal] = bodies(loop, b"JOURNAL", Journal, 1)
    assert (journal.ended, journal.entries) == (True, streams(loop, 0).count(1))


def test_a_broker_cannot_end_what_waits_to_go_on_behind_another(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_sessions(loop, monkeypatch)
    claim(loop, 1, link=1)
    loop.give(b"CANCEL", Cancel(stream_id=1), 1, link=0)
    answer = Registered(worker=9, heartbeat_s=1.0, expiry_s=5.0, unknown=[1])
    loop.give(b"REGISTERED", answer, link=0)
    loop.turn()
    assert loop.worker._streams.get(1) is not None


def test_the_claims_of_a_lease_that_has_ended_are_dropped(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_sessions(loop, monkeypatch)
    claim(loop, 1, link=1)
    claim(loop, 3, link=0)
    loop.give(LEASE_ENDED, b"", link=1)
    while not loop.sent(b"CLAIMED", 0):
        loop.turn()
    loop.turn()
    assert reported(loop) == []
    assert bodies(loop, b"CLAIMED", Claimed, 0) == [Claimed(session=103)]
    # Each stream can be ended by its own broker again.
    assert all(stream.claimed_by is None for stream in loop.worker._streams)


def test_a_broker_cannot_end_what_goes_on_behind_another(loop: Loop) -> None:
    loop.generate(1)
    loop.turn()
    claim(loop, 1, link=1)
    loop.give(b"CANCEL", Cancel(stream_id=1), 1, link=0)
    answer = Registered(worker=9, heartbeat_s=1.0, expiry_s=5.0, unknown=[1])
    loop.give(b"REGISTERED", answer, link=0)
    loop.turn()
    assert loop.worker._streams.get(1) is not None
    loop.give(b"CANCEL", Cancel(stream_id=1), 1, link=1)
    loop.turn()
    assert loop.worker._streams.get(1) is None


def test_a_broker_that_sends_a_stream_which_is_behind_another_is_notified(loop: Loop) -> None:
    loop.generate(1)
    loop.turn()
    claim(loop, 1, link=1)
    loop.turn()
    clear(loop)
    loop.generate(1, link=0)
    loop.turn()
    assert bodies(loop, b"RELEASED", Released, 0) == [Released(requests=[1])]
    assert streams(loop, 0) == []
    assert streams(loop, 1) != []


def test_a_stream_that_has_moved_more_often_replaces_a_stale_copy_of_another_broker(
    loop: Loop,
) -> None:
    """The client is at the broker of link 1. The broker of link 0 was stopped, and has moved its
    copy to this worker before it noticed that the client had left."""
    loop.generate(1, link=0, moved=moved(1, entries=0))
    loop.turn()
    clear(loop)
    loop.generate(1, link=1, moved=moved(3, entries=2))
    loop.turn()
    assert bodies(loop, b"RELEASED", Released, 0) == [Released(requests=[1])]
    assert loop.sent(b"RELEASED", 1) == []
    assert streams(loop, 0) == []
    [frames] = loop.sent(b"TOKEN", 1)
    [entry] = msgspec.json.decode(frames[2])
    assert entry["pos"] == 2


def test_a_stale_copy_does_not_replace_a_stream_that_has_moved_more_often(loop: Loop) -> None:
    loop.generate(1, link=1, moved=moved(3, entries=2))
    loop.turn()
    clear(loop)
    loop.generate(1, link=0, moved=moved(1, entries=0))
    loop.turn()
    assert bodies(loop, b"RELEASED", Released, 0) == [Released(requests=[1])]
    assert loop.sent(b"RELEASED", 1) == streams(loop, 0) == []
    assert streams(loop, 1) == [1]


def test_a_claim_reports_how_many_moves_it_has_added(loop: Loop) -> None:
    loop.generate(1)
    loop.turn()
    for _ in range(2):
        claim(loop, 1, link=1)
        loop.turn()
    reported = bodies(loop, b"JOURNAL", Journal, 1)
    assert [(journal.moves, journal.claimed) for journal in reported] == [(2, 2), (2, 0)]


def test_an_attach_beyond_the_entries_of_a_copy_is_answered_with_their_number(loop: Loop) -> None:
    loop.generate(1)
    for _ in range(3):
        loop.turn()
    sent = len(streams(loop, 0))
    loop.give(b"ATTACH", Attach(stream_id=1, received=sent + 7), 1)
    loop.worker._receive()
    loop.worker._report()
    [answer] = loop.sent(b"MSG", 0)
    assert msgspec.json.decode(answer[2])["attached"] == sent
    loop.turn()
    assert len(streams(loop, 0)) > sent


def test_a_broker_that_sends_its_own_stream_again_gets_it_from_its_beginning(loop: Loop) -> None:
    """The worker is full. The earlier attempt makes room for the later one, and no RELEASED is
    sent."""
    loop.generate(1, link=0)
    loop.generate(2, link=1)
    for _ in range(3):
        loop.turn()
    clear(loop)
    loop.generate(1, link=0)
    loop.turn()
    assert loop.sent(b"RELEASED", 0) == loop.sent(b"REFUSED", 0) == []
    assert streams(loop, 0) == [1]
    [frames] = loop.sent(b"TOKEN", 0)
    [entry] = msgspec.json.decode(frames[2])
    assert entry["prompt_tokens"] == 3, "the first entry of the stream"


def test_a_broker_registers_and_counts_only_what_is_its_own(loop: Loop) -> None:
    loop.generate(1, link=0)
    loop.generate(2, link=1)
    loop.turn()
    bus = loop.worker._bus
    assert [[one.request for one in bus.registration(link).live] for link in (0, 1)] == [[1], [2]]
    beats = [bus.beat(link, 0.0) for link in (0, 1)]
    assert [(beat.requests, beat.elsewhere) for beat in beats] == [(2, 1), (2, 1)]


def test_a_request_is_refused_for_which_those_of_other_brokers_leave_no_room(loop: Loop) -> None:
    loop.generate(1, link=0)
    loop.generate(2, link=0)
    loop.turn()
    loop.generate(3, link=1)
    loop.turn()
    [refused] = loop.sent(b"REFUSED", 1)
    assert decode_header(refused[1]).request == 3
    assert msgpack.decode(refused[2], type=Refused) == Refused(type="GENERATE", elsewhere=2)
    assert msgspec.json.decode(refused[3])["stream_id"] == 3
    assert 3 not in [s.request for s in loop.worker._streams]


def test_what_a_worker_with_one_broker_gets_is_never_refused(
    embedded: LoadedModel, tmp_path: Path
) -> None:
    loop = Loop(tmp_path, embedded, capacity=1)
    for request in (1, 2):
        loop.generate(request)
    loop.turn()
    assert len(loop.worker._streams) == 2
    assert {decode_manifest(frames[1]).sessions for frames in loop.sent(b"TOKEN")} <= {(101, 102)}


def test_a_worker_hands_over_when_all_brokers_with_streams_of_it_have_said_so(loop: Loop) -> None:
    loop.generate(1, link=0)
    loop.generate(2, link=1)
    loop.turn()
    loop.worker.stop("it drains")
    assert not loop.worker._done()
    loop.give(b"HANDOVER", {}, link=0)
    loop.turn()
    assert not loop.worker._done()
    loop.give(b"HANDOVER", {}, link=1)
    loop.turn()
    assert loop.worker._done()
