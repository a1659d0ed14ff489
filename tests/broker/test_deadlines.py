"""``timeout_s`` applies to a request in the queue, at its worker, between workers, and at a
restarted broker. (The tests of workers cover the effect of a CANCEL.)"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tokenbus.broker.outgoing import Side
from tokenbus.broker.request import CancelReason
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.header import Flag, Header, encode_header
from tokenbus.protocol.messages import Cancel
from tokenbus.protocol.worker_messages import Journal, LiveRequest, Register

from ..worlds.broker import Bench, generate, peer_of

LIMIT_S = 3.0


@pytest.fixture
def bench() -> Bench:
    return Bench(expiry_s=1000.0, session_grace_s=1000.0)


def begin(bench: Bench, stream: int = 1, **fields: Any) -> None:
    bench.client("c", "GENERATE", generate(stream, timeout_s=LIMIT_S, **fields))


def ends(bench: Bench, client: str = "c") -> list[tuple[int, str]]:
    """The streams that have ended for a client, with their finish reasons."""
    found = []
    for kind, body in bench.to_client(client):
        assert kind in ("TOKEN", "SYSTEM", "MSG", "WELCOME"), body
        if kind == "TOKEN":
            found += [(e["stream_id"], e["finish_reason"]) for e in body if e["finish_reason"]]
    return found


def cancelled(bench: Bench, worker: str) -> list[CancelReason]:
    """The reasons in the CANCELs to a worker."""
    mine = [m for m in bench.sent if m.peer == peer_of(worker) and m.frames[0] == b"CANCEL"]
    bench.sent = [m for m in bench.sent if m not in mine]
    return [msgspec.msgpack.decode(m.frames[2], type=Cancel).reason for m in mine]


def gone(bench: Bench, worker: str) -> None:
    bench.sent += bench.broker.on_gone(Side.BACK, peer_of(worker), bench.now)


def test_it_is_known_when_the_next_one_passes_and_it_is_not_waited_for_a_tick(bench: Bench) -> None:
    broker, began = bench.broker, bench.now
    bench.worker("a", capacity=8)
    assert broker.due_at == float("inf")
    begin(bench, 1)
    bench.client("c", "GENERATE", generate(2, timeout_s=0.1))
    bench.client("c", "GENERATE", generate(3))
    assert broker.due_at == pytest.approx(began + 0.1)
    bench.now = began + 0.11
    bench.sent += broker.expire(bench.now)
    assert cancelled(bench, "a") == ["timeout"]
    bench.client("c", "CANCEL", {"stream_id": 1})
    assert broker.due_at <= began + LIMIT_S


def test_while_it_is_queued(bench: Bench) -> None:
    bench.worker("a", capacity=1)
    bench.client("c", "GENERATE", generate(0))
    begin(bench)
    bench.pass_time(LIMIT_S - 0.5)
    assert ends(bench) == []
    bench.pass_time(1.0)
    assert ends(bench) == [(1, "timeout")]
    assert bench.broker.state.num_queued == 0


def test_while_its_worker_loads_prefills_decodes_or_waits_for_a_decision(bench: Bench) -> None:
    """The broker cancels a request in the same way in each of these cases."""
    bench.worker("a")
    begin(bench)
    bench.pass_time(LIMIT_S - 0.5)
    assert cancelled(bench, "a") == []
    bench.pass_time(1.0)
    assert cancelled(bench, "a") == ["timeout"]


def test_while_its_worker_is_silent(bench: Bench) -> None:
    """A stream whose worker is lost after the deadline does not move."""
    bench.worker("a")
    bench.worker("b")
    begin(bench)
    bench.pass_time(LIMIT_S + 0.5)
    assert ends(bench) == []
    gone(bench, "a")
    assert ends(bench) == [(1, "timeout")]
    assert [kind for kind, _ in bench.to_worker("b")] == []


def test_while_its_controller_waits_for_a_worker(bench: Bench) -> None:
    bench.worker("a")
    bench.worker("python", role="controller", patterns=["mine"], default="")
    begin(bench, controller="mine")
    [(_, header)] = bench.to_worker("a")
    gone(bench, "python")
    bench.send("a", "START", {}, Header(header.request))
    bench.pass_time(LIMIT_S + 0.5)
    assert cancelled(bench, "a") == ["timeout"]
    bench.tokens("a", header, final=True)
    # The request's START does not wait any more.
    bench.worker("python", role="controller", patterns=["mine"], default="")
    assert bench.to_worker("python") == []


def test_while_it_waits_to_move(bench: Bench) -> None:
    bench.worker("a")
    begin(bench)
    gone(bench, "a")
    bench.pass_time(LIMIT_S + 0.5)
    assert ends(bench) == [(1, "timeout")]
    bench.worker("b")
    assert bench.to_worker("b") == []
    assert bench.broker.state.requests == {}


def test_while_it_waits_as_another_request_is_suspected_of_killing_workers(bench: Bench) -> None:
    bench.worker("a", capacity=8)
    bench.client("c", "GENERATE", generate(0, timeout_s=LIMIT_S))
    begin(bench)
    for lost, following in (("a", "b"), ("b", "d")):
        bench.worker(following, capacity=8)
        gone(bench, lost)
    # Both requests are suspects. The broker restarts one of them, and the other one waits.
    assert len(bench.broker.state.waiting) == 1
    bench.pass_time(LIMIT_S + 0.5)
    [(_, reason)] = ends(bench)
    assert reason == "timeout"
    assert cancelled(bench, "d") == ["timeout"]


@pytest.mark.parametrize("age_s", [1.0, 60.0])
def test_while_its_broker_was_away(bench: Bench, age_s: float) -> None:
    """The time-out counts from the request's arrival at the first broker."""
    [(_, welcome)] = bench.client("c", "HELLO", {"capabilities": ["recover"]})
    [session] = bench.broker.state.sessions
    after = Bench(recover_s=30.0, expiry_s=1000.0, session_grace_s=1000.0)
    live = [LiveRequest(request=7, session=session.id, stream_id=1)]
    after.send(
        "a",
        "REGISTER",
        Register(name="a", role="gpu", version=1, pid=1, host="h", capacity=2, live=live),
    )
    body = Journal(type="GENERATE", age_s=age_s)
    frames = [
        b"JOURNAL",
        encode_header(7, session.id, Flag.MSGPACK),
        encode_body(body, "msgpack"),
        encode_body([], "msgpack"),
        msgspec.json.encode(generate(1, timeout_s=LIMIT_S)),
    ]
    after.sent += after.broker.on_worker(peer_of("a"), frames, after.now)
    after.client("c", "HELLO", {"capabilities": ["recover"], "session": welcome["session"]})
    after.client("c", "ATTACH", {"stream_id": 1, "received": 0})
    after.pass_time(0.5)
    assert cancelled(after, "a") == (["timeout"] if age_s > LIMIT_S else [])
    after.pass_time(LIMIT_S - age_s + 0.5)
    assert len(cancelled(after, "a")) == (0 if age_s > LIMIT_S else 1)
