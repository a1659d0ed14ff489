"""A broker with keys, over real sockets: who may connect, and what a revocation does."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from tokenbus.broker.server import BrokerServer
from tokenbus.broker.sockets import BindError
from tokenbus.clients import Client, OwnKey, RequestError
from tokenbus.protocol.bodies import decode_as, encode_body
from tokenbus.protocol.errors import TokenbusError
from tokenbus.protocol.frames import Frames
from tokenbus.protocol.header import encode_header
from tokenbus.protocol.keys import Allowed, Role
from tokenbus.protocol.messages import Error
from tokenbus.protocol.worker_messages import Heartbeat
from tokenbus.transport.dealer import Dealer, open_dealer

from ..processes import clean_environment, free_port, until
from ..worlds.keyed_broker import KeyedBroker, registration


@pytest.fixture(scope="module")
def broker() -> Iterator[KeyedBroker]:
    with KeyedBroker() as broker:
        yield broker


class Climber:
    """A peer that sends a worker's registration, and stores the messages and refusals that it
    receives."""

    def __init__(self) -> None:
        self.refusals: list[TokenbusError] = []
        self.received: list[Frames] = []
        self.answered = threading.Event()
        self._to_send: list[Frames] = []

    def connected(self, now: float) -> None:
        self._to_send = [registration("climber")]

    def disconnected(self, now: float) -> None:
        pass

    def receive(self, messages: list[Frames], now: float) -> None:
        self.received += messages
        self.answered.set()

    def outgoing(self, now: float) -> Iterator[Frames]:
        while self._to_send:
            yield self._to_send.pop()

    def wait_s(self, now: float) -> float:
        return 0.05

    def lost(self, now: float) -> bool:
        return False

    def refused(self, error: TokenbusError) -> None:
        self.refusals.append(error)
        self.answered.set()

    def ended(self, reason: str) -> None:
        pass


def admitted(broker: KeyedBroker, key: OwnKey) -> OwnKey:
    """Waits until the broker admits connections with this key; returns the key."""
    ring = broker.server.core.state.keyring
    role: Role = "worker" if key.role == "worker" else "client"
    until(lambda: ring.admits(role, key.public), 300.0, "the broker knows the key")
    return key


def refusal(client: Client) -> str:
    """The message of the error with which the broker refuses a client."""
    with client, pytest.raises(RequestError) as caught:
        client.status(timeout_s=100)
    assert caught.value.code == "not_allowed"
    return caught.value.message


def test_a_client_with_an_allowed_key_is_served(broker: KeyedBroker) -> None:
    with broker.client(admitted(broker, broker.new_key("ann"))) as client:
        assert client.status().sessions >= 1


def test_the_keys_of_the_brokers_own_machine_are_allowed(broker: KeyedBroker) -> None:
    with broker.client(OwnKey.read(broker.keys.own("client"))) as client:
        assert client.status().sessions >= 1
    broker.worker(OwnKey.read(broker.keys.own("worker")), "local").close()


def test_a_client_without_a_key_is_refused(broker: KeyedBroker) -> None:
    assert "only connections with a key" in refusal(broker.client(None))


def test_a_client_with_a_key_that_nobody_allowed_is_refused(broker: KeyedBroker) -> None:
    stranger = broker.stranger()
    assert stranger.public in refusal(broker.client(stranger))


@pytest.mark.process
def test_a_refused_key_is_one_line_of_a_command(broker: KeyedBroker, tmp_path: Path) -> None:
    stranger = broker.stranger()
    file = tmp_path / "stranger.key"
    stranger.write(file)
    done = subprocess.run(
        [sys.executable, "-m", "tokenbus.clients.cli", "status"],
        env=clean_environment(front=broker.server.front_endpoint, key=str(file)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 4
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.count(stranger.public) == 1


def test_a_refusal_that_comes_while_the_connection_is_begun_is_noticed(
    broker: KeyedBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ZeroMQ reports a refusal once. The client must notice it, even if its thread reads the report
    late."""
    exchange = Dealer._exchange

    def wait_and_exchange(self: Dealer, *arguments: Any) -> None:
        until(lambda: "was refused" in caplog.text, 300.0, "the broker has refused a key")
        # The refusal then reaches the client's side of ZeroMQ, which reports it only to the
        # socket's monitor.
        time.sleep(0.5)
        exchange(self, *arguments)

    monkeypatch.setattr(Dealer, "_exchange", wait_and_exchange)
    stranger = broker.stranger()
    assert stranger.public in refusal(broker.client(stranger))


def test_a_client_that_expects_another_broker_is_refused(broker: KeyedBroker) -> None:
    key = admitted(broker, broker.new_key("astray"))
    other = broker.stranger().public
    astray = OwnKey(
        name="astray", role="client", public=key.public, secret=key.secret, broker=other
    )
    assert f"the file names {other}" in refusal(broker.client(astray))


def test_a_client_with_a_key_is_refused_by_a_broker_without_keys(broker: KeyedBroker) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    plain = context.socket(zmq.ROUTER)
    port = plain.bind_to_random_port("tcp://127.0.0.1")
    client = broker.client(broker.stranger(), f"tcp://127.0.0.1:{port}")
    assert "has no keys" in refusal(client)
    context.destroy(linger=0)


def test_a_revoked_key_is_refused(broker: KeyedBroker) -> None:
    key = admitted(broker, broker.new_key("past"))
    with broker.client(key) as client:
        client.status()
    broker.keys.revoke("past")
    until(
        lambda: not broker.server.core.state.keyring.admits("client", key.public), 300.0, "revoked"
    )
    assert key.public in refusal(broker.client(key))


def test_a_key_of_a_client_cannot_register_a_worker(broker: KeyedBroker) -> None:
    key = admitted(broker, broker.new_key("climber"))
    revoked = broker.stranger("nobody", "worker")
    for given, what in (
        (key, "another role than the address"),
        (revoked, "never allowed or is revoked"),
        (None, "only connections with a key"),
    ):
        climber = Climber()
        dealer = Dealer(broker.back, climber, "climber", 0, packed=True, key=given)
        dealer.start()
        assert climber.answered.wait(300.0)
        dealer.close()
        assert what in climber.refusals[0].message
        assert climber.received == []
    assert "climber" not in [w.name for w in broker.server.core.state.workers.values()]


def test_a_key_of_a_worker_cannot_be_a_clients(broker: KeyedBroker) -> None:
    key = admitted(broker, broker.new_key("descender", "worker"))
    assert "another role than the address" in refusal(broker.client(key))


def test_a_revocation_ends_live_streams_with_one_error_each(broker: KeyedBroker) -> None:
    worker = broker.worker(admitted(broker, broker.new_key("w1", "worker")), "w1")
    with (
        broker.client(admitted(broker, broker.new_key("bad"))) as bad,
        broker.client(admitted(broker, broker.new_key("good"))) as good,
    ):
        ended = [bad.generate([1], model="m") for _ in range(2)]
        stays = good.generate([1], model="m")
        for _ in range(3):
            worker.receive(b"GENERATE")
        broker.keys.revoke("bad")
        for stream in ended:
            with pytest.raises(RequestError, match="was revoked") as caught:
                stream.wait()
            assert caught.value.code == "not_allowed"
        # The error comes from the session, or from the handshake of a new connection.
        with pytest.raises(RequestError, match=r"(was|is) revoked") as caught:
            bad.status(timeout_s=100)
        # The worker gets a CANCEL for both streams, and the stream of the other client continues.
        for _ in ended:
            worker.receive(b"CANCEL")
        assert good.status().streams >= 1
        stays.close()
    worker.close()


def test_a_revoked_worker_loses_its_lease_and_gets_no_other(broker: KeyedBroker) -> None:
    worker = broker.worker(admitted(broker, broker.new_key("w2", "worker")), "w2", ("own",))
    workers = broker.server.core.state.workers
    assert "w2" in [w.name for w in workers.values()]
    broker.keys.revoke("w2")
    beat = [b"HEARTBEAT", encode_header(), encode_body(Heartbeat(), "msgpack")]

    def refused() -> bool:
        worker.send(beat)
        return "w2" not in [w.name for w in workers.values()]

    until(refused, 300.0, "the lease ends with a heartbeat")
    worker.receive(b"REREGISTER")

    def answered() -> bool:
        worker.send_registration()
        return bool(worker.socket.poll(100))

    until(answered, 300.0, "an answer")
    error: Error = decode_as(Error, worker.receive(b"ERROR")[2], "msgpack")
    assert error.code == "not_allowed"
    assert "was revoked" in error.message
    assert "w2" not in [w.name for w in workers.values()]
    worker.close()


def test_a_key_that_is_allowed_while_the_broker_runs_connects_at_last(broker: KeyedBroker) -> None:
    key = broker.stranger("late")
    with broker.client(key) as client:
        with pytest.raises(RequestError):
            client.status(timeout_s=100)
        broker.keys.allow("client", "late", Allowed(public=key.public))
        admitted(broker, key)

        def served() -> bool:
            try:
                return client.status(timeout_s=100).sessions >= 1
            except RequestError:
                return False

        until(served, 300.0, "the same client is served")


def test_what_is_sent_is_encrypted(broker: KeyedBroker) -> None:
    socket = open_dealer(
        zmq.Context.instance(), broker.front, key=admitted(broker, broker.new_key("curve"))
    )
    socket.rcvtimeo = 60_000
    socket.send_multipart([b"PING", b"{}"])
    frame = socket.recv(copy=False)
    assert socket.getsockopt(zmq.MECHANISM) == zmq.CURVE
    assert frame.bytes == b"PONG"
    socket.close(0)


def test_other_addresses_than_of_this_machine_need_keys(broker: KeyedBroker) -> None:
    anywhere = f"tcp://0.0.0.0:{free_port()}"
    with pytest.raises(BindError, match=r"no keys; make them with 'tokenbus keys new'"):
        BrokerServer(anywhere, f"ipc://{broker.path}/other.sock")
    with pytest.raises(BindError, match=r"no keys; make them with 'tokenbus keys new'"):
        BrokerServer(f"ipc://{broker.path}/other.sock", anywhere)
