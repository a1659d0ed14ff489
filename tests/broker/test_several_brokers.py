"""One of several brokers: sessions that come from other brokers, requests that continue at other
brokers, and workers with requests of other brokers. There are no sockets: tests pass frames and
times."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import msgpack
from tokenbus.broker import adoption, attaches, claims
from tokenbus.broker.outgoing import Side
from tokenbus.broker.request import Request
from tokenbus.protocol.bodies import decode_as, encode_body
from tokenbus.protocol.header import Flag, Header, encode_header
from tokenbus.protocol.ids import session_id
from tokenbus.protocol.keys import Allowed
from tokenbus.protocol.messages import Attach, Token
from tokenbus.protocol.worker_messages import (
    Claimed,
    End,
    Heartbeat,
    Journal,
    LiveRequest,
    Refused,
    Registered,
    Released,
)

from ..worlds.broker import Bench, generate, peer_of
from .invariants import check_empty

ANN, BEN = "a" * 64, "b" * 64
TOKEN = "0123456789abcdef" * 2
"""The token of a session that began at another broker."""
SESSION = session_id(TOKEN)
REQUEST = (7 << 32) + 1
"""The id of a request that another broker has accepted."""


@pytest.fixture
def bench() -> Bench:
    """A broker that was not restarted recently. Each of its two workers has room for two
    requests."""
    bench = Bench(expiry_s=1000.0, session_expiry_s=1000.0)
    for name in ("a", "b"):
        bench.worker(name)
    return bench


def hello(bench: Bench, client: str = "c", token: str = TOKEN, **more: Any) -> dict[str, Any]:
    """Sends the HELLO of a client whose session began at another broker; returns the WELCOME."""
    said = {"session": token, "elsewhere": True, "capabilities": ["recover"], **more}
    [(kind, welcome)] = bench.client(client, "HELLO", said)
    assert kind == "WELCOME"
    return dict(welcome)


def journal(
    bench: Bench,
    worker: str,
    tokens: int,
    moves: int = 0,
    request: int = REQUEST,
    session: int = SESSION,
    counted: bool = False,
    ended: bool = False,
    claimed: int = 0,
) -> None:
    """A worker sends the JOURNAL of stream 1. ``counted``: the JOURNAL contains the number of its
    entries."""
    entries = [entry(pos) for pos in range(tokens)]
    said = Journal(type="GENERATE", moves=moves, ended=ended, claimed=claimed)
    said.entries = tokens if counted else None
    body = encode_body(said, "msgpack")
    asked = encode_body(generate(1), "msgpack")
    head = encode_header(request, session, Flag.MSGPACK)
    frames = [b"JOURNAL", head, body, encode_body(entries, "msgpack"), asked]
    bench.sent += bench.broker.on_worker(peer_of(worker), frames, bench.now)


def claimed(bench: Bench, *workers: str, session: int = SESSION) -> None:
    for worker in workers:
        bench.send(worker, "CLAIMED", Claimed(session=session))


def entry(pos: int) -> Token:
    return Token(token=100 + pos, stream_id=1, logprob=-1.0, finish_reason=None, pos=pos)


def kinds(bench: Bench, worker: str) -> list[str]:
    return [kind for kind, _ in bench.to_worker(worker)]


def attach(bench: Bench, received: int, moves: int = 0) -> list[tuple[str, Any]]:
    said = {"stream_id": 1, "received": received, "moves": moves}
    return bench.client("c", "ATTACH", said)


# --- a session that comes from another broker ---------------------------------------------------


def test_the_workers_are_asked_for_the_streams_of_a_session_that_comes(bench: Bench) -> None:
    welcome = hello(bench)
    assert (welcome["session"], welcome["recovering"]) == (TOKEN, True)
    assert "resumed" not in welcome
    assert [kinds(bench, name) for name in "ab"] == [["CLAIM"], ["CLAIM"]]


def test_a_client_with_a_stolen_token_does_not_keep_its_owner_out(bench: Bench) -> None:
    """The owner comes from another broker, at which its session was, and has another key."""
    hello = {"session": TOKEN, "elsewhere": True, "capabilities": ["recover"]}
    bench.client("thief", "HELLO", hello, "b" * 64)
    [(_, welcome)] = bench.client("owner", "HELLO", hello, "a" * 64)
    assert welcome["session"] == TOKEN
    journal(bench, "a", 3, session=session_id(TOKEN, "a" * 64))
    kinds(bench, "a")
    attach = {"stream_id": 1, "received": 1, "moves": 0}
    bench.client("thief", "ATTACH", attach, "b" * 64)
    assert kinds(bench, "a") == []
    bench.client("owner", "ATTACH", attach, "a" * 64)
    assert kinds(bench, "a") == ["ATTACH"]


@pytest.fixture
def keyed() -> Bench:
    return with_tenants(max_streams=3)


def with_tenants(max_streams: int) -> Bench:
    """A broker with a worker and two tenants. One tenant has a quota of two streams."""
    bench = Bench(expiry_s=1000.0, session_expiry_s=1000.0, max_streams=max_streams)
    clients = {"ann": Allowed(public=ANN, streams=2), "ben": Allowed(public=BEN)}
    bench.broker.on_keys(clients, {}, bench.now)
    bench.worker("a", capacity=4)
    return bench


def again(bench: Bench, client: str, key: str, streams: Sequence[int]) -> list[int]:
    """Claims a session, on another connection each time, and begins streams before the worker
    reports its streams. Then the worker reports all streams that it has received from the client.
    Returns the streams that the session then has."""
    said = {"session": TOKEN, "elsewhere": True, "capabilities": ["recover"]}
    bench.client(client, "HELLO", said, key)
    session = bench.broker.state.sessions.by_id[session_id(TOKEN, key)]
    [worker] = bench.broker.state.workers.values()
    fences = worker.fences.by_session.get(session.id, {}).values()
    reported = [(f.request, f.session, f.stream_id) for of in fences for f in of]
    for stream in streams:
        bench.client(client, "GENERATE", generate(stream), key)
    for request, number, stream in reported:
        body = encode_body(Journal(type="GENERATE", moves=0, entries=0), "msgpack")
        head = encode_header(request, number, Flag.MSGPACK)
        frames = [b"JOURNAL", head, body, encode_body([], "msgpack")]
        frames.append(encode_body(generate(stream), "msgpack"))
        bench.sent += bench.broker.on_worker(peer_of("a"), frames, bench.now)
    claimed(bench, "a", session=session.id)
    return sorted(session.streams)


@pytest.mark.parametrize(("key", "most"), [(ANN, 2), (BEN, 3)])
def test_a_session_that_is_claimed_again_and_again_stays_within_its_bounds(
    keyed: Bench, key: str, most: int
) -> None:
    """While the worker is asked, the streams that the broker has removed count."""
    first = list(range(1, most + 1))
    assert again(keyed, "c1", key, first) == first
    assert again(keyed, "c2", key, []) == first
    assert again(keyed, "c3", key, range(11, 11 + most)) == first
    [session] = [each for each in keyed.broker.state.sessions if each.streams]
    assert not session.withdrawn


def test_a_quota_ends_no_stream_that_comes_from_another_broker(keyed: Bench) -> None:
    """Each broker counts quotas by itself, so the streams of two brokers may exceed the quota."""
    for stream in (1, 2):
        keyed.client("here", "GENERATE", generate(stream), ANN)
    session = session_id(TOKEN, ANN)
    said = {"session": TOKEN, "elsewhere": True, "capabilities": ["recover"]}
    keyed.client("there", "HELLO", said, ANN)
    journal(keyed, "a", 3, session=session)
    claimed(keyed, "a", session=session)
    assert len(keyed.broker.state.sessions.by_id[session].streams) == 1
    [(_, error)] = keyed.client("there", "GENERATE", generate(9), ANN)
    assert error["code"] == "client_limit"


@pytest.mark.parametrize(("key", "brokers", "most"), [(ANN, 2, 4), (BEN, 2, 6), (BEN, 3, 9)])
def test_claims_at_several_brokers_multiply_a_bound_at_most_by_their_number(
    key: str, brokers: int, most: int
) -> None:
    """The client begins as many streams as it may at another broker, claims them here, and does so
    again and again. The other broker does not count streams that continue here."""
    keyed = Bench(expiry_s=1000.0, session_expiry_s=1000.0, max_streams=3)
    allowed = {"ann": Allowed(public=ANN, streams=2), "ben": Allowed(public=BEN)}
    keyed.broker.on_keys(allowed, {}, keyed.now)
    keyed.worker("a", capacity=400, brokers=brokers)
    number = session_id(TOKEN, key)
    said = {"session": TOKEN, "elsewhere": True, "capabilities": ["recover"]}
    for turn in range(1, 6):
        keyed.client(f"c{turn}", "HELLO", said, key)
        session = keyed.broker.state.sessions.by_id[number]
        reported = list(session.withdrawn.items())
        for request, stream in [*reported, *((10 * turn + i, 10 * turn + i) for i in range(3))]:
            body = encode_body(Journal(type="GENERATE", moves=0, entries=0), "msgpack")
            head = encode_header(request, number, Flag.MSGPACK)
            frames = [b"JOURNAL", head, body, encode_body([], "msgpack")]
            frames.append(encode_body(generate(stream), "msgpack"))
            keyed.sent += keyed.broker.on_worker(peer_of("a"), frames, keyed.now)
        claimed(keyed, "a", session=number)
        # The earlier streams stay; only new ones above the bound are dropped.
        assert {stream for _, stream in reported} <= session.streams.keys()
        assert len(session.streams) <= most
    assert len(session.streams) == most


def test_streams_that_are_claimed_keep_their_places_at_the_worker() -> None:
    """Otherwise a client could fill the worker far beyond its capacity, and the requests of other
    clients would wait for all its streams."""
    keyed = with_tenants(max_streams=9)
    again(keyed, "c1", BEN, [1, 2])
    [worker] = keyed.broker.state.workers.values()
    said = {"session": TOKEN, "elsewhere": True, "capabilities": ["recover"]}
    keyed.client("c2", "HELLO", said, BEN)
    for stream in (3, 4, 5):
        keyed.client("c2", "GENERATE", generate(stream), BEN)
    assert sorted(request.stream_id for request in worker.requests.values()) == [3, 4]
    # The worker has lost both streams, so that the queued request gets a place.
    claimed(keyed, "a", session=session_id(TOKEN, BEN))
    assert sorted(request.stream_id for request in worker.requests.values()) == [3, 4, 5]


@pytest.mark.parametrize("key", ["", "k"])
def test_a_worker_receives_the_owner_of_a_session(bench: Bench, key: str) -> None:
    """At the worker, the sessions of one key take turns as if they were one session."""
    said = {"session": TOKEN, "elsewhere": True, "capabilities": ["recover"]}
    bench.client("c", "HELLO", said, key)
    session = session_id(TOKEN, key)
    journal(bench, "a", 3, session=session)
    bench.client("c", "ATTACH", {"stream_id": 1, "received": 1}, key)
    owner = session_id("", key) if key else session
    sent = bench.to_worker("a")
    assert [(kind, header.address) for kind, header in sent] == [
        ("CLAIM", owner),
        ("ATTACH", owner),
    ]


def test_a_stream_goes_on_at_the_worker_that_has_it(bench: Bench) -> None:
    hello(bench)
    attach(bench, 1)
    journal(bench, "a", 3)
    claimed(bench, "a", "b")
    assert [kind for kind, _ in bench.to_worker("a")] == ["CLAIM", "ATTACH"]
    to = Header(REQUEST, SESSION, 0)
    bench.tokens("a", to, entry(3))
    [(kind, entries)] = bench.to_client("c")
    assert (kind, [e["token"] for e in entries]) == ("TOKEN", [103])


def test_an_attach_that_waits_for_the_report_is_answered_from_it(bench: Bench) -> None:
    """The client uses the encoding in which the worker reported the entries, so the broker answers
    the ATTACH itself."""
    hello(bench, encodings=["msgpack"])
    attach(bench, 1)
    journal(bench, "a", 3)
    [(kind, answer), (word, missed)] = bench.to_client("c")
    assert (kind, answer["attached"]) == ("MSG", 1)
    assert (word, [e["token"] for e in missed]) == ("TOKEN", [101, 102])
    bench.tokens("a", Header(REQUEST, SESSION, Flag.MSGPACK), entry(3))
    [(_, entries)] = bench.to_client("c")
    assert [e["token"] for e in entries] == [103]
    assert kinds(bench, "a") == ["CLAIM"]
    # The stream now belongs to the client's session, and moves like any other stream.
    claimed(bench, "a", "b")
    bench.pass_time(6.0)
    bench.send("a", "UNREGISTER", {})
    assert kinds(bench, "b") == ["CLAIM", "GENERATE"]


def test_an_attach_that_comes_when_the_stream_is_there_already_is_passed_on(bench: Bench) -> None:
    hello(bench)
    journal(bench, "a", 3)
    claimed(bench, "a", "b")
    attach(bench, 1)
    assert [kind for kind, _ in bench.to_worker("a")] == ["CLAIM", "ATTACH"]


def test_a_client_whose_streams_another_broker_has_claimed_gets_them_back(bench: Bench) -> None:
    """The other broker was stopped when the client connected to this broker. The other broker
    claimed the streams again when the workers registered there. Without a new claim of this broker,
    the client would wait forever."""
    hello(bench, encodings=["msgpack"])
    journal(bench, "a", 3)
    claimed(bench, "a", "b")
    attach(bench, 3)
    for name in ("a", "b"):
        bench.to_worker(name)
    assert bench.client("c", "PING", {}) == [("PONG", {})]
    bench.send("a", "RELEASED", Released(requests=[REQUEST]))
    assert bench.client("c", "PING", {}) == [("PONG", {"session": False})]
    assert hello(bench, encodings=["msgpack"])["recovering"]
    assert [kinds(bench, name) for name in "ab"] == [["CLAIM"], ["CLAIM"]]
    attach(bench, 3)
    journal(bench, "a", 5, moves=4)
    received = bench.to_client("c")
    assert [kind for kind, _ in received] == ["MSG", "TOKEN"]
    assert [entry["token"] for entry in received[1][1]] == [103, 104]
    assert bench.client("c", "PING", {}) == [("PONG", {})]


def test_a_broker_that_a_client_has_left_claims_nothing_of_it(bench: Bench) -> None:
    """During recovery, the broker sends a CLAIM for each session from another broker to a worker
    that registers. The client of this session may already be at the next broker."""
    bench = Bench(recover_s=100.0)
    bench.worker("a")
    hello(bench)
    claimed(bench, "a")
    bench.client("c", "BYE", {"keep": True})
    bench.worker("b")
    assert kinds(bench, "b") == []
    hello(bench, "d")
    assert kinds(bench, "b") == ["CLAIM"]


def test_variables_stay_while_a_session_that_comes_may_bring_their_requests(
    bench: Bench,
) -> None:
    """The broker was stopped, so the state worker registers again before the other workers have
    answered the CLAIM."""
    hello(bench)
    live = [LiveRequest(request=n, session=0, stream_id=0) for n in (REQUEST, REQUEST + 1)]
    answer = bench.worker("s", role="state", patterns=[], default="", live=live)
    assert answer.unknown == []
    bench.sent.clear()

    def dropped() -> list[list[int]]:
        mine = [m.frames for m in bench.sent if m.peer == peer_of("s")]
        answers = [frames for frames in mine if frames[0] == b"REGISTERED"]
        return [decode_as(Registered, frames[2], "msgpack").unknown for frames in answers]

    journal(bench, "a", 3)
    bench.pass_time(1.0)
    assert dropped() == []
    claimed(bench, "a", "b")
    bench.pass_time(1.0)
    assert dropped() == [[REQUEST + 1]]


def test_what_no_worker_has_is_refused_when_the_last_has_answered(bench: Bench) -> None:
    hello(bench)
    assert attach(bench, 1) == []
    claimed(bench, "a")
    assert bench.to_client("c") == []
    claimed(bench, "b")
    [(kind, error)] = bench.to_client("c")
    assert (kind, error["code"], error["stream_id"]) == ("ERROR", "unknown_stream", 1)
    # Further ATTACHes are answered immediately.
    assert [kind for kind, _ in attach(bench, 1)] == ["ERROR"]


def test_a_worker_that_is_lost_is_not_waited_for(bench: Bench) -> None:
    hello(bench)
    attach(bench, 1)
    claimed(bench, "a")
    bench.send("b", "UNREGISTER", {})
    assert [kind for kind, _ in bench.to_client("c")] == ["ERROR"]


def test_a_broker_that_has_just_started_asks_the_workers_that_register_later() -> None:
    bench = Bench(expiry_s=1000.0, session_expiry_s=1000.0, recover_s=30.0)
    hello(bench)
    assert attach(bench, 1) == []
    bench.worker("a")
    assert kinds(bench, "a") == ["CLAIM"]
    claimed(bench, "a")
    # Another worker may still register.
    assert bench.to_client("c") == []
    bench.worker("b")
    journal(bench, "b", 3)
    assert kinds(bench, "b") == ["CLAIM", "ATTACH"]


def test_of_two_workers_that_have_a_stream_the_one_where_it_moved_last_is_right(
    bench: Bench,
) -> None:
    hello(bench)
    attach(bench, 2, moves=1)
    journal(bench, "a", 5)
    # The second CLAIM makes the worker confirm that it has dropped the stream.
    assert kinds(bench, "a") == ["CLAIM", "CLAIM"]
    journal(bench, "b", 3, moves=1)
    assert kinds(bench, "b") == ["CLAIM", "ATTACH"]


def test_a_stale_copy_is_not_preferred_because_it_was_claimed(bench: Bench) -> None:
    """The client has left the other broker, which then moved a stale copy of the stream to the
    worker a. The CLAIM of this broker adds two moves to the stale copy, but not to the valid copy,
    which this broker had claimed before."""
    hello(bench, encodings=["msgpack"])
    attach(bench, 5, moves=2)
    journal(bench, "a", 3, moves=3, claimed=2)
    assert kinds(bench, "a") == ["CLAIM", "CLAIM"]
    journal(bench, "b", 6, moves=2)
    [(kind, answer), (_, missed)] = bench.to_client("c")
    assert (kind, answer["attached"], answer["moves"]) == ("MSG", 5, 2)
    assert [e["token"] for e in missed] == [105]


def test_the_valid_copy_replaces_a_stale_copy_that_was_reported_before(bench: Bench) -> None:
    hello(bench)
    journal(bench, "a", 3, moves=3, claimed=2)
    journal(bench, "b", 6, moves=2)
    attach(bench, 5, moves=2)
    assert kinds(bench, "b") == ["CLAIM", "ATTACH"]


@pytest.mark.parametrize("attaches_first", [True, False])
def test_a_copy_with_fewer_entries_than_the_client_is_sent_from_its_beginning(
    bench: Bench, attaches_first: bool
) -> None:
    """The workers with later copies are lost. The stale copy may have its entries in another order,
    so that their number does not show which of them the client has."""
    hello(bench, encodings=["msgpack"])
    if attaches_first:
        attach(bench, 5)
        journal(bench, "a", 3, moves=1)
        [(kind, answer), (_, entries)] = bench.to_client("c")
        assert (kind, answer["attached"]) == ("MSG", 0)
        assert [e["token"] for e in entries] == [100, 101, 102]
    else:
        journal(bench, "a", 3, moves=1)
        attach(bench, 5)
        [sent] = [m.frames for m in bench.sent if m.frames[0] == b"ATTACH"]
        assert decode_as(Attach, sent[2]).received == 0
    # From now on this copy is the client's copy.
    bench.sent.clear()
    attach(bench, 2, moves=1)
    [sent] = [m.frames for m in bench.sent if m.frames[0] == b"ATTACH"]
    assert decode_as(Attach, sent[2]).received == 2


def test_a_stream_without_a_worker_is_attached_at_the_entries_that_it_has(bench: Bench) -> None:
    [(_, welcome)] = bench.client("c", "HELLO", {"capabilities": ["recover"]})
    bench.client("c", "GENERATE", generate(1))
    [(_, header)] = bench.to_worker("a")
    bench.tokens("a", header, entry(0), entry(1))
    for name in "ab":
        bench.send(name, "UNREGISTER", {})
    bench.client("c", "HELLO", {"session": welcome["session"], "capabilities": ["recover"]})
    assert [body["attached"] for _, body in attach(bench, 5)] == [2]
    assert [body["attached"] for _, body in attach(bench, 2)] == [2]


@pytest.mark.parametrize(("entries", "moves"), [(3, 2), (9, 0)])
def test_the_end_of_a_stale_copy_is_not_the_end_of_the_stream(
    bench: Bench, entries: int, moves: int
) -> None:
    """The stale copy has fewer entries than the client, or has moved less often."""
    hello(bench)
    journal(bench, "a", entries, moves=moves, ended=True, counted=True)
    assert attach(bench, 5, moves=1) == []
    journal(bench, "b", 6, moves=1)
    assert kinds(bench, "b") == ["CLAIM", "ATTACH"]


@pytest.mark.parametrize("first", ["the end", "the stream", "the client"])
def test_a_stale_copy_that_has_ended_is_not_right_because_it_has_ended(
    bench: Bench, first: str
) -> None:
    """Worker a was cut off, and computed the stream to its end. The stream had moved to worker b,
    and the client has received entries of worker b. Then the client's broker was lost. A worker
    adds two moves to each stream that a broker claims from another one."""
    hello(bench)
    if first == "the client":
        assert attach(bench, 5, moves=1) == []
    reports = [("a", 9, 2, True), ("b", 6, 3, False)]
    for worker, entries, moves, ended in reports if first != "the stream" else reports[::-1]:
        journal(bench, worker, entries, moves=moves, claimed=2, ended=ended, counted=True)
    if first != "the client":
        assert attach(bench, 5, moves=1) == []
    # Worker b continues the stream. Worker a drops its copy, unless the copy was adopted before.
    assert kinds(bench, "b")[:2] == ["CLAIM", "ATTACH"] or first == "the client"
    [request] = bench.broker.state.requests.values()
    assert request.worker is not None
    assert request.worker.name == "b"
    assert not any(session.log.ends for session in bench.broker.state.sessions)


def test_a_copy_that_runs_on_after_the_end_of_a_later_copy_is_dropped(bench: Bench) -> None:
    hello(bench)
    journal(bench, "a", 9, moves=3, claimed=2, ended=True, counted=True)
    journal(bench, "b", 6, moves=2, claimed=2, counted=True)
    # The second CLAIM confirms that the worker has dropped its copy.
    assert kinds(bench, "b") == ["CLAIM", "CLAIM"]
    assert bench.broker.drained


def test_an_end_at_this_broker_is_stale_if_the_stream_has_moved_at_another_one(
    bench: Bench,
) -> None:
    """This broker was stopped, and then ended its copy of the stream with an error, because no
    worker was left. The stream has continued at the broker to which the client went meanwhile."""
    [(_, welcome)] = bench.client("b", "HELLO", {"capabilities": ["recover"]})
    bench.client("b", "GENERATE", generate(1))
    [(_, header)] = bench.to_worker("a")
    bench.sent += bench.broker.on_gone(Side.FRONT, peer_of("b"), bench.now)
    failed = {"code": "internal", "message": "it failed"}
    bench.send("a", "ERROR", failed, Header(header.request, header.address, Flag.FINAL))
    hello(bench, token=welcome["session"])
    assert attach(bench, 5, moves=2) == []
    journal(bench, "b", 6, moves=4, claimed=2, request=header.request, session=header.address)
    assert kinds(bench, "b") == ["CLAIM", "ATTACH"]


def test_what_its_client_does_not_want_any_more_ends(bench: Bench) -> None:
    hello(bench)
    journal(bench, "a", 3)
    claimed(bench, "a", "b")
    bench.pass_time(6.0)
    assert kinds(bench, "a") == ["CLAIM", "CANCEL"]


def test_a_stream_that_its_client_cancelled_before_it_was_reported_is_dropped(
    bench: Bench,
) -> None:
    hello(bench)
    bench.client("c", "CANCEL", {"stream_id": 1})
    journal(bench, "a", 3)
    assert bench.broker.drained


def test_a_session_that_comes_back_gets_what_the_workers_have_now(bench: Bench) -> None:
    [(_, welcome)] = bench.client("b", "HELLO", {"capabilities": ["recover"]})
    bench.client("b", "GENERATE", generate(1))
    [(_, header)] = bench.to_worker("a")
    bench.tokens("a", header, entry(0), entry(1))
    again = hello(bench, "c", welcome["session"])
    assert "streams" not in again
    assert kinds(bench, "a") == ["CLAIM"]
    # Until the worker handles the CLAIM, it sends tokens, which do not reach the client. The
    # worker's answer to the ATTACH contains them again.
    bench.tokens("a", header, entry(2))
    assert bench.to_client("c") == []
    journal(bench, "a", 3, request=header.request, session=header.address)
    claimed(bench, "a", "b", session=header.address)
    attach(bench, 2)
    assert kinds(bench, "a") == ["ATTACH"]
    bench.tokens("a", header, entry(3))
    [(_, entries)] = bench.to_client("c")
    assert [e["token"] for e in entries] == [103]


def test_a_session_that_is_claimed_again_and_again_leaves_no_requests_in_memory(
    bench: Bench,
) -> None:
    """Each claim withdraws the session's requests. A request has up to 16 MiB."""

    def requests() -> int:
        gc.collect()
        live = (each for each in gc.get_objects() if isinstance(each, Request))
        return sum(request.id == REQUEST for request in live)

    before = requests()
    for number in range(5):
        hello(bench, f"c{number}")
        journal(bench, "a", 3)
        claimed(bench, "a", "b")
    assert requests() - before == 1
    # The last request still ends if its client does not attach.
    bench.to_worker("a")
    bench.pass_time(4.0)
    assert kinds(bench, "a") == []
    bench.pass_time(2.0)
    assert kinds(bench, "a") == ["CANCEL"]


def test_a_session_of_this_connection_is_not_claimed(bench: Bench) -> None:
    """The session began on this connection, so it was never at another broker, even if the HELLO
    has the flag ``elsewhere``."""
    [(_, welcome)] = bench.client("c", "HELLO", {"capabilities": ["recover"]})
    bench.client("c", "GENERATE", generate(1))
    [(_, header)] = bench.to_worker("a")
    said = {"session": welcome["session"], "elsewhere": True, "capabilities": ["recover"]}
    [(_, again)] = bench.client("c", "HELLO", said)
    assert (again["resumed"], again["streams"]) == (True, [1])
    assert [kinds(bench, name) for name in "ab"] == [[], []]
    # The stream waits for an ATTACH, as after any HELLO.
    bench.client("c", "ATTACH", {"stream_id": 1, "received": 0})
    assert kinds(bench, "a") == ["ATTACH"]
    bench.tokens("a", header, entry(0))
    assert [kind for kind, _ in bench.to_client("c")] == ["TOKEN"]


@pytest.mark.parametrize("counted", [True, False])
def test_only_the_entries_of_an_earlier_release_are_decoded_to_be_counted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    decoded: list[int] = []
    count = adoption._num_entries

    def noted(sent: bytes) -> int:
        decoded.append(count(sent))
        return decoded[-1]

    monkeypatch.setattr(adoption, "_num_entries", noted)
    hello(bench)
    journal(bench, "a", 3, counted=counted)
    [request] = bench.broker.state.requests.values()
    assert (request.entries, decoded) == (3, [] if counted else [3])


def test_claims_of_other_sessions_are_answered_earlier(bench: Bench) -> None:
    """Before the CLAIMED of this session, the worker answers the CLAIM of another session. The
    fence of this session stays until its own CLAIMED."""
    [(_, welcome)] = bench.client("b", "HELLO", {"capabilities": ["recover"]})
    bench.client("b", "GENERATE", generate(1))
    [(_, header)] = bench.to_worker("a")
    hello(bench, token=welcome["session"])
    hello(bench, "d")
    claimed(bench, "a", session=SESSION)
    bench.tokens("a", header, entry(0))
    assert bench.to_client("c") == []
    [worker] = [w for w in bench.broker.state.workers.values() if w.name == "a"]
    assert worker.fences
    claimed(bench, "a", session=header.address)
    assert not worker.fences


# --- requests that continue at another broker ----------------------------------------------------


def started(bench: Bench) -> Header:
    """Begins a request with a controller, at a broker with a state worker; returns the header of
    the request."""
    bench.worker("s", role="state")
    bench.worker("k", role="controller", patterns=["mine"])
    bench.client("c", "HELLO", {"capabilities": ["recover"]})
    bench.client("c", "GENERATE", generate(1, controller="mine"))
    [(_, header)] = bench.to_worker("a")
    bench.send("a", "START", {}, Header(header.request))
    return header


def test_a_request_that_goes_on_behind_another_broker_ends_silently_here(bench: Bench) -> None:
    header = started(bench)
    bench.to_client("c")
    bench.sent.clear()
    bench.send("a", "RELEASED", Released(requests=[header.request]))
    assert bench.broker.drained
    assert bench.to_client("c") == []
    ends = {m.peer: msgpack.decode(m.frames[2], type=End) for m in bench.sent}
    assert ends[peer_of("k")] == End(requests=[header.request])
    # The other broker's attempt needs the request's variables.
    assert ends[peer_of("s")] == End(requests=[header.request], elsewhere=True)


def test_a_request_that_has_ended_for_its_client_may_go_on_at_another_broker(bench: Bench) -> None:
    """The client has ended its session, and the worker has not reported the end of the request
    yet."""
    bench.client("c", "HELLO", {"capabilities": ["recover"]})
    bench.client("c", "GENERATE", generate(1))
    [(_, header)] = bench.to_worker("a")
    bench.client("c", "BYE", {})
    assert not bench.broker.drained
    bench.send("a", "RELEASED", Released(requests=[header.request]))
    assert bench.broker.drained
    check_empty(bench.broker)


@pytest.mark.parametrize("leaves", [False, True])
def test_the_state_worker_gets_whether_a_request_ended_without_its_client(
    bench: Bench, leaves: bool
) -> None:
    """If the client has left, this attempt may be a copy, and another copy may run for the client's
    broker."""
    header = started(bench)
    if leaves:
        bench.client("c", "BYE", {"keep": True})
    bench.sent.clear()
    bench.tokens("a", header, final=True)
    [frames] = [m.frames for m in bench.sent if m.peer == peer_of("s")]
    ended = msgpack.decode(frames[2], type=End)
    assert ended == End(requests=[header.request], detached=leaves)


def test_only_its_own_worker_releases_a_request(bench: Bench) -> None:
    bench.client("c", "GENERATE", generate(1))
    [(_, header)] = bench.to_worker("a")
    bench.send("b", "RELEASED", Released(requests=[header.request]))
    assert not bench.broker.drained


# --- capacity -------------------------------------------------------------------------------------


def test_requests_of_other_brokers_count_towards_a_worker_s_load(bench: Bench) -> None:
    bench.send("a", "HEARTBEAT", Heartbeat(requests=1, elsewhere=1))
    for stream in (1, 2, 3):
        bench.client("c", "GENERATE", generate(stream))
    assert (len(kinds(bench, "a")), len(kinds(bench, "b"))) == (1, 2)
    # All places of both workers are used.
    bench.to_client("c")
    [(kind, notice)] = bench.client("c", "GENERATE", generate(4))
    assert (kind, notice["event"]) == ("SYSTEM", "queued")
    bench.send("a", "HEARTBEAT", Heartbeat(requests=1, elsewhere=0))
    assert kinds(bench, "a") == ["GENERATE"]


def refuse(bench: Bench, worker: str, header: Header, kind: str, *frames: bytes) -> None:
    """A worker refuses a message because other brokers' requests use all of its places."""
    body = encode_body(Refused(type=kind, elsewhere=2), "msgpack")
    message = [b"REFUSED", encode_header(header.request), body, *frames]
    bench.sent += bench.broker.on_worker(peer_of(worker), message, bench.now)


def test_a_request_that_a_worker_refuses_goes_to_another_one(bench: Bench) -> None:
    bench.client("c", "GENERATE", generate(1))
    [message] = [m for m in bench.sent if m.peer == peer_of("a") and m.frames[0] == b"GENERATE"]
    [(_, header)] = bench.to_worker("a")
    refuse(bench, "a", header, "GENERATE", *message.frames[2:])
    [(kind, again)] = bench.to_worker("b")
    assert (kind, again.request) == ("GENERATE", header.request)
    assert bench.to_client("c") == []
    bench.tokens("b", again, entry(0), final=True)
    assert bench.broker.drained


@pytest.mark.parametrize("journal_bytes", [0, 1024 * 1024])
def test_a_request_that_all_workers_refuse_waits_until_one_has_room(journal_bytes: int) -> None:
    bench = Bench(expiry_s=1000.0, max_journal_bytes=journal_bytes)
    bench.worker("a")
    bench.client("c", "GENERATE", generate(1))
    [message] = [m for m in bench.sent if m.frames[0] == b"GENERATE"]
    [(_, header)] = bench.to_worker("a")
    refuse(bench, "a", header, "GENERATE", *message.frames[2:])
    [(kind, notice)] = bench.to_client("c")
    assert (kind, notice["event"]) == ("SYSTEM", "queued")
    bench.send("a", "HEARTBEAT", Heartbeat(requests=0, elsewhere=0))
    [again] = [m for m in bench.sent if m.frames[0] == b"GENERATE"]
    assert again.frames[2:] == message.frames[2:]


def test_a_start_that_a_controller_worker_refuses_goes_to_another_one(bench: Bench) -> None:
    for name in ("k", "l"):
        bench.worker(name, role="controller", patterns=["mine"])
    bench.client("c", "GENERATE", generate(1, controller="mine"))
    [(_, header)] = bench.to_worker("a")
    bench.send("a", "START", {"x": 1}, Header(header.request))
    [(_, started)] = bench.to_worker("k")
    refuse(bench, "k", started, "START", encode_body({"x": 1}, "msgpack"), b"")
    [(kind, again)] = bench.to_worker("l")
    assert (kind, again.request) == ("START", header.request)


def test_one_connection_has_one_claim_at_the_workers_at_a_time(bench: Bench) -> None:
    tokens = [f"{number:032x}" for number in range(50)]
    for token in tokens:
        hello(bench, token=token)
    # Each HELLO ended the previous session. Only the claim of the first session has begun.
    assert [kind for kind, _ in bench.to_worker("a")] == ["CLAIM"]
    for worker in ("a", "b"):
        bench.send(worker, "CLAIMED", Claimed(session=session_id(tokens[0])))
    assert [kind for kind, _ in bench.to_worker("a")] == ["CLAIM"]
    for worker in ("a", "b"):
        bench.send(worker, "CLAIMED", Claimed(session=session_id(tokens[-1])))
    assert bench.to_worker("a") == []
    assert not bench.broker.adoption._claims.sessions


def test_connections_take_turns_with_their_claims(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "MAX_CLAIMS", 2)
    tokens = [f"{number:032x}" for number in range(5)]
    for number, token in enumerate(tokens):
        hello(bench, f"c{number}", token)
    assert len(bench.to_worker("a")) == 2
    # A worker that hangs delays the claims of others only for a short time.
    for worker in ("a", "b"):
        bench.send(worker, "CLAIMED", Claimed(session=session_id(tokens[0])))
    assert len(bench.to_worker("a")) == 1
    bench.pass_time(1.0)
    assert len(bench.to_worker("a")) == 2
    # An ATTACH waits for the turn of its session.
    assert bench.client("c4", "ATTACH", {"stream_id": 1, "received": 0}) == []


def test_a_connection_that_leaves_many_sessions_delays_the_claims_of_no_other(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "MAX_CLAIMS", 2)
    for number in range(10):
        hello(bench, "c", f"{number:032x}")
        bench.client("c", "BYE", {"keep": True})
    assert kinds(bench, "a") == ["CLAIM"]
    hello(bench, "d", f"{10:032x}")
    assert kinds(bench, "a") == ["CLAIM"]
    # The claims of this client's sessions are sent one after the other.
    for number in range(10):
        for worker in ("a", "b"):
            bench.send(worker, "CLAIMED", Claimed(session=session_id(f"{number:032x}")))
        assert len(kinds(bench, "a")) == (number < 9)


def test_a_session_that_is_claimed_again_meanwhile_is_asked_for_once_more(bench: Bench) -> None:
    hello(bench)
    hello(bench, "d")
    assert len(bench.to_worker("a")) == 1
    bench.client("d", "ATTACH", {"stream_id": 1, "received": 0})
    for answers in (1, 2):
        for worker in ("a", "b"):
            bench.send(worker, "CLAIMED", Claimed(session=SESSION))
        assert len(bench.to_worker("a")) == 2 - answers
    [error] = [b for k, b in bench.to_client("d") if k == "ERROR"]
    assert error["code"] == "unknown_stream"


@pytest.mark.parametrize("together", [True, False])
def test_what_waits_for_workers_to_report_is_bounded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    """The numbers of held ATTACHes and CANCELs for unreported streams are bounded, for each session
    and in total."""
    if together:
        monkeypatch.setattr(attaches, "MAX_AWAITED", 20)
    else:
        bench = Bench(max_streams=10)
        bench.worker("a")
    hello(bench)
    answers = []
    for stream in range(100):
        answers += bench.client("c", "ATTACH", {"stream_id": stream, "received": 0})
        bench.client("c", "CANCEL", {"stream_id": 1000 + stream})
    assert {b["code"] for _, b in answers} == {"client_limit"}
    part = bench.broker.adoption._attaches
    assert (len(answers), part._num_awaited) == (95, 10)
    bench.client("c", "BYE")
    bench.pass_time(1.0)
    assert part._num_awaited == 0


def test_the_attaches_that_a_worker_has_not_answered_are_bounded(bench: Bench) -> None:
    bench.client("c", "HELLO", {})
    bench.client("c", "GENERATE", generate(1))
    for _ in range(attaches.MAX_ATTACHING):
        assert bench.client("c", "ATTACH", {"stream_id": 1, "received": 0}) == []
    [(_, error)] = bench.client("c", "ATTACH", {"stream_id": 1, "received": 0})
    assert error["code"] == "client_limit"
