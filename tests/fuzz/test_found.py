"""Defects that fuzzing has found, each with a short input or sequence of messages that failed."""

from __future__ import annotations

import msgspec
import pytest
from starlette.datastructures import Headers
from tokenbus.clients.gateway.users.security import keys_of
from tokenbus.clients.session import ClientSession
from tokenbus.protocol.bodies import decode_as
from tokenbus.protocol.errors import RequestError
from tokenbus.protocol.header import Header
from tokenbus.protocol.messages import Error
from tokenbus.protocol.worker_messages import Registered

from ..worlds.broker import Bench, generate


@pytest.mark.parametrize("ping_s", [0.0, -1.0, 1e-300, float("nan"), float("inf")])
def test_a_broker_cannot_make_a_client_send_pings_without_a_pause(ping_s: float) -> None:
    session = ClientSession("tcp://front", 10.0, 0.0)
    session.connected(0.0)
    welcome = {"version": 1, "encoding": "json", "session": "t", "ping_s": ping_s}
    session.on_frames([b"WELCOME", msgspec.msgpack.encode(welcome)], 0.0)
    session.on_time(1.0)
    assert session.wait_s(1.0) > 0


@pytest.mark.parametrize("heartbeat_s", [0.0, float("nan"), 1e300])
def test_a_broker_cannot_make_a_worker_send_heartbeats_without_a_pause(heartbeat_s: float) -> None:
    body = {"worker": 1, "heartbeat_s": heartbeat_s, "expiry_s": 5.0}
    with pytest.raises(RequestError, match="heartbeat_s"):
        decode_as(Registered, msgspec.msgpack.encode(body), "msgpack")


@pytest.mark.parametrize("pause", [-1.0, float("nan"), 1e300])
def test_a_broker_cannot_make_a_client_wait_for_ever_before_it_tries_again(pause: float) -> None:
    body = {"code": "queue_full", "message": "full", "retry_after_s": pause}
    with pytest.raises(RequestError, match="retry_after_s"):
        decode_as(Error, msgspec.msgpack.encode(body), "msgpack")


@pytest.mark.parametrize("password", [b"\xff", b"dXNlcjr/", b"abc"])
def test_a_key_that_is_not_base64_is_no_internal_error(password: bytes) -> None:
    headers = Headers(raw=[(b"authorization", b"Basic " + password)])
    assert not any(keys_of({"type": "http"}, headers))


def test_a_connection_is_one_worker_whatever_names_it_registers_with() -> None:
    """Before the fix, the second REGISTER added a worker. The first worker's lease never ended, and
    its streams waited forever."""
    bench = Bench()
    bench.worker("a")
    register = {"role": "gpu", "version": 1, "pid": 1, "host": "h", "capacity": 2}
    bench.send("a", "REGISTER", {"name": "another", **register})
    assert [worker.name for worker in bench.broker.state.workers.values()] == ["another"]


def test_a_worker_starts_no_controller_of_a_request_that_names_none() -> None:
    """Before the fix, the START waited for a controller worker, and then used one of its places
    forever."""
    bench = Bench()
    bench.worker("a")
    bench.client("c", "GENERATE", generate(1))
    [(_, header)] = bench.to_worker("a")
    bench.send("a", "START", {}, Header(header.request))
    bench.client("c", "BYE")
    bench.tokens("a", header, final=True)
    bench.worker("steers", role="controller", patterns=["*"])
    assert not any(worker.steers for worker in bench.broker.state.workers.values())
