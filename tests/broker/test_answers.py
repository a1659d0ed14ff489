"""The answer to an ATTACH to a stream that has ended is sent in parts, with a bounded number of
bytes in each tick."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import pytest
from tokenbus.broker import answers, chunks
from tokenbus.broker.outgoing import Outgoing, Side
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.columns import TokenBody
from tokenbus.protocol.header import Flag, Header, encode_header, encode_token_header
from tokenbus.protocol.messages import Attach

from ..lmtp.transports import ZeroMQ
from ..processes import Bus
from ..worlds.broker import Bench, peer_of
from .invariants import check, check_empty
from .test_ends import HELLO, attach, back, begun, entry, gone, ids, opened, ping

ENTRIES = 200
EVERYTHING = list(range(ENTRIES))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sets small budgets, so that the entries of a stream of ``ENTRIES`` take tens of ticks.
    Returns a list, to which the size in bytes of each decoded chunk is added."""
    monkeypatch.setattr(answers, "PASS_BYTES", 4096)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1024)
    sizes: list[int] = []
    decode = chunks.Chunk.bodies

    def counted(chunk: chunks.Chunk) -> Iterable[TokenBody]:
        sizes.append(chunk.size)
        return decode(chunk)

    monkeypatch.setattr(chunks.Chunk, "bodies", counted)
    return sizes


@pytest.fixture
def bench(decoded: list[int]) -> Iterator[Bench]:
    bench = Bench(expiry_s=10_000.0, session_expiry_s=10_000.0)
    bench.worker("a", capacity=9)
    yield bench
    check(bench.broker)


def ended(bench: Bench, name: str = "c", stream: int = 1, key: str = "") -> str:
    """Makes a session with an ended stream of ``ENTRIES`` entries, and closes the session's
    connection; returns the session's token."""
    [(_, welcome)] = bench.client(name, "HELLO", HELLO, key)
    bench.client(name, "GENERATE", {"stream_id": stream, "model": "m", "prompt": [1]}, key)
    [header] = [header for kind, header in bench.to_worker("a") if kind == "GENERATE"]
    *most, last = [entry(number, stream) for number in EVERYTHING]
    last.finish_reason = "length"
    for one in most:
        bench.tokens("a", header, one)
    bench.tokens("a", header, last, final=True)
    bench.to_client(name)
    gone(bench, name)
    token: str = welcome["session"]
    return token


def rest(bench: Bench, name: str = "d", ticks: int = 500) -> list[list[tuple[str, Any]]]:
    """The messages of each tick, up to the tick in which the broker has sent all answers."""
    found: list[list[tuple[str, Any]]] = []
    while bench.broker._ends.answers.behind:
        assert len(found) < ticks
        bench.pass_time(0.25)
        found.append(bench.to_client(name))
    return found


def joined(parts: list[list[tuple[str, Any]]]) -> list[tuple[str, Any]]:
    return list(chain.from_iterable(parts))


def tokens_of(messages: list[tuple[str, Any]]) -> list[int]:
    return [token for kind, body in messages if kind == "TOKEN" for token in ids(body)]


def test_a_large_answer_is_sent_in_parts(bench: Bench, decoded: list[int]) -> None:
    back(bench, ended(bench))
    first = attach(bench, received=3)
    assert first[0] == ("MSG", {"stream_id": 1, "attached": 3})
    before = ping(bench)
    passes = [first[1:]]
    while bench.broker._ends.answers.behind:
        del decoded[:]
        bench.pass_time(0.25)
        passes.append(bench.to_client("d"))
        assert sum(decoded) <= 4096 + 2 * 1024
    assert len([part for part in passes if part]) > 5
    assert tokens_of(joined(passes)) == EVERYTHING[3:]
    after = ping(bench)
    assert after == before + 1, "the end has its position when it is sent"
    ping(bench, ack=after)
    check_empty(bench.broker)


def test_a_broker_that_is_behind_ticks_soon_and_is_not_drained(bench: Bench) -> None:
    back(bench, ended(bench))
    attach(bench, received=0)
    assert bench.broker.wait_s(bench.now) < bench.broker.settings.tick_s
    assert not bench.broker.drained
    rest(bench)
    assert bench.broker.drained


def test_entries_that_the_client_has_are_not_sent_again(bench: Bench) -> None:
    token = ended(bench)
    back(bench, token)
    attach(bench, received=0)
    rest(bench)
    for name, received in (("e", 10**9), ("f", ENTRIES - 2)):
        back(bench, token, name)
        answer, *parts = attach(bench, received=received, name=name)
        assert answer == ("MSG", {"stream_id": 1, "attached": received})
        assert tokens_of(joined([parts, *rest(bench, name)])) == EVERYTHING[received:]


def test_a_hello_of_the_same_connection_is_not_a_takeover(bench: Bench) -> None:
    token = ended(bench)
    back(bench, token)
    attach(bench, received=ENTRIES - 1)
    rest(bench)
    [session] = bench.broker.state.sessions
    since, position = session.log.ends[1].since, session.log.ends[1].position
    bench.pass_time(1.0)
    for _ in range(3):
        assert back(bench, token) == [1]
        [(kind, error)] = attach(bench, received=0)
        assert (kind, error["code"]) == ("ERROR", "unknown_stream")
    end = session.log.ends[1]
    assert (end.since, end.position) == (since, position)
    ping(bench, ack=position)
    check_empty(bench.broker)


def test_a_hello_of_the_same_connection_stops_an_answer_until_the_next_attach(
    bench: Bench,
) -> None:
    token = ended(bench)
    back(bench, token)
    attach(bench, received=0)
    bench.pass_time(1.0)
    assert bench.broker._ends.answers.behind
    bench.to_client("d")
    assert back(bench, token) == [1]
    bench.pass_time(0.5)
    assert bench.to_client("d") == []
    again = [attach(bench, received=9), *rest(bench)]
    assert tokens_of(joined(again)) == EVERYTHING[9:]


def test_each_attach_is_answered_and_the_last_one_gets_the_entries(bench: Bench) -> None:
    back(bench, ended(bench))
    attach(bench, received=0)
    bench.pass_time(1.0)
    had = tokens_of(bench.to_client("d"))
    assert had == EVERYTHING[: len(had)]
    second, *parts = attach(bench, received=7)
    assert second == ("MSG", {"stream_id": 1, "attached": 7})
    assert tokens_of(joined([parts, *rest(bench)])) == EVERYTHING[7:]


def test_an_answer_whose_connection_is_lost_begins_again(bench: Bench) -> None:
    token = ended(bench)
    back(bench, token)
    attach(bench, received=0)
    bench.pass_time(1.0)
    gone(bench, "d")
    bench.pass_time(0.5)
    assert not bench.broker._ends.answers.behind
    assert back(bench, token, "e") == [1]
    parts = [attach(bench, received=0, name="e"), *rest(bench, "e")]
    assert tokens_of(joined(parts)) == EVERYTHING


@pytest.mark.parametrize("keyed", [True, False])
def test_clients_take_turns(bench: Bench, keyed: bool) -> None:
    """With keys, the sessions of a key share the key's turns. Together they delay another client as
    much as one session would."""
    keys = ["k"] * 3 if keyed else [""] * 3
    greedy = [(f"g{i}", ended(bench, f"c{i}", key=key), key) for i, key in enumerate(keys)]
    token = ended(bench, "v", key="other" if keyed else "")
    for name, taken, key in greedy:
        bench.client(name, "HELLO", HELLO | {"session": taken}, key)
        bench.client(name, "ATTACH", {"stream_id": 1, "received": 0}, key)
    key = "other" if keyed else ""
    bench.client("d", "HELLO", HELLO | {"session": token}, key)
    got = bench.client("d", "ATTACH", {"stream_id": 1, "received": 0}, key)
    ticks = 0
    while len(tokens_of(got)) < ENTRIES:
        bench.pass_time(0.25)
        got += bench.to_client("d")
        ticks += 1
        assert ticks < 500
    assert tokens_of(got) == EVERYTHING
    left = [len(tokens_of(bench.to_client(name))) for name, _, _ in greedy]
    if keyed:
        assert sum(left) <= ENTRIES + 50
    rest(bench)
    for number, (name, _, _) in enumerate(greedy):
        assert left[number] + len(tokens_of(bench.to_client(name))) == ENTRIES


def test_a_client_that_does_not_read_an_answer_gets_one_error(bench: Bench) -> None:
    back(bench, ended(bench))
    attach(bench, received=0)
    parts: list[Outgoing] = []
    while not parts:
        bench.now += 0.25
        out = bench.broker.tick(bench.now)
        parts = [m for m in out if m.side is Side.FRONT and m.frames[0] == b"TOKEN"]
    bench.sent += bench.broker.on_full(parts[0])
    messages = joined(rest(bench))
    bench.pass_time(1.0)
    messages += bench.to_client("d")
    [(kind, error)] = [m for m in messages if m[0] == "ERROR"]
    assert messages[-1][0] == "ERROR", "no entry follows"
    assert (kind, error["code"], error["stream_id"]) == ("ERROR", "slow_client", 1)
    ping(bench, ack=ping(bench))
    check_empty(bench.broker)


def test_an_answer_whose_entries_are_given_up_ends_with_an_error(bench: Bench) -> None:
    back(bench, ended(bench))
    attach(bench, received=0)
    bench.pass_time(1.0)
    bench.to_client("d")
    [session] = bench.broker.state.sessions
    bench.broker._moves._give_up(session.log)
    [[(kind, error)]] = [messages for messages in rest(bench) if messages]
    assert (kind, error["code"], error["stream_id"]) == ("ERROR", "connection_lost", 1)
    check_empty(bench.broker)


def test_a_cancelled_answer_is_not_continued(bench: Bench) -> None:
    back(bench, ended(bench))
    attach(bench, received=0)
    bench.client("d", "CANCEL", {"stream_id": 1})
    assert joined(rest(bench)) == []
    check_empty(bench.broker)


def test_an_entry_that_cannot_be_decoded_ends_the_answer_with_an_error(bench: Bench) -> None:
    token = opened(bench)
    header = begun(bench)
    frames = [b"TOKEN", encode_token_header([header.address]), b"[{}]"]
    bench.sent += bench.broker.on_worker(peer_of("a"), frames, bench.now)
    bench.tokens("a", header, entry(1, reason="stop"), final=True)
    bench.to_client("c")
    back(bench, token)
    kinds = [attach(bench, received=0), *rest(bench)]
    assert [(kind, body.get("code")) for kind, body in joined(kinds)] == [
        ("MSG", None),
        ("ERROR", "connection_lost"),
    ]


def test_an_error_follows_all_parts(bench: Bench) -> None:
    token = opened(bench)
    header = begun(bench)
    for number in EVERYTHING:
        bench.tokens("a", header, entry(number))
    gone(bench, "c")
    error = {"code": "internal", "message": "m", "stream_id": 1}
    head = encode_header(header.request, header.address, Flag.FINAL)
    body = encode_body(error, "msgpack")
    bench.sent += bench.broker.on_worker(peer_of("a"), [b"ERROR", head, body], bench.now)
    back(bench, token)
    messages = joined([attach(bench, received=0), *rest(bench)])
    assert tokens_of(messages) == EVERYTHING
    assert [kind for kind, _ in messages if kind != "TOKEN"] == ["MSG", "ERROR"]
    assert messages[-1][0] == "ERROR"


@pytest.mark.parametrize("received", [0, 3, 150])
def test_entries_that_a_worker_sent_again_are_answered_once(bench: Bench, received: int) -> None:
    token = opened(bench)
    header = begun(bench)
    for number in EVERYTHING[:100]:
        bench.tokens("a", header, entry(number))
    for name, position in (("d", 90), ("e", 40), ("f", 60)):
        back(bench, token, name)
        attach(bench, received=position, name=name)
        answer = {"stream_id": 1, "attached": position}
        bench.send("a", "MSG", answer, Header(header.request, header.address))
        bench.tokens("a", header, *(entry(number) for number in EVERYTHING[position:100]))
    *most, last = EVERYTHING[100:]
    bench.tokens("a", header, *map(entry, most))
    bench.tokens("a", header, entry(last, reason="stop"), final=True)
    back(bench, token, "h")
    parts = [attach(bench, received=received, name="h"), *rest(bench, "h")]
    assert tokens_of(joined(parts)) == EVERYTHING[received:]


def test_the_entries_of_a_moved_stream_are_read_in_parts(bench: Bench, decoded: list[int]) -> None:
    token = opened(bench)
    header = begun(bench)
    bench.tokens("a", header, *map(entry, EVERYTHING[:-1]))
    gone(bench, "a", Side.BACK)
    bench.worker("b", capacity=9)
    [moved] = [header for kind, header in bench.to_worker("b") if kind == "GENERATE"]
    bench.tokens("b", moved, entry(EVERYTHING[-1], reason="stop"), final=True)
    gone(bench, "c")
    del decoded[:]
    back(bench, token)
    parts = [attach(bench, received=0), *rest(bench)]
    assert tokens_of(joined(parts)) == EVERYTHING
    assert len(decoded) > 5
    assert max(decoded) < 3 * 1024


def test_attaches_that_arrive_together_are_answered_with_one_reading(
    bench: Bench, decoded: list[int]
) -> None:
    token = opened(bench)
    headers = [begun(bench, stream) for stream in range(1, 9)]
    for number in EVERYTHING[:20]:
        for header, stream in zip(headers, range(1, 9), strict=True):
            bench.tokens("a", header, entry(number, stream))
    for header, stream in zip(headers, range(1, 9), strict=True):
        bench.tokens("a", header, entry(20, stream, "stop"), final=True)
    gone(bench, "c")
    back(bench, token)
    del decoded[:]
    attaches = [
        (peer_of("d"), [b"ATTACH", encode_body(Attach(stream_id=stream, received=5), "msgpack")])
        for stream in range(1, 9)
    ]
    bench.sent += bench.broker.on_clients(attaches, bench.now)
    messages = joined([bench.to_client("d"), *rest(bench)])
    got = [each for kind, body in messages if kind == "TOKEN" for each in body]
    for stream in range(1, 9):
        assert [each["token"] for each in got if each["stream_id"] == stream] == EVERYTHING[5:21]
    [session] = bench.broker.state.sessions
    assert len(decoded) == len(session.log._chunks), "each chunk is decoded once"


@pytest.mark.process
def test_a_large_stream_of_a_real_broker_is_answered_completely(bus: Bus) -> None:
    first, second, third = (ZeroMQ(bus.front) for _ in range(3))
    token = first.hello(capabilities=["ack"])["session"]
    options: dict[str, Any] = {"n": 2, "max_tokens": 250, "top_logprobs": 256, "ignore_eos": True}
    stream_id = first.begin("GENERATE", prompt=[5, 6, 7], temperature=1.0, **options)
    expected = first.rest_of(stream_id)
    first.close()
    for client, received in ((second, 0), (third, 200)):
        client.hello(session=token, capabilities=["ack"])
        client.send("ATTACH", stream_id=stream_id, received=received)
        assert client.receive()[1]["attached"] == received
        entries = client.receive()[1]
        assert len(entries) < len(expected) - received, "the answer has several parts"
        entries += client.rest_of(stream_id)
        assert entries == expected[received:]
        client.close()
