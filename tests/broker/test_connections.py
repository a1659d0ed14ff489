"""A routing id belongs to one connection: another connection with this routing id gets neither the
session nor the lease."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec
import pytest
from tokenbus.broker import connections
from tokenbus.broker.server import BrokerServer
from tokenbus.broker.settings import BrokerSettings
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.header import encode_header
from tokenbus.protocol.keys import OwnKey
from tokenbus.protocol.packing import pack, unpack
from tokenbus.protocol.worker_messages import Heartbeat

from ..processes import until
from ..worlds.broker import Bench
from ..worlds.keyed_broker import KeyedBroker, registration
from ..worlds.running_broker import RawPeer, intrude, running

pytestmark = pytest.mark.process

SETTINGS = BrokerSettings(session_grace_s=600, expiry_s=600, drain_s=0)
Broker = tuple[BrokerServer, list[OwnKey | None]]


@pytest.fixture(params=["tcp", "ipc", "keys"])
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """A broker, and the keys of two clients if it has keys."""
    if request.param == "keys":
        with KeyedBroker() as keyed:
            keys = [keyed.new_key("victim"), keyed.new_key("attacker")]
            admits = keyed.server.core.state.keyring.admits
            until(lambda: all(admits("client", key.public) for key in keys), 300.0, "admitted")
            yield keyed.server, list(keys)
        return
    with tempfile.TemporaryDirectory(prefix="tb-") as folder:
        front = "tcp://127.0.0.1:*" if request.param == "tcp" else f"ipc://{folder}/front.sock"
        with running(BrokerServer(front, f"ipc://{folder}/back.sock", SETTINGS)) as server:
            yield server, [None, None]


def session_token(peer: RawPeer) -> str:
    """Opens a session; returns its token."""
    peer.send(b"HELLO", {})
    token: str = peer.receive(b"WELCOME")["session"]
    return token


def test_a_connection_with_the_routing_id_of_a_closed_one_gets_a_session_of_its_own(
    broker: Broker,
) -> None:
    server, (key, other_key) = broker
    victim = RawPeer(server.front_endpoint, key)
    token = session_token(victim)
    [session] = server.core.state.sessions
    routing_id = session.peer
    assert routing_id is not None
    victim.close()
    hello = [b"HELLO", b"{}"]
    attacker, answer = intrude(server.front_endpoint, routing_id, hello, b"WELCOME", other_key)
    other = msgspec.json.decode(answer[1])["session"]
    assert other != token
    other_public = other_key.public if other_key is not None else ""
    assert server.core.state.sessions.of(other, other_public) is not None
    # The victim connects again with its token, and resumes its session.
    again = RawPeer(server.front_endpoint, key)
    again.send(b"HELLO", {"session": token})
    assert again.receive(b"WELCOME")["resumed"]
    again.close()
    attacker.close()


def test_a_session_has_no_connection_once_that_has_closed(broker: Broker) -> None:
    # If the session kept its connection, an attacker's silent connection with this routing id would
    # receive the session's tokens.
    server, (key, _) = broker
    victim = RawPeer(server.front_endpoint, key)
    session_token(victim)
    [session] = server.core.state.sessions
    victim.close()
    until(lambda: session.peer is None, 300.0, "the broker notices the closed connection")


def test_a_connection_with_the_routing_id_of_a_worker_does_not_get_its_lease() -> None:
    with tempfile.TemporaryDirectory(prefix="tb-") as folder:
        server = BrokerServer("tcp://127.0.0.1:*", f"ipc://{folder}/back.sock", SETTINGS)
        with running(server):
            worker = RawPeer(server.back_endpoint)
            worker.socket.send_multipart(pack(registration("w")))
            assert unpack(worker.socket.recv_multipart())[0] == b"REGISTERED"
            [lease] = server.core.state.workers.values()
            worker.close()
            beat = pack([b"HEARTBEAT", encode_header(), encode_body(Heartbeat(), "msgpack")])
            # The broker does not have a lease for this connection, and requests a registration.
            attacker, _ = intrude(server.back_endpoint, lease.peer, beat, b"REREGISTER")
            assert lease not in server.core.state.workers.values()
            attacker.close()


def test_of_too_many_connections_the_oldest_silent_ones_are_shut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "max_connections", lambda: 8)
    with tempfile.TemporaryDirectory(prefix="tb-") as folder:
        server = BrokerServer("tcp://127.0.0.1:*", f"ipc://{folder}/back.sock", SETTINGS)
        with running(server):
            victim = RawPeer(server.front_endpoint)
            token = session_token(victim)
            parts = urlsplit(server.front_endpoint)
            address = parts.hostname or "", parts.port or 0
            silent = [socket.create_connection(address, 120.0) for _ in range(20)]
            for oldest in silent[:13]:
                assert closes(oldest)
            late = RawPeer(server.front_endpoint)
            assert session_token(late) != token
            victim.send(b"PING", {})
            assert victim.receive(b"PONG").get("session", True)
            for each in silent:
                each.close()
            victim.close()
            late.close()


def closes(peer: socket.socket) -> bool:
    """Waits until the other side has closed a connection, and returns True. Raises TimeoutError if
    the other side does not close the connection in time."""
    try:
        while peer.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_a_key_has_no_more_connections_than_it_leaves_to_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "max_connections", lambda: 8)
    with KeyedBroker() as keyed:
        key, other_key = keyed.new_key("victim"), keyed.new_key("attacker")
        admits = keyed.server.core.state.keyring.admits
        until(lambda: all(admits("client", k.public) for k in (key, other_key)), 60.0, "admitted")
        attackers = [RawPeer(keyed.front, other_key) for _ in range(4)]
        for peer in attackers:
            session_token(peer)
        refused = RawPeer(keyed.front, other_key)
        refused.send(b"HELLO", {})
        clients = keyed.server._clients
        until(lambda: "further ones are closed" in caplog.text, 60.0, "the connection is refused")
        assert clients.taken == 4
        refused.close()
        victims = [RawPeer(keyed.front, key) for _ in range(2)]
        for peer in victims:
            session_token(peer)
        # A connection that closes makes room for another one.
        attackers.pop().close()
        until(lambda: clients._of_key[other_key.public] == 3, 60.0, "the connection is closed")
        for peer in (*attackers, *victims):
            peer.close()


def test_a_session_answers_its_own_key_only() -> None:
    bench = Bench()
    [(_, first)] = bench.client("c", "HELLO", {}, "a" * 64)
    [(_, second)] = bench.client("c", "HELLO", {}, "b" * 64)
    assert second["session"] != first["session"]
    token = {"session": first["session"]}
    [(_, back)] = bench.client("elsewhere", "HELLO", token, "a" * 64)
    assert back["resumed"]
