"""The broker without sockets: frames and times in, frames out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tokenbus.broker.outbox import Outbox, Sent
from tokenbus.broker.outgoing import MAX_JOINED, MAX_JOINED_BYTES, Outgoing, Side
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.header import Flag, encode_header, encode_token_header
from tokenbus.protocol.messages import ModelInfo, Token
from tokenbus.protocol.packing import pack
from tokenbus.protocol.worker_messages import Heartbeat, LiveRequest

from ..worlds.broker import Bench, generate, peer_of


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_request_goes_to_the_least_filled_worker(bench: Bench) -> None:
    bench.worker("a")
    bench.worker("b")
    for stream in (1, 2, 3):
        assert bench.client("c", "GENERATE", generate(stream)) == []
    assert len(bench.to_worker("a")) + len(bench.to_worker("b")) == 3
    bench.client("c", "GENERATE", generate(4))
    counts = [len(bench.broker.state.workers[w].requests) for w in bench.broker.state.workers]
    assert counts == [2, 2]


@pytest.mark.parametrize("model", ["m", ""])
def test_a_worker_that_has_the_model_goes_before_one_that_would_load_it(
    bench: Bench, model: str
) -> None:
    info = ModelInfo(name="m", vocab_size=9, context_length=9, eos_token_ids=[0], fingerprint="")
    bench.worker("loads")
    bench.worker("has", models=[info])
    bench.client("c", "GENERATE", generate(1, model=model))
    assert bench.to_worker("loads") == []
    assert [w for w, _ in bench.to_worker("has")] == ["GENERATE"]


def test_a_request_beyond_the_capacity_is_queued_and_notified_of_its_place(bench: Bench) -> None:
    bench.worker("a", capacity=1)
    bench.client("c", "GENERATE", generate(1))
    [(_, first)] = bench.to_worker("a")
    [(kind, notice)] = bench.client("c", "GENERATE", generate(2))
    assert (kind, notice["event"], notice["place"]) == ("SYSTEM", "queued", 1)
    end = Token(token=1, stream_id=1, logprob=0.0, finish_reason="stop")
    bench.tokens("a", first, end, final=True)
    assert [w for w, _ in bench.to_worker("a")] == ["GENERATE"]


def test_a_higher_priority_leaves_the_queue_first(bench: Bench) -> None:
    bench.worker("a", capacity=1)
    bench.client("c", "GENERATE", generate(1))
    [(_, first)] = bench.to_worker("a")
    bench.client("c", "GENERATE", generate(2))
    bench.client("c", "GENERATE", generate(3, priority=1))
    bench.tokens("a", first, final=True)
    [running] = bench.broker.state.workers.values()
    assert [r.stream_id for r in running.requests.values()] == [3]


def test_a_full_queue_answers_at_once_when_to_try_again() -> None:
    bench = Bench(max_queued=1)
    bench.worker("a", capacity=1)
    bench.client("c", "GENERATE", generate(1))
    bench.client("c", "GENERATE", generate(2))
    [(kind, error)] = bench.client("c", "GENERATE", generate(3))
    assert (kind, error["code"], error["stream_id"]) == ("ERROR", "queue_full", 3)
    assert error["retry_after_s"] > 0


def test_without_a_worker_a_request_is_refused(bench: Bench) -> None:
    [(_, error)] = bench.client("c", "GENERATE", generate(1))
    assert error["code"] == "no_worker"
    bench.worker("a")
    [(_, error)] = bench.client("c", "GENERATE", generate(1, model="other"))
    assert error["code"] == "unknown_model"
    assert "m" in error["message"]


def test_tokens_reach_their_client_as_they_are(bench: Bench) -> None:
    bench.worker("a")
    bench.client("c", "GENERATE", generate(7))
    [(_, header)] = bench.to_worker("a")
    bench.tokens("a", header, Token(token=5, stream_id=7, logprob=-1.0, finish_reason=None))
    [(kind, [entry])] = bench.to_client("c")
    assert (kind, entry["token"], entry["stream_id"]) == ("TOKEN", 5, 7)


def test_a_cancel_goes_to_the_worker_and_ends_a_waiting_request_at_once(bench: Bench) -> None:
    bench.worker("a", capacity=1)
    bench.client("c", "GENERATE", generate(1))
    bench.client("c", "GENERATE", generate(2))
    bench.to_worker("a")
    [(kind, [entry])] = bench.client("c", "CANCEL", {"stream_id": 2, "reason": "timeout"})[-1:]
    assert (kind, entry["finish_reason"]) == ("TOKEN", "timeout")
    assert bench.client("c", "CANCEL", {"stream_id": 1}) == []
    assert [w for w, _ in bench.to_worker("a")] == ["CANCEL"]
    assert bench.client("c", "CANCEL", {"stream_id": 99}) == []


def test_a_deadline_cancels(bench: Bench) -> None:
    bench.worker("a")
    bench.client("c", "GENERATE", generate(1, timeout_s=2.0))
    bench.to_worker("a")
    bench.pass_time(1.5)
    bench.send("a", "HEARTBEAT", Heartbeat())
    assert bench.to_worker("a") == []
    bench.pass_time(1.0)
    assert [w for w, _ in bench.to_worker("a")] == ["CANCEL"]


def test_a_worker_that_is_silent_for_six_seconds_is_lost(bench: Bench) -> None:
    bench.worker("a")
    bench.client("c", "GENERATE", generate(1))
    bench.pass_time(4.5)
    assert len(bench.broker.state.workers) == 1
    bench.pass_time(1.0)
    assert bench.to_client("c") == []
    assert bench.broker.state.workers == {}
    # The worker was only slow. Its next message makes the broker request another registration.
    [again] = bench.send("a", "HEARTBEAT", Heartbeat())
    assert again.frames[0] == b"REREGISTER"


def test_a_heartbeat_keeps_the_lease(bench: Bench) -> None:
    bench.worker("a")
    for _ in range(20):
        bench.pass_time(1.0)
        bench.send("a", "HEARTBEAT", Heartbeat())
    assert len(bench.broker.state.workers) == 1


def test_a_draining_or_hung_worker_gets_nothing_new(bench: Bench) -> None:
    bench.worker("a")
    bench.send("a", "DRAIN", {"reason": "restart"})
    [(kind, notice)] = bench.client("c", "GENERATE", generate(1))
    assert (kind, notice["event"]) == ("SYSTEM", "queued")
    *_, (_, answer) = bench.client("c", "STATUS", {"stream_id": 99})
    assert [worker["state"] for worker in answer["status"]["workers"]] == ["draining"]
    bench.worker("b")
    assert [w for w, _ in bench.to_worker("b")] == ["GENERATE"]
    bench.send("b", "HEARTBEAT", Heartbeat(step_age_s=100.0))
    [(kind, notice)] = bench.client("c", "GENERATE", generate(2))
    assert notice["event"] == "queued"


def test_reported_live_requests_that_have_ended_are_to_be_dropped() -> None:
    bench = Bench(recover_s=5.0)
    bench.pass_time(5.0)
    answer = bench.worker("a", live=[LiveRequest(request=77, session=5, stream_id=1)])
    assert answer.unknown == [77]


def test_a_duplicate_stream_is_refused_and_the_first_goes_on(bench: Bench) -> None:
    bench.worker("a")
    bench.client("c", "GENERATE", generate(1))
    [(_, error)] = bench.client("c", "GENERATE", generate(1))
    assert error["code"] == "duplicate_stream"
    [(_, header)] = bench.to_worker("a")
    bench.tokens("a", header, Token(token=5, stream_id=1, logprob=0.0, finish_reason=None))
    assert bench.to_client("c")[0][0] == "TOKEN"


def test_a_session_is_taken_over_by_its_token_under_the_same_key_only(bench: Bench) -> None:
    bench.worker("a")
    [(_, welcome)] = bench.client("old", "HELLO", {}, key="k")
    bench.client("old", "GENERATE", generate(1), key="k")
    [(_, header)] = bench.to_worker("a")
    token = welcome["session"]
    [(_, thief)] = bench.client("thief", "HELLO", {"session": token}, key="other")
    assert "resumed" not in thief
    assert thief["session"] != token
    [(_, again)] = bench.client("new", "HELLO", {"session": token}, key="k")
    assert again["resumed"]
    assert again["streams"] == [1]
    [(_, taken)] = bench.to_client("old")
    assert taken["code"] == "session_taken"
    bench.tokens("a", header, Token(token=5, stream_id=1, logprob=0.0, finish_reason=None))
    assert bench.to_client("new")[0][0] == "TOKEN"
    assert bench.to_client("old") == []
    bench.client("new", "ATTACH", {"stream_id": 1, "received": 0}, key="k")
    assert [w for w, _ in bench.to_worker("a")] == ["ATTACH"]


def test_a_client_begins_a_session_with_a_token_of_its_own_that_nobody_has(bench: Bench) -> None:
    token = "0123456789abcdef" * 2
    chosen = {"session": token, "begin": True}
    [(_, welcome)] = bench.client("a", "HELLO", chosen, key="k")
    assert (welcome["session"], "resumed" in welcome) == (token, False)
    # A client with the same key takes the session over; a client with another key begins a session
    # of its own.
    [(_, again)] = bench.client("b", "HELLO", chosen, key="k")
    assert (again["session"], again["resumed"]) == (token, True)
    [(_, thief)] = bench.client("c", "HELLO", chosen, key="other")
    assert "resumed" not in thief
    [(_, still)] = bench.client("d", "HELLO", chosen, key="k")
    assert (still["session"], still["resumed"]) == (token, True)
    [(_, odd)] = bench.client("e", "HELLO", {"session": "x", "begin": True}, key="k")
    assert odd["session"] != "x"


def test_a_worker_learns_which_form_of_token_the_client_takes(bench: Bench) -> None:
    bench.worker("a", capacity=9)

    def begin(name: str, stream: int, **hello: Any) -> list[str]:
        """Opens a session, and begins a stream in it; returns the granted capabilities."""
        frames = [b"HELLO", msgspec.json.encode({"capabilities": ["columns"], **hello})]
        out = bench.broker.on_client(peer_of(name), frames, bench.now, "")
        welcome = msgspec.msgpack.decode(out[0].frames[1]) if hello else {}
        bench.client(name, "GENERATE", generate(stream))
        return [c for c in welcome.get("capabilities", []) if c in ("columns", "text_columns")]

    both = Flag.MSGPACK | Flag.COLUMNS
    assert begin("columns", 1, encodings=["msgpack"]) == ["columns"]
    [(_, header)] = bench.to_worker("a")
    assert header.flags & 0xFF == both
    both_forms = ["columns", "text_columns"]
    assert begin("texts", 1, encodings=["msgpack"], capabilities=both_forms) == both_forms
    [(_, header)] = bench.to_worker("a")
    assert header.flags & 0xFF == both | Flag.TEXTS
    # Without the capability ``columns``, ``text_columns`` has no effect.
    assert begin("entries", 1, encodings=["msgpack"], capabilities=["text_columns"]) == []
    [(_, header)] = bench.to_worker("a")
    assert header.flags & 0xFF == Flag.MSGPACK
    # Clients that use JSON never get columns.
    begin("text", 1)
    [(_, header)] = bench.to_worker("a")
    assert header.flags & 0xFF == 0


def test_an_attach_says_which_form_the_new_connection_takes(bench: Bench) -> None:
    bench.worker("a")
    [(_, welcome)] = bench.client("old", "HELLO", {})
    bench.client("old", "GENERATE", generate(1))
    [(_, header)] = bench.to_worker("a")
    assert header.flags & 0xFF == 0
    hello = {"session": welcome["session"], "encodings": ["msgpack"], "capabilities": ["columns"]}
    frames = [b"HELLO", msgspec.json.encode(hello)]
    bench.broker.on_client(peer_of("new"), frames, bench.now, "")
    bench.client("new", "ATTACH", {"stream_id": 1, "received": 0})
    [(word, header)] = bench.to_worker("a")
    assert (word, header.flags) == ("ATTACH", Flag.MSGPACK | Flag.COLUMNS)


def test_bodies_that_arrive_together_go_out_together_to_a_client_that_takes_them_so(
    bench: Bench,
) -> None:
    bench.worker("a", capacity=9)

    def begin(name: str, *capabilities: str) -> int:
        """Opens a session with a stream; returns the session's id."""
        hello = {"encodings": ["msgpack"], "capabilities": capabilities}
        bench.broker.on_client(peer_of(name), [b"HELLO", msgspec.json.encode(hello)], bench.now)
        bench.client(name, "GENERATE", generate(1))
        [(_, header)] = bench.to_worker("a")
        return header.address

    joined, single = begin("joined", "bodies"), begin("single")
    head = encode_token_header([joined, single])
    notice = [b"SYSTEM", encode_header(0, joined), b"notice"]
    large = bytes(MAX_JOINED_BYTES + 1)
    messages = [[b"TOKEN", head, body, body] for body in (b"1", b"2", b"3", large, b"4")]
    messages.insert(2, notice)
    out = bench.broker.on_workers([(peer_of("a"), pack(m)) for m in messages], bench.now)
    to_joined = [list(m.frames) for m in out if m.peer == peer_of("joined")]
    assert to_joined == [
        [b"TOKEN", b"1", b"2"],
        [b"SYSTEM", b"notice"],
        [b"TOKEN", b"3"],
        [b"TOKEN", large, b"4"],
    ]
    to_single = [list(m.frames) for m in out if m.peer == peer_of("single")]
    assert to_single == [[b"TOKEN", body] for body in (b"1", b"2", b"3", large, b"4")]
    # A later pass begins a new message, and no message has more than ``MAX_JOINED`` bodies.
    message = pack([b"TOKEN", encode_token_header([joined]), b"5"])
    out = bench.broker.on_workers([(peer_of("a"), message)] * 40, bench.now)
    assert [len(m.frames) - 1 for m in out] == [MAX_JOINED, 40 - MAX_JOINED]


def test_streams_that_end_within_joined_bodies_which_are_dropped_end_with_errors(
    bench: Bench,
) -> None:
    bench.worker("a")
    hello = {"encodings": ["msgpack"], "capabilities": ["bodies"]}
    bench.broker.on_client(peer_of("c"), [b"HELLO", msgspec.json.encode(hello)], bench.now)
    for stream in (1, 2):
        bench.client("c", "GENERATE", generate(stream))
    headers = [header for _, header in bench.to_worker("a")]
    messages = []
    for stream, header in enumerate(headers, 1):
        end = Token(token=1, stream_id=stream, logprob=0.0, finish_reason="stop")
        head = encode_token_header([header.address], [header.request])
        messages.append((peer_of("a"), pack([b"TOKEN", head, encode_body([end], "msgpack")])))
    [out] = bench.broker.on_workers(messages, bench.now)
    errors = [msgspec.msgpack.decode(m.frames[1]) for m in bench.broker.on_full(out)]
    assert {e["stream_id"]: e["code"] for e in errors} == {1: "slow_client", 2: "slow_client"}


def test_streams_of_a_client_that_goes_are_cancelled(bench: Bench) -> None:
    bench.worker("a")
    bench.client("anonymous", "GENERATE", generate(1))
    bench.client("greeted", "HELLO", {"capabilities": ["ping"]})
    bench.client("greeted", "GENERATE", generate(1))
    bench.to_worker("a")
    bench.sent += bench.broker.on_gone(Side.FRONT, peer_of("anonymous"), bench.now)
    assert [w for w, _ in bench.to_worker("a")] == ["CANCEL"]
    _pass_time(bench, 41)
    assert [w for w, _ in bench.to_worker("a")] == ["CANCEL"]
    assert len(bench.broker.state.sessions) == 0


def _pass_time(bench: Bench, seconds: int) -> None:
    """Lets time pass, with heartbeats of the worker ``a``."""
    for _ in range(seconds):
        bench.pass_time(1.0)
        bench.send("a", "HEARTBEAT", Heartbeat())


def test_a_client_behind_a_link_that_is_cut_has_time_to_come_back(bench: Bench) -> None:
    bench.worker("a")
    [(_, welcome)] = bench.client("c", "HELLO", {"capabilities": ["ping"]})
    bench.client("c", "GENERATE", generate(1))
    bench.to_worker("a")
    _pass_time(bench, 38)
    assert bench.to_worker("a") == []
    [(_, again)] = bench.client("d", "HELLO", {"session": welcome["session"]})
    assert (again["resumed"], again["streams"]) == (True, [1])


def test_a_stream_that_ends_before_its_client_attaches_again_is_delivered(bench: Bench) -> None:
    bench.worker("a")
    [(_, welcome)] = bench.client("c", "HELLO")
    bench.client("c", "GENERATE", generate(1))
    [(_, header)] = bench.to_worker("a")
    bench.client("d", "HELLO", {"session": welcome["session"]})
    # The client discards entries that arrive before the answer to its ATTACH.
    end = Token(token=5, stream_id=1, logprob=-1.0, finish_reason="stop")
    bench.tokens("a", header, end, final=True)
    bench.to_client("d")
    [(_, answer), (_, [missed])] = bench.client("d", "ATTACH", {"stream_id": 1, "received": 0})
    assert (answer["attached"], missed["token"]) == (0, 5)
    [(_, again)] = bench.client("d", "ATTACH", {"stream_id": 1, "received": 0})
    assert again["code"] == "unknown_stream"


def test_a_silent_client_whose_connection_is_closed_has_less(bench: Bench) -> None:
    bench.worker("a")
    bench.client("c", "HELLO", {"capabilities": ["ping"]})
    bench.client("c", "GENERATE", generate(1))
    bench.to_client("c")
    bench.to_worker("a")
    _pass_time(bench, 6)
    # The broker sends PONG, and then finds that the connection is closed.
    assert bench.to_client("c") == [("PONG", {})]
    bench.sent += bench.broker.on_gone(Side.FRONT, peer_of("c"), bench.now)
    _pass_time(bench, 6)
    assert [w for w, _ in bench.to_worker("a")] == ["CANCEL"]


def test_ping_says_whether_the_connection_has_a_session(bench: Bench) -> None:
    [(_, pong)] = bench.client("c", "PING", {"n": 3})
    assert pong == {"n": 3, "session": False}
    bench.client("c", "HELLO")
    [(_, pong)] = bench.client("c", "PING")
    assert pong == {}


def test_an_unsupported_version_or_encoding_is_refused(bench: Bench) -> None:
    [(_, error)] = bench.client("c", "HELLO", {"versions": [9]})
    assert (error["code"], error["path"]) == ("unsupported_version", "$.versions")
    [(_, error)] = bench.client("c", "HELLO", {"encodings": ["xml"]})
    assert (error["code"], error["path"]) == ("unsupported", "$.encodings")


def test_buffers_go_along_with_the_request_that_names_them() -> None:
    bench = Bench(max_buffer_bytes=20)
    bench.worker("a")
    bench.client("c", "BUFFER", {"name": "b", "tokens": [1, 2]})
    bench.client("c", "GENERATE", generate(1, buffers=["b"]))
    [message] = [m for m in bench.sent if m.frames[0] == b"GENERATE"]
    assert message.frames[-1] == b"t" + bytes([1, 0, 0, 0, 2, 0, 0, 0])
    [(_, error)] = bench.client("c", "GENERATE", generate(2, buffers=["b", "x"]))
    assert (error["code"], error["path"]) == ("unknown_buffer", "$.buffers[1]")
    [(_, error)] = bench.client("c", "BUFFER", {"name": "big", "tokens": [1] * 9})
    assert error["code"] == "too_large"
    bench.client("c", "BUFFER", {"name": "b"})
    [(_, error)] = bench.client("c", "GENERATE", generate(2, buffers=["b"]))
    assert error["code"] == "unknown_buffer"


def test_a_client_cannot_send_a_workers_messages(bench: Bench) -> None:
    for kind in ("REGISTER", "HEARTBEAT", "TOKEN", "STEP"):
        [(_, error)] = bench.client("c", kind)
        assert error["code"] == "unknown_type"


def test_a_client_that_sets_its_own_routing_id_is_refused(bench: Bench) -> None:
    [out] = bench.broker.on_client(b"me", [b"PING", b"{}"], bench.now)
    assert msgspec.json.decode(out.frames[1])["code"] == "not_allowed"


def test_a_bad_message_of_a_worker_is_dropped_and_counted(bench: Bench) -> None:
    bench.worker("a")
    for frames in ([b"MSG"], [b"SYSTEM", b"x", b""], [b"FLY", encode_header(), b""], []):
        assert bench.broker.on_worker(peer_of("a"), frames, bench.now) == []
    assert bench.broker.state.counters.bad_worker_messages == 4


def test_a_worker_s_final_error_ends_its_request(bench: Bench) -> None:
    bench.worker("a", capacity=1)
    bench.client("c", "GENERATE", generate(1))
    [(_, header)] = bench.to_worker("a")
    body = {"code": "empty_prompt", "message": "the prompt is empty", "stream_id": 1}
    frames = [
        b"ERROR",
        encode_header(header.request, header.address, Flag.FINAL),
        msgspec.json.encode(body),
    ]
    bench.sent += bench.broker.on_worker(peer_of("a"), frames, bench.now)
    assert bench.to_client("c") == [("ERROR", body)]
    assert bench.broker.state.requests == {}


def test_before_it_stops_it_finishes_what_runs_and_takes_nothing_new(bench: Bench) -> None:
    bench.worker("a", capacity=1)
    bench.client("c", "GENERATE", generate(1))
    [(_, header)] = bench.to_worker("a")
    bench.client("c", "GENERATE", generate(2))
    bench.sent += bench.broker.drain()
    assert [e["code"] for w, e in bench.to_client("c") if w == "ERROR"] == ["shutting_down"]
    [(_, error)] = bench.client("c", "GENERATE", generate(3))
    assert error["code"] == "shutting_down"
    assert not bench.broker.drained
    bench.tokens("a", header, final=True)
    assert bench.broker.drained


def test_a_message_typed_by_hand_is_answered_in_json(bench: Bench) -> None:
    [(_, error)] = bench.client("c", "FOO")
    assert error["code"] == "unknown_type"
    [out] = bench.broker.on_client(peer_of("c"), [b"GENERATE", b"not json"], bench.now)
    assert msgspec.json.decode(out.frames[1])["code"] == "bad_message"


def test_stopping_ends_every_stream_with_an_error(bench: Bench) -> None:
    bench.worker("a")
    bench.client("c", "GENERATE", generate(1))
    bench.sent += bench.broker.stop()
    [(_, error)] = bench.to_client("c")
    assert error["code"] == "shutting_down"


class Pipe:
    """A peer's pipe, which a test can make full or close."""

    def __init__(self) -> None:
        self.state = Sent.OK
        self.got: list[bytes] = []

    def send(self, peer: bytes, frames: Any) -> Sent:
        if self.state is Sent.OK:
            self.got += frames
        return self.state


def test_messages_for_a_full_pipe_wait_in_order_up_to_their_bound() -> None:
    pipe = Pipe()
    outbox = Outbox(pipe.send, max_pending_bytes=10, max_must_bytes=14)

    def post(frame: bytes, must: bool = False) -> Sent:
        return outbox.post(Outgoing(Side.FRONT, b"p", [frame], must))

    assert post(b"1111") is Sent.OK
    pipe.state = Sent.FULL
    assert post(b"2222") is Sent.OK
    assert post(b"3333") is Sent.OK
    assert post(b"4444") is Sent.FULL
    assert post(b"5555", must=True) is Sent.OK
    # A large answer is queued as long as the queue is below its bound.
    assert post(b"a large answer", must=True) is Sent.OK
    assert post(b"6666", must=True) is Sent.FULL
    assert outbox.flush() == []
    pipe.state = Sent.OK
    assert outbox.flush() == []
    assert pipe.got == [b"1111", b"2222", b"3333", b"5555", b"a large answer"]
    assert not outbox.waiting
    pipe.state = Sent.GONE
    assert post(b"7") is Sent.GONE


def test_a_carried_connection_that_ends_takes_an_anonymous_session_with_it(bench: Bench) -> None:
    bench.worker("a")
    bench.client("c", "GENERATE", generate(1))
    bench.to_worker("a")
    bench.client("c", "BYE", {"keep": True})
    assert [w for w, _ in bench.to_worker("a")] == ["CANCEL"]
    assert len(bench.broker.state.sessions) == 0


@pytest.mark.parametrize(("keep_s", "waits_s"), [(600.0, 600.0), (9e9, 900.0), (1.0, 5.0)])
def test_a_session_waits_as_long_as_its_client_has_asked_for(keep_s: float, waits_s: float) -> None:
    """The operator bounds this time, and a client cannot shorten the usual time."""
    bench = Bench(session_grace_s=5.0, expiry_s=9999.0, max_keep_s=900.0)
    bench.worker("a")
    [(_, welcome)] = bench.client("c", "HELLO", {"keep_s": keep_s})
    bench.client("c", "GENERATE", generate(1))
    bench.to_worker("a")
    bench.sent += bench.broker.on_gone(Side.FRONT, peer_of("c"), bench.now)
    bench.pass_time(waits_s - 1.0)
    assert bench.to_worker("a") == []
    said = {"session": welcome["session"], "keep_s": keep_s}
    [(_, again)] = bench.client("d", "HELLO", said)
    assert (again["resumed"], again["streams"]) == (True, [1])
    bench.client("d", "BYE", {"keep": True})
    bench.pass_time(waits_s + 1.0)
    assert [w for w, _ in bench.to_worker("a")] == ["CANCEL"]


def test_a_carried_connection_that_ends_leaves_a_greeted_session_to_be_taken_over() -> None:
    bench = Bench(session_grace_s=5.0, expiry_s=600.0)
    bench.worker("a")
    [(_, welcome)] = bench.client("c", "HELLO")
    bench.client("c", "GENERATE", generate(1))
    bench.to_worker("a")
    bench.client("c", "BYE", {"keep": True})
    bench.pass_time(4.0)
    assert bench.to_worker("a") == []
    [(_, again)] = bench.client("d", "HELLO", {"session": welcome["session"]})
    assert (again["resumed"], again["streams"]) == (True, [1])
    bench.client("d", "BYE", {"keep": True})
    bench.pass_time(6.0)
    assert [w for w, _ in bench.to_worker("a")] == ["CANCEL"]
    assert len(bench.broker.state.sessions) == 0
