"""Streams that move: another worker continues a lost worker's stream without a gap or a repeated
token."""

from __future__ import annotations

from typing import Any

import pytest
from tokenbus.broker.attaches import MAX_ANSWERED
from tokenbus.broker.outgoing import Side
from tokenbus.broker.stream_log import StreamLog
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.columns import plain_entry
from tokenbus.protocol.header import Flag, Header, decode_header, encode_header
from tokenbus.protocol.keys import Allowed
from tokenbus.protocol.messages import ModelInfo, Token
from tokenbus.protocol.transcript import Transcript, decode_transcript
from tokenbus.protocol.worker_messages import Heartbeat, LiveRequest, Unregister

from ..worlds.broker import Bench, generate, peer_of
from .invariants import check, check_empty


@pytest.fixture
def bench() -> Bench:
    return Bench(expiry_s=1000.0)


def gone(bench: Bench, name: str) -> None:
    """Reports to the broker that a worker's connection has closed."""
    bench.sent += bench.broker.on_gone(Side.BACK, peer_of(name), bench.now)


def got(bench: Bench, name: str, kind: str = "GENERATE") -> list[tuple[Header, list[bytes]]]:
    """The messages of type ``kind`` that were sent to a worker: the header of each, and its body
    and attachments."""
    mine = [m for m in bench.sent if m.side is Side.BACK and m.peer == peer_of(name)]
    bench.sent = [m for m in bench.sent if m not in mine]
    found = [m for m in mine if m.frames[0] == kind.encode()]
    return [(decode_header(m.frames[1]), list(m.frames[2:])) for m in found]


def begun(bench: Bench, worker: str, stream: int = 1, **fields: Any) -> Header:
    """Begins a stream at a worker; returns the header that the worker received."""
    bench.client("c", "GENERATE", generate(stream, **fields))
    [(header, _)] = got(bench, worker)
    return header


def continued(bench: Bench, worker: str) -> tuple[Header, Transcript]:
    """The header and the transcript of the only stream that has moved to a worker."""
    [(header, frames)] = got(bench, worker)
    assert header.flags & Flag.MOVED
    return header, decode_transcript(frames[-1])


def entry(token: int, pos: int, stream: int = 1, seq: int = 0) -> Token:
    return plain_entry(stream, token, -0.25, pos, seq)


FIRST = Token(
    token=7, stream_id=1, logprob=-1.5, finish_reason=None, top_logprobs={7: -1.5}, prompt_tokens=1
)


@pytest.mark.parametrize("session", ["json", "msgpack", "columns"])
def test_a_stream_continues_elsewhere_with_all_that_its_client_was_sent(
    bench: Bench, session: str
) -> None:
    columns = session == "columns"
    if session != "json":
        hello = {"encodings": ["msgpack"], "capabilities": ["columns"] if columns else []}
        bench.client("c", "HELLO", hello)
    bench.worker("a")
    header = begun(bench, "a", seed=3)
    bench.tokens("a", header, FIRST)
    bench.tokens("a", header, entry(8, 1), entry(9, 2), columns=columns)
    bench.worker("b")
    gone(bench, "a")
    moved, transcript = continued(bench, "b")
    assert (moved.request, moved.address) == (header.request, header.address)
    assert transcript.entries == [FIRST, entry(8, 1), entry(9, 2)]
    assert (transcript.left, transcript.why) == ("a", "its connection closed")
    # The stream moves again. The transcript then has the tokens of both workers.
    bench.tokens("b", moved, entry(5, 3), columns=columns)
    bench.worker("d")
    gone(bench, "b")
    _, transcript = continued(bench, "d")
    assert transcript.entries == [FIRST, entry(8, 1), entry(9, 2), entry(5, 3)]
    assert [kind for kind, _ in bench.to_client("c")] == ["TOKEN"] * 3


def test_only_the_entries_of_a_stream_go_along_though_its_id_was_used_before(bench: Bench) -> None:
    bench.worker("a", capacity=8)
    first = begun(bench, "a")
    other = begun(bench, "a", stream=2)
    bench.tokens("a", first, FIRST)
    end = Token(token=1, stream_id=1, logprob=0.0, finish_reason="stop")
    bench.tokens("a", first, end, final=True)
    bench.pass_time(0.5)
    again = begun(bench, "a")
    bench.tokens("a", again, entry(4, 0), entry(6, 0, stream=2))
    bench.worker("b", capacity=8)
    gone(bench, "a")
    sent = {
        header.request: decode_transcript(frames[-1]).entries for header, frames in got(bench, "b")
    }
    assert sent == {again.request: [entry(4, 0)], other.request: [entry(6, 0, stream=2)]}


def test_a_request_without_a_token_yet_moves_too(bench: Bench) -> None:
    bench.worker("a")
    begun(bench, "a")
    bench.worker("b")
    gone(bench, "a")
    _, transcript = continued(bench, "b")
    assert transcript.entries == []


def test_a_worker_that_comes_back_reaches_nobody_with_what_it_had(bench: Bench) -> None:
    bench = Bench()
    bench.worker("a")
    header = begun(bench, "a")
    bench.tokens("a", header, FIRST)
    bench.to_client("c")
    bench.pass_time(4.0)
    bench.worker("b")
    bench.pass_time(1.5)
    moved, _ = continued(bench, "b")
    # The first worker was only stopped, and now sends the tokens that it had computed.
    bench.tokens("a", header, entry(8, 1))
    end = Token(token=1, stream_id=1, logprob=0.0, finish_reason="stop")
    bench.tokens("a", header, end, final=True)
    assert bench.to_client("c") == []
    # An ERROR that arrives after the worker has registered again does not reach the client either.
    bench.worker("a")
    bench.send("a", "ERROR", {"code": "internal", "message": "", "stream_id": 1}, header)
    assert bench.to_client("c") == []
    bench.tokens("b", moved, entry(8, 1))
    assert [kind for kind, _ in bench.to_client("c")] == ["TOKEN"]


def test_streams_that_move_go_before_those_that_wait(bench: Bench) -> None:
    bench.worker("a", capacity=1)
    header = begun(bench, "a")
    bench.tokens("a", header, FIRST)
    bench.client("c", "GENERATE", generate(2, priority=5))
    gone(bench, "a")
    bench.worker("b", capacity=1)
    moved, _ = continued(bench, "b")
    assert moved.request == header.request


def test_the_streams_of_a_worker_are_spread_over_the_others(bench: Bench) -> None:
    bench.worker("a", capacity=8)
    for stream in range(4):
        begun(bench, "a", stream)
    for name in ("b", "d"):
        bench.worker(name, capacity=8)
    gone(bench, "a")
    assert [len(got(bench, name)) for name in ("b", "d")] == [2, 2]


def test_a_stream_never_moves_to_another_model(bench: Bench) -> None:
    def info(fingerprint: str, sampling: int = 1, adapter: str = "") -> ModelInfo:
        return ModelInfo(
            name="m",
            vocab_size=9,
            context_length=9,
            eos_token_ids=[0],
            fingerprint=fingerprint,
            sampling=sampling,
            adapter=adapter,
        )

    bench.worker("a", models=[info("one")])
    header = begun(bench, "a")
    bench.tokens("a", header, FIRST)
    bench.worker("b", models=[info("two")])
    bench.worker("c", models=[info("one", sampling=2)])
    bench.worker("e", models=[info("one", adapter="another")])
    gone(bench, "a")
    assert got(bench, "b") == []
    assert got(bench, "c") == []
    assert got(bench, "e") == []
    bench.worker("d", models=[info("one")])
    moved, _ = continued(bench, "d")
    assert moved.request == header.request


def test_a_stream_waits_for_a_worker_for_a_bounded_time() -> None:
    bench = Bench(expiry_s=1000.0, move_wait_s=5.0)
    bench.worker("a", capacity=1)
    header = begun(bench, "a")
    bench.tokens("a", header, FIRST)
    bench.client("c", "GENERATE", generate(2))
    bench.to_client("c")
    gone(bench, "a")
    bench.pass_time(4.5)
    assert bench.to_client("c") == []
    bench.pass_time(1.0)
    errors = {body["stream_id"]: body["code"] for _, body in bench.to_client("c")}
    assert errors == {1: "worker_lost", 2: "no_worker"}
    assert bench.broker.state.requests == {}


def test_a_stream_that_waits_ends_when_it_is_cancelled_or_its_time_is_up(bench: Bench) -> None:
    bench.worker("a", capacity=8)
    begun(bench, "a")
    begun(bench, "a", 2, timeout_s=3.0)
    gone(bench, "a")
    [(_, [end])] = bench.client("c", "CANCEL", {"stream_id": 1})
    assert (end["stream_id"], end["finish_reason"]) == (1, "cancelled")
    bench.pass_time(3.5)
    [(_, [end])] = bench.to_client("c")
    assert (end["stream_id"], end["finish_reason"]) == (2, "timeout")
    bench.worker("b", capacity=8)
    assert got(bench, "b") == []
    assert bench.broker.state.requests == {}


def test_a_broker_that_stops_waits_for_no_worker(bench: Bench) -> None:
    for name in ("a", "b"):
        bench.worker(name, capacity=8)
    header = begun(bench, "a")
    bench.tokens("a", header, FIRST)
    bench.to_client("c")
    bench.sent += bench.broker.drain()
    gone(bench, "a")
    bench.pass_time(0.5)
    continued(bench, "b")
    assert bench.to_client("c") == []
    gone(bench, "b")
    bench.pass_time(0.5)
    [(_, error)] = bench.to_client("c")
    assert error["code"] == "shutting_down"
    assert bench.broker.drained


def test_a_stream_that_was_cancelled_ends_with_its_worker(bench: Bench) -> None:
    bench.worker("a")
    bench.worker("b")
    begun(bench, "a")
    bench.client("c", "CANCEL", {"stream_id": 1})
    gone(bench, "a")
    [(_, [end])] = bench.to_client("c")
    assert end["finish_reason"] == "cancelled"
    assert got(bench, "b") == []


def test_what_a_client_misses_of_a_stream_that_waits_comes_from_the_broker(bench: Bench) -> None:
    bench.worker("a")
    header = begun(bench, "a")
    bench.tokens("a", header, FIRST, entry(8, 1), entry(9, 2))
    # The worker is lost before it answers the first ATTACH. The second arrives while the stream
    # waits.
    bench.client("c", "ATTACH", {"stream_id": 1, "received": 2})
    bench.to_client("c")
    gone(bench, "a")
    (_, answer), (_, [missed]) = bench.to_client("c")
    assert (answer["attached"], missed["token"]) == (2, 9)
    (_, answer), (_, missed) = bench.client("c", "ATTACH", {"stream_id": 1, "received": 1})
    assert (answer["attached"], [e["token"] for e in missed]) == (1, [8, 9])
    bench.worker("b")
    _, transcript = continued(bench, "b")
    assert len(transcript.entries) == 3


def test_the_entries_of_a_stream_that_waits_are_sent_a_bounded_number_of_times(
    bench: Bench,
) -> None:
    bench.worker("a")
    header = begun(bench, "a")
    bench.tokens("a", header, FIRST, entry(8, 1), entry(9, 2))
    for _ in range(3):
        bench.client("c", "ATTACH", {"stream_id": 1, "received": 1})
    bench.to_client("c")
    gone(bench, "a")
    kinds = [kind for kind, _ in bench.to_client("c")]
    assert kinds == ["MSG", "MSG", "MSG", "TOKEN"], "the entries follow the last answer"
    for _ in range(MAX_ANSWERED):
        answers = bench.client("c", "ATTACH", {"stream_id": 1, "received": 1})
        assert [kind for kind, _ in answers] == ["MSG", "TOKEN"]
    [(_, error)] = bench.client("c", "ATTACH", {"stream_id": 1, "received": 1})
    assert (error["code"], error["stream_id"]) == ("client_limit", 1)
    for received in (3, 10**9):
        # A client that has all entries gets an answer, and no entries are decoded for it.
        [(_, answer)] = bench.client("c", "ATTACH", {"stream_id": 1, "received": received})
        assert answer["attached"] == 3
    bench.worker("b")
    header, transcript = continued(bench, "b")
    assert len(transcript.entries) == 3
    bench.client("c", "ATTACH", {"stream_id": 1, "received": 1})
    assert [kind for kind, _ in bench.to_worker("b")] == ["ATTACH"], "the worker must answer"


@pytest.mark.parametrize("answered", [False, True])
def test_what_a_worker_sends_again_is_in_the_transcript_once(bench: Bench, answered: bool) -> None:
    bench.worker("a")
    header = begun(bench, "a")
    bench.tokens("a", header, FIRST, entry(8, 1), entry(9, 2))
    bench.client("c", "ATTACH", {"stream_id": 1, "received": 1})
    # The worker sends this token before it receives the ATTACH.
    bench.tokens("a", header, entry(5, 3))
    bench.send("a", "MSG", {"stream_id": 1, "attached": 1}, header)
    sent = [FIRST]
    if answered:
        again = [entry(8, 1), entry(9, 2), entry(5, 3)]
        bench.tokens("a", header, *again)
        bench.tokens("a", header, entry(4, 4))
        sent += [*again, entry(4, 4)]
    bench.worker("b")
    gone(bench, "a")
    _, transcript = continued(bench, "b")
    assert transcript.entries == sent


@pytest.mark.parametrize("step_age_s", [62.0, 1.0])
def test_a_worker_gets_its_streams_back_unless_its_step_still_hangs(
    bench: Bench, step_age_s: float
) -> None:
    bench.worker("a")
    header = begun(bench, "a")
    bench.send("a", "HEARTBEAT", Heartbeat(step_age_s=61.0))
    live = [LiveRequest(request=header.request, session=header.address, stream_id=1)]
    answer = bench.worker("a", live=live, step_age_s=step_age_s)
    hangs = step_age_s > 60
    assert answer.wanted == ([] if hangs else [header.request])
    assert answer.unknown == ([header.request] if hangs else [])


def test_a_hung_worker_loses_its_streams_and_gets_no_more_until_it_goes_on(bench: Bench) -> None:
    bench.worker("a")
    header = begun(bench, "a")
    bench.worker("b", patterns=["n"], default="n")
    bench.send("a", "HEARTBEAT", Heartbeat(step_age_s=61.0))
    [again] = bench.send("a", "HEARTBEAT", Heartbeat(step_age_s=62.0))
    assert again.frames[0] == b"REREGISTER"
    bench.worker("a", step_age_s=63.0)
    assert got(bench, "a") == []
    bench.send("a", "HEARTBEAT", Heartbeat())
    moved, _ = continued(bench, "a")
    assert moved.request == header.request


def test_requests_that_may_be_done_twice_are_sent_again(bench: Bench) -> None:
    for name in ("a", "b"):
        bench.worker(name, role="controller", patterns=["*"], default="", capacity=8)
    bench.client("c", "TAGS", {"stream_id": 1})
    bench.client("c", "DELETE", {"stream_id": 2, "module": "x" * 8})
    [(first, _)] = got(bench, "a", "TAGS")
    gone(bench, "b")
    [(_, error)] = bench.to_client("c")
    assert (error["stream_id"], error["code"]) == (2, "worker_lost")
    bench.worker("d", role="controller", patterns=["*"], default="", capacity=8)
    gone(bench, "a")
    [(again, frames)] = got(bench, "d", "TAGS")
    assert (again.request, again.flags & Flag.MOVED, len(frames)) == (first.request, 0, 2)


# --- bounds ---------------------------------------------------------------------------------------


def test_streams_beyond_the_bound_of_a_session_cannot_move_and_their_client_is_notified() -> None:
    bench = Bench(expiry_s=1000.0, max_journal_bytes=2000)
    bench.worker("a", capacity=8)
    for stream in (1, 2):
        header = begun(bench, "a", stream)
        for pos in range(12):
            bench.tokens("a", header, entry(5, pos, stream))
            check(bench.broker)
    bench.pass_time(0.5)
    notices = [body for kind, body in bench.to_client("c") if kind == "SYSTEM"]
    begun(bench, "a", 3)
    assert [(n["event"], n["stream_id"]) for n in notices] == [
        ("not_movable", 1),
        ("not_movable", 2),
    ]
    journal = next(iter(bench.broker.state.sessions)).log
    assert journal.size <= 2000
    bench.worker("b", capacity=8)
    gone(bench, "a")
    errors = {body["stream_id"]: body["code"] for _, body in bench.to_client("c")}
    assert errors == {1: "worker_lost", 2: "worker_lost"}
    assert len(got(bench, "b")) == 1


def test_the_session_that_keeps_most_gives_up_first_where_all_keep_too_much() -> None:
    bench = Bench(expiry_s=1000.0, max_total_journal_bytes=2000)
    bench.worker("a", capacity=8)
    bench.client("d", "GENERATE", generate(9))
    bench.to_worker("a")
    header = begun(bench, "a")
    for pos in range(20):
        bench.tokens("a", header, entry(5, pos))
    bench.pass_time(0.5)
    assert [b["event"] for k, b in bench.to_client("c") if k == "SYSTEM"] == ["not_movable"]
    assert bench.to_client("d") == []


def test_the_log_of_an_ended_session_counts_towards_the_bound_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The streams of a session with many streams end in later ticks."""
    bench = Bench(expiry_s=1000.0, max_total_journal_bytes=2000)
    bench.worker("a", capacity=8)
    header = begun(bench, "a")
    with monkeypatch.context() as patched:
        patched.setattr(bench.broker._sessions, "_room", 0)
        bench.client("c", "BYE")
        for pos in range(40):
            bench.tokens("a", header, entry(5, pos))
            check(bench.broker)
    bench.pass_time(0.5)
    assert [kind for kind, _ in bench.to_worker("a")] == ["CANCEL"]


def test_a_key_with_many_sessions_gives_up_its_streams_before_another_key() -> None:
    bench = Bench(expiry_s=1000.0, max_total_journal_bytes=8000)
    ann, eve = "a" * 64, "e" * 64
    clients = {"ann": Allowed(public=ann), "eve": Allowed(public=eve)}
    bench.broker.on_keys(clients, {}, bench.now)
    bench.worker("a", capacity=100)
    names = ["ann", *(f"eve {number}" for number in range(30))]
    for name in names:
        bench.client(name, "GENERATE", generate(1), ann if name == "ann" else eve)
        [(_, header)] = bench.to_worker("a")
        for pos in range(8 if name == "ann" else 3):
            bench.tokens("a", header, entry(5, pos))
    bench.pass_time(0.5)
    given_up = [
        name
        for name in names
        if any(
            kind == "SYSTEM" and body["event"] == "not_movable"
            for kind, body in bench.to_client(name)
        )
    ]
    assert given_up
    assert "ann" not in given_up
    sizes = [session.log.size for session in bench.broker.state.sessions]
    assert max(sizes) == sizes[0], "the session that is kept is the largest one"


@pytest.mark.parametrize("first", [0, 1_000_000])
def test_attaches_that_repeat_no_further_entries_do_not_enlarge_the_log(
    bench: Bench, first: int
) -> None:
    """A client attaches again and again, and names numbers of entries that do not exist."""
    bench.worker("a")
    header = begun(bench, "a")
    bench.tokens("a", header, entry(5, 0), entry(6, 1))
    sizes = set()
    for number in range(20):
        received = first + number if first else 1
        bench.client("c", "ATTACH", {"stream_id": 1, "received": received})
        answer = encode_body({"stream_id": 1, "attached": min(received, 2)}, "json")
        frames = [b"MSG", encode_header(header.request, header.address), answer]
        bench.sent += bench.broker.on_worker(peer_of("a"), frames, bench.now)
        if not first:
            bench.tokens("a", header, entry(6, 1))
        [session] = bench.broker.state.sessions
        bench.pass_time(1.0)
        places = session.log._places.values()
        sizes.add(sum(len(place.again or ()) for place in places))
    assert sizes == {1}
    assert [each.token for each in session.log.entries([header.request])[header.request]] == [5, 6]


def test_few_sizes_are_read_when_many_small_requests_are_given_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large request of another client takes the room of many small requests."""
    ann, eve = "a" * 64, "e" * 64
    clients = {"ann": Allowed(public=ann), "eve": Allowed(public=eve)}
    bench.broker.on_keys(clients, {}, bench.now)
    bench.worker("a", capacity=1000)
    for client in range(30):
        for stream in range(20):
            bench.client(f"eve {client}", "GENERATE", generate(stream), eve)
    recent = bench.broker.state.recent
    recent.max_total = recent.total
    logs = [session.log for session in bench.broker.state.sessions]
    size, reads = StreamLog.__dict__["size"], 0

    def read(stored: StreamLog) -> int:
        nonlocal reads
        reads += 1
        return int(size.__get__(stored))

    monkeypatch.setattr(StreamLog, "size", property(read, size.__set__))
    bench.client("ann", "GENERATE", generate(1, prompt="x" * 10_000), ann)
    given_up = 600 - sum(len(stored._places) for stored in logs)
    assert given_up > 100
    assert reads < 20 * given_up


def test_without_a_journal_streams_end_with_their_worker() -> None:
    bench = Bench(expiry_s=1000.0, max_journal_bytes=0)
    bench.worker("a")
    header = begun(bench, "a")
    bench.tokens("a", header, FIRST)
    bench.worker("b")
    bench.to_client("c")
    gone(bench, "a")
    [(_, error)] = bench.to_client("c")
    assert error["code"] == "worker_lost"


def test_what_has_ended_is_not_kept(bench: Bench) -> None:
    bench.worker("a", capacity=8)
    long = begun(bench, "a", 99)
    for stream in range(50):
        header = begun(bench, "a", stream)
        bench.tokens("a", header, *[entry(5, pos, stream) for pos in range(100)])
        end = Token(token=1, stream_id=stream, logprob=0.0, finish_reason="stop")
        bench.tokens("a", header, end, final=True)
        bench.pass_time(0.25)
        bench.sent.clear()
    journal = next(iter(bench.broker.state.sessions)).log
    assert journal.size > 100_000, "an earlier stream may need these entries"
    end = Token(token=1, stream_id=99, logprob=0.0, finish_reason="stop")
    bench.tokens("a", long, end, final=True)
    bench.pass_time(0.25)
    check_empty(bench.broker)


# --- quarantine -----------------------------------------------------------------------------------


def test_a_request_that_kills_its_workers_is_quarantined_after_three_deaths(bench: Bench) -> None:
    bench.worker("a", capacity=8)
    good = begun(bench, "a", 1)
    bench.tokens("a", good, FIRST)
    killer = begun(bench, "a", 2)
    bench.to_client("c")
    for position, (lost, following) in enumerate([("a", "b"), ("b", "d")], 1):
        bench.worker(following, capacity=8)
        gone(bench, lost)
        moved = {header.request: header for header, _ in got(bench, following)}
        assert killer.request in moved
        bench.tokens(following, moved[good.request], entry(8, position))
    assert "ERROR" not in [kind for kind, _ in bench.to_client("c")]
    bench.worker("e", capacity=8)
    gone(bench, "d")
    [(_, error)] = bench.to_client("c")
    assert (error["stream_id"], error["code"]) == (2, "quarantined")
    assert "3 consecutive workers" in error["message"]
    [(header, _)] = got(bench, "e")
    assert header.request == good.request


def test_two_deaths_by_chance_put_a_request_on_trial_only(bench: Bench) -> None:
    """The request's third worker samples a new token before it dies, so the count of deaths begins
    again."""
    bench.worker("a")
    header = begun(bench, "a")
    for lost, following in ("ab", "bd"):
        bench.worker(following)
        gone(bench, lost)
        header, _ = continued(bench, following)
    bench.tokens("d", header, FIRST)
    for lost, following in ("de", "ef"):
        bench.worker(following)
        gone(bench, lost)
        continued(bench, following)
    assert "ERROR" not in [kind for kind, _ in bench.to_client("c")]


def test_of_several_suspects_only_the_one_that_kills_is_quarantined() -> None:
    bench = Bench(expiry_s=1000.0)
    bench.worker("w0", capacity=20)
    killer = 5
    for stream in range(8):
        begun(bench, "w0", stream)
    errors: dict[int, str] = {}
    done: set[int] = set()
    for number in range(12):
        bench.worker(f"w{number + 1}", capacity=20)
        gone(bench, f"w{number}")
        worker = f"w{number + 1}"
        while True:
            here = [h for h, _ in got(bench, worker)]
            streams = {r.id: r.stream_id for r in bench.broker.state.requests.values()}
            for kind, body in bench.to_client("c"):
                if kind == "ERROR":
                    errors[body["stream_id"]] = body["code"]
            if not here or any(streams[h.request] == killer for h in here):
                break
            for header in here:
                stream = streams[header.request]
                done.add(stream)
                bench.tokens(worker, header, entry(4, 0, stream))
            bench.pass_time(0.5)
        if errors:
            break
    assert errors == {killer: "quarantined"}
    assert number <= 5
    # The other streams continue, one at a time or together.
    for _ in range(20):
        for header, _ in got(bench, worker):
            stream = bench.broker.state.requests[header.request].stream_id
            done.add(stream)
            bench.tokens(worker, header, entry(4, 0, stream))
        bench.pass_time(0.5)
    assert done == set(range(8)) - {killer}


def test_workers_that_leave_at_their_own_wish_count_against_no_request(bench: Bench) -> None:
    bench.worker("a")
    header = begun(bench, "a")
    for name, following in (("a", "b"), ("b", "d"), ("d", "e")):
        bench.send(name, "UNREGISTER", Unregister())
        bench.worker(following)
        moved, _ = continued(bench, following)
        assert moved.request == header.request


def test_a_request_that_never_reached_a_worker_is_not_why_it_died(bench: Bench) -> None:
    """Several workers are lost at once. The broker notices each further loss when it sends the
    request to the worker."""
    for name in ("a", "b", "d", "e"):
        bench.worker(name)
    begun(bench, "a")
    gone(bench, "a")
    for name in ("b", "d", "e"):
        [unsent] = [m for m in bench.sent if m.peer == peer_of(name) and m.frames[0] == b"GENERATE"]
        bench.sent += bench.broker.on_gone(Side.BACK, unsent.peer, bench.now, unsent.frames)
    assert "ERROR" not in [kind for kind, _ in bench.to_client("c")]
    bench.worker("f")
    continued(bench, "f")


def test_a_worker_that_has_only_lost_its_connection_counts_against_no_request(
    bench: Bench,
) -> None:
    bench.worker("a")
    begun(bench, "a")
    bench.worker("b")
    for lost, other in 2 * [("a", "b"), ("b", "a")]:
        gone(bench, lost)
        continued(bench, other)
        # The process registers again. It has only lost its connection.
        bench.worker(lost)
    # From here on, processes die, and their deaths count.
    for lost, following in ("ab", "bd"):
        bench.worker(following)
        gone(bench, lost)
        continued(bench, following)
    bench.to_client("c")
    gone(bench, "d")
    [(_, error)] = bench.to_client("c")
    assert error["code"] == "quarantined"


# --- late ticks -----------------------------------------------------------------------------------


def test_a_broker_that_was_stopped_expires_no_lease_for_the_time_that_it_missed() -> None:
    bench = Bench()
    bench.worker("a")
    bench.client("c", "HELLO", {"capabilities": ["ping"]})
    begun(bench, "a")
    bench.pass_time(1.0)
    bench.now += 20.0
    bench.pass_time(1.0)
    assert len(bench.broker.state.workers) == 1
    assert len(bench.broker.state.sessions) == 1
    # Later silence counts again.
    bench.pass_time(5.0)
    assert len(bench.broker.state.workers) == 0


def test_workers_that_were_silent_already_put_no_request_in_quarantine() -> None:
    """All leases expire, one after the other, as when the network between broker and workers is
    cut."""
    bench = Bench()
    bench.worker("a")
    begun(bench, "a", 1)
    bench.worker("b")
    bench.pass_time(20.0)
    assert not bench.broker.state.workers
    assert "ERROR" not in [kind for kind, _ in bench.to_client("c")]
    bench.worker("d")
    assert [kind for kind, _ in bench.to_worker("d")] == ["GENERATE"]


def test_the_silence_of_a_worker_that_registers_again_counts_against_no_request() -> None:
    """The silent worker's process was stopped and has not died, so its loss does not count. The
    request is quarantined only after the deaths of three other processes."""
    bench = Bench()
    bench.worker("a", process=1)
    begun(bench, "a", 1)
    bench.pass_time(6.0)
    assert not bench.broker.state.workers
    bench.worker("b", process=2)
    assert [kind for kind, _ in bench.to_worker("b")] == ["GENERATE"]
    bench.worker("a", process=1)
    bench.to_worker("a")
    gone(bench, "b")
    assert "ERROR" not in [kind for kind, _ in bench.to_client("c")]
    assert [kind for kind, _ in bench.to_worker("a")] == ["GENERATE"]
    bench.worker("d", process=3)
    gone(bench, "a")
    assert "ERROR" not in [kind for kind, _ in bench.to_client("c")]
    assert [kind for kind, _ in bench.to_worker("d")] == ["GENERATE"]
    gone(bench, "d")
    [error] = [body for kind, body in bench.to_client("c") if kind == "ERROR"]
    assert error["code"] == "quarantined"
    assert "3 consecutive workers" in error["message"]


def test_a_stream_that_cannot_move_any_more_leaves_nothing_in_the_journal() -> None:
    bench = Bench(max_journal_bytes=300)
    bench.worker("a")
    header = begun(bench, "a", 1)
    [session] = bench.broker.state.sessions
    for pos in range(200):
        bench.tokens("a", header, entry(5, pos))
        bench.pass_time(0.25)
        bench.send("a", "HEARTBEAT", Heartbeat())
    assert "not_movable" in [
        body.get("event") for kind, body in bench.to_client("c") if kind == "SYSTEM"
    ]
    recent = bench.broker.state.recent
    assert (session.log.size, recent.size) == (0, 0)
    assert bench.broker.state.counters.internal_errors == 0


def test_what_comes_for_a_session_without_streams_is_not_kept(bench: Bench) -> None:
    bench.worker("a")
    header = begun(bench, "a", 1)
    [session] = bench.broker.state.sessions
    bench.tokens("a", header, entry(5, 0), final=True)
    bench.tokens("a", header, entry(5, 1))
    bench.pass_time(0.25)
    recent = bench.broker.state.recent
    assert (session.log.size, recent.size) == (0, 0)
