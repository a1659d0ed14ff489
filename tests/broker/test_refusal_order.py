"""A client gets the reason for a refused connection. The broker's security mechanism, its refusal
and the end of the connection may arrive in any order."""

from __future__ import annotations

import contextlib
import socket as sockets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from tokenbus.broker.server import BrokerServer
from tokenbus.protocol.errors import TokenbusError
from tokenbus.protocol.frames import Frames
from tokenbus.protocol.keys import OwnKey
from tokenbus.transport import greeting
from tokenbus.transport.dealer import Dealer
from tokenbus.transport.greeting import GREETING_BYTES, SIGNATURE_AND_VERSION, mechanism_of

from ..processes import free_port
from ..worlds.keyed_broker import KeyedBroker
from ..worlds.running_broker import running

WAIT_S = 300.0
START = len(SIGNATURE_AND_VERSION)
SIGNATURE_BYTES = START - 1
"""Number of bytes that libzmq sends first: its signature. It sends the rest of its greeting only
after it has received the broker's signature."""


@pytest.fixture(scope="module")
def broker() -> Iterator[KeyedBroker]:
    with KeyedBroker() as broker:
        yield broker


class Relay:
    """Passes connections on to a broker. libzmq does not receive the broker's mechanism before the
    broker closes the connection. A client that first sends more than a signature is not libzmq, and
    receives the mechanism."""

    def __init__(self, broker: str) -> None:
        host, _, port = broker.removeprefix("tcp://").rpartition(":")
        self._broker = (host, int(port))
        self._listener = sockets.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.closed = 0
        """Number of connections that the broker closed before the client had received the
        mechanism."""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(sockets.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            # A client may close its connection at any time.
            with client, contextlib.suppress(OSError):
                client.settimeout(WAIT_S)
                self._pass_on(client)

    def _pass_on(self, client: sockets.socket) -> None:
        with sockets.create_connection(self._broker, WAIT_S) as broker:
            sent = client.recv(GREETING_BYTES)
            if not sent:
                return
            broker.sendall(sent)
            if len(sent) > SIGNATURE_BYTES:
                client.sendall(_read(broker, GREETING_BYTES))
                client.recv(1)
                return
            client.sendall(_read(broker, START))
            broker.sendall(_read(client, GREETING_BYTES - len(sent)))
            with contextlib.suppress(ConnectionResetError):
                while broker.recv(GREETING_BYTES):
                    pass
        self.closed += 1


def _read(socket: sockets.socket, count: int) -> bytes:
    """Receives ``count`` bytes."""
    received = b""
    while len(received) < count:
        if not (chunk := socket.recv(count - len(received))):
            raise ConnectionError("the connection was closed early")
        received += chunk
    return received


@pytest.fixture
def relay(broker: KeyedBroker) -> Iterator[Relay]:
    relay = Relay(broker.front)
    yield relay
    relay.close()


class Refused:
    """A peer that records the calls of its methods."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refusal: TokenbusError | None = None
        self.answered = threading.Event()
        self.close: Callable[[], None] = lambda: None
        """Closes the dealer, so that it does not connect again after a refusal."""

    def connected(self, now: float) -> None:
        self.calls.append("connected")

    def disconnected(self, now: float) -> None:
        pass

    def receive(self, messages: list[Frames], now: float) -> None:
        self.answered.set()

    def outgoing(self, now: float) -> Iterator[Frames]:
        self.calls.append("outgoing")
        yield [b"hello"]

    def wait_s(self, now: float) -> float:
        return 3600.0

    def lost(self, now: float) -> bool:
        return False

    def refused(self, error: TokenbusError) -> None:
        self.calls.append("refused")
        self.refusal = error
        self.close()
        self.answered.set()

    def ended(self, reason: str) -> None:
        pass


def refusal(address: str, key: OwnKey | None, peer: Refused) -> str:
    """The message of the error with which a connection to ``address`` is refused."""
    dealer = Dealer(address, peer, "refused", 0, key=key)
    peer.close = dealer.close
    dealer.start()
    try:
        assert peer.answered.wait(WAIT_S)
    finally:
        dealer.close()
    assert peer.refusal is not None, "a message arrived"
    return peer.refusal.message


def test_a_close_before_the_mechanism_arrives_is_a_refusal_without_a_key(relay: Relay) -> None:
    assert "accepts only connections with a key" in refusal(relay.address, None, Refused())
    assert relay.closed >= 1


def test_a_close_before_the_mechanism_arrives_is_a_refusal_with_a_key(broker: KeyedBroker) -> None:
    """The broker of this test does not use keys."""
    server = BrokerServer("tcp://127.0.0.1:*", f"ipc://{broker.path}/plain.sock")
    with running(server):
        relay = Relay(server.front_endpoint)
        try:
            text = refusal(relay.address, broker.stranger(), Refused())
        finally:
            relay.close()
    assert "has no keys" in text
    assert relay.closed >= 1


def test_a_refusal_that_has_arrived_is_reported_before_the_peer_checks_its_deadlines(
    broker: KeyedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = Dealer._exchange

    def wait_and_exchange(self: Dealer, socket: zmq.Socket[bytes], events: Any) -> None:
        assert events._events.poll(int(WAIT_S * 1000)), "the broker did not refuse"
        exchange(self, socket, events)

    monkeypatch.setattr(Dealer, "_exchange", wait_and_exchange)
    peer = Refused()
    assert "never allowed" in refusal(broker.front, broker.stranger(), peer)
    assert peer.calls[:2] == ["connected", "refused"]


def test_the_mechanism_is_read_from_each_kind_of_address(
    broker: KeyedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greeting, "GREETING_S", WAIT_S)
    name = f"@tokenbus-{broker.path.name}"
    plain = f"ipc://{name}"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(plain)
        assert mechanism_of(plain) == "NULL"
    assert mechanism_of(broker.front) == "CURVE"
    assert mechanism_of(broker.back) == "CURVE"


def test_a_server_that_does_not_speak_zmtp_has_no_mechanism() -> None:
    assert mechanism_of(f"tcp://127.0.0.1:{free_port()}") is None
    with sockets.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        for answer in (b"", b"HTTP/1.1 400 Bad Request\r\n", b"HTTP/1.1 400 Bad Request\r\n" * 3):
            thread = threading.Thread(target=_answer, args=(server, answer))
            thread.start()
            assert mechanism_of(address) is None
            thread.join()


def _answer(server: sockets.socket, answer: bytes) -> None:
    client, _ = server.accept()
    with client, contextlib.suppress(OSError):
        _read(client, START)
        client.sendall(answer)
