"""A client's session without sockets: the messages that it sends, and the events of its calls."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tokenbus.clients.calls import Call, Ended
from tokenbus.clients.request_options import buffer_call, generate_call, status_call
from tokenbus.protocol.messages import Token

from ..worlds.client_session import PATIENCE, Bench, error_of, ids


def generate(**options: Any) -> Call:
    return generate_call([1, 2], options)  # type: ignore[arg-type]


def test_a_token_message_with_several_bodies_is_that_many_messages() -> None:
    bench = Bench()
    bench.welcome()
    call = bench.submit(generate(max_tokens=3))
    entries = [
        [Token(token=t, stream_id=call.number, logprob=0.0, finish_reason=None, pos=i)]
        for i, t in enumerate((7, 8, 9))
    ]
    bench.session.on_frames([b"TOKEN", *map(msgspec.msgpack.encode, entries)], bench.now)
    assert ids(bench.events(call)) == [7, 8, 9]


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.welcome()
    bench.sent()
    return bench


def test_requests_wait_for_the_welcome() -> None:
    bench = Bench()
    call = bench.submit(generate())
    assert [w for w, _ in bench.sent()] == ["HELLO"]
    bench.welcome()
    assert [w for w, _ in bench.sent()] == ["GENERATE"]
    bench.tokens(call, 5, 6, last=True)
    events = bench.events(call)
    assert ids(events) == [5, 6]
    assert error_of(events) is None


def test_it_pings_and_notices_a_silent_broker(bench: Bench) -> None:
    bench.pass_time(2.1)
    assert [w for w, _ in bench.sent()] == ["PING"]
    assert not bench.session.lost(bench.now)
    bench.pass_time(5.0)
    assert bench.session.lost(bench.now)


def test_a_ping_acknowledges_the_position_of_the_last_pong_on_its_connection(bench: Bench) -> None:
    bench.receive("PONG", {"position": 3})
    bench.pass_time(2.1)
    assert bench.sent() == [("PING", {"ack": 3})]
    bench.session.connected(bench.now)
    bench.receive("PONG", {"position": 4})
    bench.welcome(resumed=True)
    bench.sent()
    bench.pass_time(2.1)
    assert bench.sent() == [("PING", {})], "the broker counts each connection separately"


def test_a_taken_up_session_attaches_its_streams_and_drops_what_comes_before(
    bench: Bench,
) -> None:
    call = bench.submit(generate())
    bench.tokens(call, 5, 6)
    bench.sent()
    bench.session.connected(bench.now)
    [(_, hello)] = bench.sent()
    assert hello["session"] == "tok"
    bench.welcome(resumed=True, streams=[call.number])
    assert bench.sent() == [("ATTACH", {"stream_id": call.number, "received": 2})]
    stray = Token(token=9, stream_id=call.number, logprob=0.0, finish_reason=None, pos=4)
    bench.receive("TOKEN", [stray])
    bench.receive("MSG", {"stream_id": call.number, "attached": 2})
    bench.tokens(call, 7, 8, last=True)
    assert ids(bench.events(call)) == [5, 6, 7, 8]


def test_another_copy_of_a_stream_may_have_its_sequences_in_another_order(bench: Bench) -> None:
    call = bench.submit(generate(n=2))
    bench.tokens(call, 5, 6)
    bench.tokens(call, 15, seq=1)
    bench.session.connected(bench.now)
    bench.welcome(resumed=True, streams=[call.number])
    bench.receive("MSG", {"stream_id": call.number, "attached": 0})
    for seq, first in ((1, 15), (0, 5)):
        call.counted.pop(seq, None)
        bench.tokens(call, first, first + 1, first + 2, seq=seq)
    seqs: dict[int, list[int | None]] = {0: [], 1: []}
    for event in bench.events(call):
        if isinstance(event, Token):
            seqs[event.seq].append(event.token)
    assert seqs == {0: [5, 6, 7], 1: [15, 16, 17]}
    bench.session.connected(bench.now)
    bench.sent()
    bench.welcome(resumed=True, streams=[call.number])
    assert bench.sent() == [("ATTACH", {"stream_id": call.number, "received": 6})]


def test_a_stream_that_ends_before_the_answer_to_its_attach_goes_on_with_that(bench: Bench) -> None:
    call = bench.submit(generate(retry_s=30.0))
    bench.tokens(call, 5, 6)
    bench.session.connected(bench.now)
    bench.welcome(resumed=True, streams=[call.number])
    bench.sent()
    end = Token(token=8, stream_id=call.number, logprob=0.0, finish_reason="length", pos=3)
    bench.receive("TOKEN", [end])
    bench.receive("MSG", {"stream_id": call.number, "attached": 2})
    bench.tokens(call, 7, 8, last=True)
    events = bench.events(call)
    assert ids(events) == [5, 6, 7, 8]
    assert error_of(events) is None
    assert bench.sent() == []


def test_a_broker_that_was_restarted_is_asked_for_streams_that_have_begun(bench: Bench) -> None:
    begun, fresh = bench.submit(generate(retry_s=30.0)), bench.submit(generate(retry_s=30.0))
    once, info = bench.submit(generate(retry_s=0)), bench.submit(status_call(30.0))
    steered = bench.submit(generate(retry_s=0, controller="choice", controller_arg=["a"]))
    bench.tokens(begun, 5, 6)
    numbers = [call.number for call in (begun, fresh, once, info, steered)]
    bench.session.connected(bench.now)
    bench.sent()
    bench.welcome(recovering=True)
    assert bench.sent() == [
        ("ATTACH", {"stream_id": numbers[0], "received": 2}),
        ("CANCEL", {"stream_id": numbers[1]}),
        ("ATTACH", {"stream_id": numbers[2], "received": 0}),
        ("CANCEL", {"stream_id": numbers[3]}),
        ("ATTACH", {"stream_id": numbers[4], "received": 0}),
    ]
    bench.pass_time(2.0)
    assert [word for word, _ in bench.sent() if word != "PING"] == ["GENERATE"]
    unknown = {"code": "unknown_stream", "message": "no such stream"}
    for call in (begun, once, steered):
        bench.receive("ERROR", unknown | {"stream_id": call.number})
    bench.pass_time(2.0)
    sent = [body for word, body in bench.sent() if word == "GENERATE"]
    assert [body["stream_id"] for body in sent] == [once.number, steered.number, begun.number]
    bench.tokens(begun, 5, 6, 7, last=True)
    assert ids(bench.events(begun)) == [5, 6, 7]
    bench.tokens(once, 5, 6, last=True)
    assert ids(bench.events(once)) == [5, 6]


def test_a_fork_that_ends_before_the_attach_arrives_does_not_end_the_stream(bench: Bench) -> None:
    call = bench.submit(generate(n=2))
    bench.session.connected(bench.now)
    bench.welcome(resumed=True, streams=[call.number])
    bench.sent()
    end = Token(token=8, stream_id=call.number, logprob=0.0, finish_reason="length", live=1)
    bench.receive("TOKEN", [end])
    bench.receive("MSG", {"stream_id": call.number, "attached": 0})
    bench.receive("TOKEN", [end])
    bench.tokens(call, 5, last=True, seq=1)
    events = bench.events(call)
    assert ids(events) == [8, 5]
    assert error_of(events) is None


def test_streams_of_a_lost_session_are_sent_again_and_tell_nothing_twice(bench: Bench) -> None:
    call = bench.submit(generate(temperature=1.0, n=2, retry_s=30.0))
    [(_, first)] = bench.sent()
    assert first["seed"] is not None, "a repeated request must get the same tokens"
    bench.tokens(call, 5, 6)
    bench.tokens(call, 50, seq=1)
    bench.receive("PONG", {"session": False})
    assert [w for w, _ in bench.sent()] == ["HELLO"]
    bench.welcome(session="other")
    bench.pass_time(1.0)
    again = [body for word, body in bench.sent() if word == "GENERATE"]
    assert [b | {"stream_id": 0} for b in again] == [first | {"stream_id": 0}]
    assert again[0]["stream_id"] != first["stream_id"]
    bench.tokens(call, 5, 6, 7)
    bench.tokens(call, 50, 51, seq=1)
    assert ids(bench.events(call)) == [5, 6, 50, 7, 51]


def test_live_counts_the_sequences_whose_end_the_reader_has_not_seen(bench: Bench) -> None:
    """In the second attempt, the sequences end in another order than in the first attempt."""
    call = bench.submit(generate(temperature=1.0, n=3, retry_s=30.0))

    def end(seq: int, live: int) -> None:
        entry = Token(
            token=seq, stream_id=call.number, logprob=0.0, finish_reason="stop", seq=seq, live=live
        )
        bench.receive("TOKEN", [entry])

    end(0, 2)
    lost = {"code": "worker_lost", "message": "gone", "stream_id": call.number}
    bench.receive("ERROR", lost)
    bench.pass_time(1.0)
    for seq, live in ((2, 2), (1, 1), (0, 0)):
        end(seq, live)
    shown = [(e.seq, e.live) for e in bench.events(call) if isinstance(e, Token)]
    assert shown == [(0, 2), (2, 1), (1, 0)]


def test_entries_of_an_earlier_try_are_not_taken_for_the_new_one(bench: Bench) -> None:
    call = bench.submit(generate(retry_s=30.0))
    old = call.number
    bench.receive("ERROR", {"code": "worker_lost", "message": "gone", "stream_id": old})
    bench.pass_time(1.0)
    stray = Token(token=9, stream_id=old, logprob=0.0, finish_reason=None)
    bench.receive("TOKEN", [stray])
    bench.tokens(call, 5, last=True)
    assert ids(bench.events(call)) == [5]


def test_a_refused_request_is_tried_again_when_the_error_says_so(bench: Bench) -> None:
    call = bench.submit(generate(retry_s=30.0))
    bench.sent()
    body = {"code": "queue_full", "message": "full", "stream_id": call.number, "retry_after_s": 3}
    bench.receive("ERROR", body)
    bench.pass_time(2.8)
    assert "GENERATE" not in [w for w, _ in bench.sent()]
    bench.pass_time(0.4)
    assert "GENERATE" in [w for w, _ in bench.sent()]


def test_trying_again_ends_when_its_time_is_over(bench: Bench) -> None:
    call = bench.submit(generate(retry_s=2.0))
    for _ in range(40):
        number = call.number
        if call.ended:
            break
        body = {"code": "no_worker", "message": "none", "stream_id": number}
        bench.receive("ERROR", body)
        bench.pass_time(0.5)
    error = error_of(bench.events(call))
    assert error is not None
    assert error.code == "no_worker"
    assert 2.0 <= bench.now < 6.0


def test_a_wrong_request_is_not_tried_again(bench: Bench) -> None:
    call = bench.submit(generate(retry_s=30.0))
    bench.receive(
        "ERROR",
        {
            "code": "invalid_field",
            "message": "no",
            "stream_id": call.number,
            "path": "$.n",
        },
    )
    error = error_of(bench.events(call))
    assert error is not None
    assert (error.code, error.path) == ("invalid_field", "$.n")


def test_a_stalled_stream_is_cancelled_and_tried_again(bench: Bench) -> None:
    call = bench.submit(generate(stall_s=3.0, retry_s=30.0))
    bench.sent()
    bench.tokens(call, 5)
    old = call.number
    bench.pass_time(2.5)
    assert call.number == old
    bench.pass_time(2.0)
    words = [w for w, _ in bench.sent() if w != "PING"]
    assert words == ["CANCEL", "GENERATE"]
    bench.tokens(call, 5, 6, last=True)
    assert ids(bench.events(call)) == [5, 6]


def test_a_call_whose_time_is_over_ends_even_if_the_broker_says_nothing(bench: Bench) -> None:
    call = bench.submit(generate(timeout_s=1.0))
    bench.pass_time(2.5)
    error = error_of(bench.events(call))
    assert error is not None
    assert error.code == "timeout"
    assert ("CANCEL", {"stream_id": call.number, "reason": "timeout"}) in bench.sent()


def test_a_call_whose_time_is_over_ends_where_its_broker_is_away(bench: Bench) -> None:
    running = bench.submit(generate(timeout_s=5.0))
    bench.tokens(running, 7)
    bench.pass_time(1.0)
    bench.session.connected(bench.now)
    waits = bench.submit(generate(timeout_s=3.0))
    bench.pass_time(2.5)
    assert not bench.session.lost(bench.now)
    assert ids(bench.events(running)) == [7]
    assert bench.events(waits) == []
    bench.pass_time(1.0)
    error = error_of(bench.events(waits))
    assert error is not None
    assert error.code == "connection_lost"
    assert bench.events(running) == []
    bench.pass_time(2.0)
    error = error_of(bench.events(running))
    assert error is not None
    assert error.code == "timeout"


def test_without_a_broker_a_call_ends_when_patience_does() -> None:
    bench = Bench()
    call = bench.submit(status_call(100.0))
    bench.pass_time(PATIENCE - 1)
    assert bench.events(call) == []
    bench.pass_time(2)
    error = error_of(bench.events(call))
    assert error is not None
    assert error.code == "connection_lost"
    assert "tcp://front" in error.message


def test_without_a_socket_a_call_ends_when_patience_does(bench: Bench) -> None:
    """The call has no timeout of its own, and the failure to open a connection may last forever."""
    call = bench.submit(generate())
    bench.session.disconnected(bench.now)
    bench.pass_time(PATIENCE - 1)
    bench.session.disconnected(bench.now)
    assert bench.events(call) == []
    bench.pass_time(2)
    error = error_of(bench.events(call))
    assert error is not None
    assert error.code == "connection_lost"


def test_a_call_submitted_without_a_socket_is_sent_at_the_next_welcome(bench: Bench) -> None:
    bench.session.disconnected(bench.now)
    call = bench.submit(generate())
    assert bench.sent() == []
    bench.session.connected(bench.now)
    bench.welcome(session="new")
    assert [word for word, _ in bench.sent()] == ["HELLO", "GENERATE"]
    bench.tokens(call, 5, last=True)
    events = bench.events(call)
    assert ids(events) == [5]
    assert error_of(events) is None


def test_a_cancelled_call_is_forgotten(bench: Bench) -> None:
    call = bench.submit(generate())
    bench.sent()
    bench.session.cancel(call)
    assert [w for w, _ in bench.sent()] == ["CANCEL"]
    bench.tokens(call, 5)
    assert bench.events(call) == []
    bench.session.cancel(call)
    assert bench.sent() == []


def test_a_cancel_that_was_lost_is_sent_again_when_the_session_is_taken_up(bench: Bench) -> None:
    ended, kept = bench.submit(generate()), bench.submit(generate())
    bench.session.cancel(ended)
    bench.session.connected(bench.now)
    bench.sent()
    bench.welcome(resumed=True, streams=[ended.number, kept.number])
    assert bench.sent() == [
        ("ATTACH", {"stream_id": kept.number, "received": 0}),
        ("CANCEL", {"stream_id": ended.number}),
    ]


def test_a_buffer_is_there_when_the_ping_behind_it_is_answered(bench: Bench) -> None:
    call = bench.submit(buffer_call("b", "text", 5.0))
    (_, _), (_, ping) = bench.sent()
    bench.receive("PONG", {"n": ping["n"]})
    assert error_of(bench.events(call)) is None
    refused = bench.submit(buffer_call("b", "text", 5.0))
    bench.receive("ERROR", {"code": "too_large", "message": "too large", "type": "BUFFER"})
    error = error_of(bench.events(refused))
    assert error is not None
    assert error.code == "too_large"


def test_a_new_session_gets_the_buffers_again(bench: Bench) -> None:
    call = bench.submit(buffer_call("b", [1, 2], 5.0))
    (_, _), (_, ping) = bench.sent()
    bench.receive("PONG", {"n": ping["n"]})
    bench.events(call)
    bench.receive("PONG", {"session": False})
    bench.sent()
    bench.welcome(session="new")
    assert [w for w, _ in bench.sent()] == ["BUFFER"]


def test_a_buffer_that_was_dropped_is_not_sent_to_a_new_session(bench: Bench) -> None:
    for content in ("text", None):
        bench.submit(buffer_call("b", content, 5.0))
        (_, _), (_, ping) = bench.sent()
        bench.receive("PONG", {"n": ping["n"]})
    bench.receive("PONG", {"session": False})
    bench.sent()
    bench.welcome(session="new")
    assert bench.sent() == []


def test_an_unknown_message_is_dropped(bench: Bench) -> None:
    bench.receive("FLY", {})
    bench.session.on_frames([b"TOKEN"], bench.now)
    call = bench.submit(generate())
    bench.tokens(call, 1, last=True)
    assert ids(bench.events(call)) == [1]


def test_a_call_without_a_broker_logs_the_remedy_once_and_then_fails_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    remedies = {
        "tcp://127.0.0.1:5555": "start a system with: tokenbus up",
        "tcp://front": "is that the address of a running system? "
        "Start one with: tokenbus up --front tcp://front",
    }
    for front, remedy in remedies.items():
        caplog.clear()
        bench = Bench(front)
        calls = [bench.submit(status_call(60.0)) for _ in range(2)]
        bench.pass_time(2.9)
        assert not caplog.messages
        bench.pass_time(PATIENCE)
        what = f"no broker answers at {front}; {remedy}"
        assert caplog.messages == [f"{what} (waiting for 10 s)"]
        for call in calls:
            [ended] = bench.events(call)
            assert isinstance(ended, Ended)
            assert ended.error is not None
            assert ended.error.message == what


def test_a_broker_that_answers_again_and_is_lost_again_is_logged_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    for times in (1, 2):
        call = bench.submit(generate_call("x", {"timeout_s": 60}))
        bench.pass_time(4.0)
        assert len(caplog.messages) == times
        bench.welcome()
        assert bench.sent()
        bench.tokens(call, 1, last=True)
        bench.session.disconnected(bench.now)
