"""Two clients with keys, over real sockets: a tenant cannot reach another tenant's objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from tokenbus.clients import OwnKey
from tokenbus.transport.dealer import open_dealer

from ..processes import until
from ..worlds.keyed_broker import WAIT_MS, KeyedBroker


class Raw:
    """A client whose JSON messages the test writes itself."""

    def __init__(self, broker: KeyedBroker, key: OwnKey) -> None:
        self.socket = open_dealer(zmq.Context.instance(), broker.front, key=key)
        self.socket.rcvtimeo = WAIT_MS

    def ask(self, kind: bytes, body: dict[str, Any], answer: bytes, *attached: bytes) -> Any:
        """Sends a message; returns the body of the next message of type ``answer``."""
        self.socket.send_multipart([kind, msgspec.json.encode(body), *attached])
        while True:
            frames = self.socket.recv_multipart()
            if frames[0] == answer:
                return msgspec.json.decode(frames[1])

    def refused(self, kind: bytes, body: dict[str, Any]) -> str:
        """The code of the error that answers a message."""
        error: dict[str, Any] = self.ask(kind, body, b"ERROR")
        return str(error["code"])


@pytest.fixture(scope="module")
def broker() -> Iterator[KeyedBroker]:
    with KeyedBroker() as broker:
        yield broker


@pytest.fixture(scope="module")
def keys(broker: KeyedBroker) -> tuple[OwnKey, OwnKey]:
    ann, ben = broker.new_key("ann"), broker.new_key("ben")
    ring = broker.server.core.state.keyring
    until(lambda: ring.admits("client", ben.public), 300.0, "the broker knows both keys")
    return ann, ben


@pytest.fixture
def ann(broker: KeyedBroker, keys: tuple[OwnKey, OwnKey]) -> Iterator[Raw]:
    """A client with Ann's key, and a worker that receives its streams and sends no tokens."""
    worker = broker.worker(OwnKey.read(broker.keys.own("worker")), "w")
    raw = Raw(broker, keys[0])
    yield raw
    raw.socket.close(0)
    worker.close()


@pytest.fixture
def ben(broker: KeyedBroker, keys: tuple[OwnKey, OwnKey]) -> Iterator[Raw]:
    raw = Raw(broker, keys[1])
    yield raw
    raw.socket.close(0)


def test_a_session_of_another_tenant_cannot_be_taken_over(ann: Raw, ben: Raw) -> None:
    token = ann.ask(b"HELLO", {}, b"WELCOME")["session"]
    ann.socket.send_multipart([b"GENERATE", b'{"stream_id": 7, "model": "m", "prompt": [1]}'])
    taken = ben.ask(b"HELLO", {"session": token, "capabilities": ["recover"]}, b"WELCOME")
    # Ben gets a session of his own, even if it has the same token.
    assert not taken.get("resumed")
    assert not taken.get("streams")
    # Ann's connection still has the session.
    assert ann.ask(b"PING", {"n": 1}, b"PONG").get("session", True)


def test_a_stream_of_another_tenant_cannot_be_attached_or_cancelled(
    broker: KeyedBroker, ann: Raw, ben: Raw
) -> None:
    ann.ask(b"HELLO", {}, b"WELCOME")
    ann.socket.send_multipart([b"GENERATE", b'{"stream_id": 8, "model": "m", "prompt": [1]}'])
    requests = broker.server.core.state.requests
    until(lambda: any(r.stream_id == 8 for r in list(requests.values())), 300.0, "a live stream")
    [request] = [r for r in list(requests.values()) if r.stream_id == 8]
    assert ben.refused(b"ATTACH", {"stream_id": 8, "received": 0}) == "unknown_stream"
    ben.socket.send_multipart([b"CANCEL", b'{"stream_id": 8}'])
    ben.ask(b"PING", {"n": 1}, b"PONG")
    assert request.open
    assert request.cancelled is None


def test_the_streams_of_another_tenant_are_not_listed(
    broker: KeyedBroker, keys: tuple[OwnKey, OwnKey], ann: Raw, ben: Raw
) -> None:
    ann.ask(b"HELLO", {}, b"WELCOME")
    ann.socket.send_multipart([b"GENERATE", b'{"stream_id": 9, "model": "m", "prompt": [1]}'])
    ann.ask(b"PING", {"n": 1}, b"PONG")
    with broker.client(keys[1]) as client:
        assert client.status(streams=True).live == []
    with broker.client(keys[0]) as client:
        assert client.status(streams=True).live


def test_a_buffer_of_another_tenant_cannot_be_named(ann: Raw, ben: Raw) -> None:
    ann.socket.send_multipart([b"BUFFER", b'{"name": "secret", "text": "hidden"}'])
    ann.ask(b"PING", {"n": 1}, b"PONG")
    body = {"stream_id": 1, "model": "m", "prompt": [1], "buffers": ["secret"]}
    assert ben.refused(b"GENERATE", body) == "unknown_buffer"


def test_variables_are_out_of_reach_of_any_client(ben: Raw) -> None:
    body = {"request": 1, "lineage": 0, "count": 0, "op": "get", "name": "x"}
    assert ben.refused(b"VARIABLE", body) == "unknown_type"


def test_a_tenant_cannot_drain_a_worker(ben: Raw) -> None:
    assert ben.refused(b"DRAIN", {"stream_id": 1, "worker": "w"}) == "not_allowed"


def test_the_operator_can_drain_a_worker(broker: KeyedBroker, ann: Raw) -> None:
    operator = Raw(broker, OwnKey.read(broker.keys.own("client")))
    assert operator.refused(b"DRAIN", {"stream_id": 1, "worker": "nobody"}) != "not_allowed"
    operator.socket.close(0)
