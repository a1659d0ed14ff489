"""A connection with an endless message is closed before the message fills the broker's memory."""

from __future__ import annotations

import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from tokenbus.broker import sockets, unfinished
from tokenbus.broker.server import BrokerServer
from tokenbus.broker.settings import BrokerSettings
from tokenbus.protocol.messages import MAX_ATTACHMENT_BYTES

from ..worlds.running_broker import WAIT_MS, RawPeer, running

pytestmark = pytest.mark.process

MB = 2**20
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16 + 1 + 31)
READY = b"\x05READY" + b"\x0bSocket-Type\x00\x00\x00\x06DEALER"
MORE = 1
LARGE = 2
COMMAND = 4
EMPTY = bytes([MORE, 0]) * 2**15
"""Empty frames, each followed by another frame. Each takes 64 bytes of libzmq's memory."""
EMPTY_BYTES = 2**15 * 64


class ByHand:
    """A client that implements ZMTP 3.0 itself, because libzmq sends only complete messages."""

    def __init__(self, address: str, properties: bytes = b"") -> None:
        """``properties``: further properties in the handshake."""
        parts = urlsplit(address)
        self.socket = socket.create_connection((parts.hostname, parts.port), WAIT_MS / 1000)
        self.socket.sendall(GREETING + frame(READY + properties, COMMAND))
        self._receive(len(GREETING))
        _, size = self._receive(2)
        assert self._receive(size).startswith(b"\x05READY")

    def _receive(self, size: int) -> bytes:
        received = b""
        while len(received) < size:
            part = self.socket.recv(size - len(received))
            if not part:
                raise ConnectionResetError("the broker has closed the connection")
            received += part
        return received

    def send(self, data: bytes, times: int = 1) -> bool:
        """Sends bytes; returns False if the connection is closed."""
        try:
            for _ in range(times):
                self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def wait_for_close(self) -> None:
        """Waits until the broker has closed the connection. Raises TimeoutError after
        ``WAIT_MS``."""
        try:
            while self.socket.recv(4096):
                pass
        except ConnectionResetError:
            pass
        self.socket.close()


def frame(body: bytes, flags: int) -> bytes:
    """A frame of ZMTP whose size is encoded in eight bytes."""
    return struct.pack("!BQ", LARGE | flags, len(body)) + body


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerServer]:
    """A broker on TCP without keys. It sends no heartbeats, because these clients do not answer
    them."""
    monkeypatch.setattr(sockets, "HEARTBEAT_MS", 0)
    settings = BrokerSettings(session_expiry_s=600, drain_s=0)
    with tempfile.TemporaryDirectory(prefix="tb-") as folder:
        broker = BrokerServer("tcp://127.0.0.1:*", f"ipc://{folder}/back.sock", settings)
        with running(broker):
            yield broker


@pytest.fixture
def calm(server: BrokerServer) -> Iterator[RawPeer]:
    """Another client with a session, which must not be affected."""
    peer = RawPeer(server.front_endpoint)
    peer.send(b"HELLO", {})
    peer.receive(b"WELCOME")
    yield peer
    peer.close()


def check_served(peer: RawPeer) -> None:
    """Checks that the broker answers a client."""
    peer.send(b"PING", {"n": 7})
    assert peer.receive(b"PONG") == {"n": 7}


def closed(caplog: pytest.LogCaptureFixture) -> int:
    """The number of connections that the guard has closed."""
    return sum("a connection was closed" in record.getMessage() for record in caplog.records)


def test_a_message_of_large_frames_without_an_end_is_closed(
    server: BrokerServer, calm: RawPeer, caplog: pytest.LogCaptureFixture
) -> None:
    endless = ByHand(server.front_endpoint)
    for _ in range(unfinished.MAX_UNFINISHED_BYTES // MB + 1):
        endless.send(frame(bytes(MB), MORE))
        check_served(calm)
    endless.wait_for_close()
    check_served(calm)
    assert closed(caplog) == 1


def test_messages_of_empty_frames_without_an_end_are_closed(
    server: BrokerServer, calm: RawPeer, caplog: pytest.LogCaptureFixture
) -> None:
    before = unfinished.memory_in_use()
    for n in (1, 2):
        two = [ByHand(server.front_endpoint) for _ in range(2)]
        # Both messages together take at most twice the bound.
        for _ in range(unfinished.MAX_GROWTH_BYTES // EMPTY_BYTES):
            is_open = [endless.send(EMPTY) for endless in two]
            check_served(calm)
            if not any(is_open):
                break
        for endless in two:
            endless.wait_for_close()
        assert closed(caplog) == 2 * n
        deadline = time.monotonic() + WAIT_MS / 1000
        while unfinished.memory_in_use() > before + unfinished.MAX_GROWTH_BYTES // 8:
            assert time.monotonic() < deadline, "the memory of a closed connection was kept"
            check_served(calm)


def test_unfinished_messages_of_one_key_have_a_bound_together(
    server: BrokerServer,
    calm: RawPeer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(unfinished, "MAX_KEY_UNFINISHED_BYTES", 16 * MB)
    small, large = ByHand(server.front_endpoint), ByHand(server.front_endpoint)
    small.send(frame(bytes(MB), MORE))
    large.send(frame(bytes(MB), MORE), 17)
    large.wait_for_close()
    assert closed(caplog) == 1
    # The small message ends, and is answered.
    small.send(frame(b"", 0))
    assert small.socket.recv(1)
    small.socket.close()
    check_served(calm)


def properties(count: int, size: int) -> bytes:
    """Properties of a handshake, each with a value of ``size`` bytes."""
    return b"".join(
        b"\x04%04x%b" % (n, struct.pack("!I", size) + bytes(size)) for n in range(count)
    )


def shake_hands(server: BrokerServer, properties: bytes) -> ByHand | None:
    """A client whose handshake has further properties, after the broker has completed the
    handshake. None if the broker has closed the connection."""
    try:
        peer = ByHand(server.front_endpoint, properties)
        peer.send(frame(b"PING", MORE) + frame(b"{}", 0))
        return peer if peer.socket.recv(1) else None
    except (BrokenPipeError, ConnectionResetError):
        return None


def test_handshakes_of_one_key_have_a_bound_together(
    server: BrokerServer,
    calm: RawPeer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """libzmq keeps the properties of a handshake until the connection closes, so completed messages
    do not free this memory."""
    monkeypatch.setattr(unfinished, "MAX_KEY_UNFINISHED_BYTES", 16 * MB)
    small, large = (shake_hands(server, properties(count, MB)) for count in (8, 9))
    assert small is not None
    if large is not None:
        large.wait_for_close()
    assert closed(caplog) == 1
    check_served(calm)
    small.socket.close()


def test_many_small_properties_of_handshakes_are_bounded_by_their_memory(
    server: BrokerServer,
    calm: RawPeer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(unfinished, "MAX_GROWTH_BYTES", 16 * MB)
    many = properties(2**13, 0)
    peers = []
    deadline = time.monotonic() + WAIT_MS / 1000
    while not closed(caplog):
        peers.append(shake_hands(server, many))
        check_served(calm)
        assert time.monotonic() < deadline, "the broker keeps all of these handshakes"
    for peer in filter(None, peers):
        peer.socket.close()


def test_a_connection_whose_first_messages_are_large_is_not_accused(
    server: BrokerServer,
    calm: RawPeer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(unfinished, "MAX_KEY_UNFINISHED_BYTES", 4 * MB)
    first = ByHand(server.front_endpoint)
    for _ in range(8):
        first.send(frame(b"MSG", MORE) + frame(bytes(MB), 0))
        check_served(calm)
    deadline = time.monotonic() + WAIT_MS / 1000
    while any(c.counted is not None for c in server._clients if c.peer is not None):
        assert time.monotonic() < deadline, "the handshake still counts as large"
        check_served(calm)
    assert closed(caplog) == 0
    first.socket.close()


def test_a_large_message_is_taken_however_slow_it_comes(
    server: BrokerServer, calm: RawPeer, caplog: pytest.LogCaptureFixture
) -> None:
    slow, silent = ByHand(server.front_endpoint), ByHand(server.front_endpoint)
    silent.send(frame(bytes(MB), MORE))
    slow.send(frame(b"MSG", MORE) + frame(b"{}", MORE))
    slow.send(struct.pack("!BQ", LARGE, MAX_ATTACHMENT_BYTES))
    for _ in range(MAX_ATTACHMENT_BYTES // MB):
        slow.send(bytes(MB))
        check_served(calm)
    silent.send(frame(b"", 0))
    for peer in (slow, silent):
        assert peer.socket.recv(1)
        peer.socket.close()
    assert closed(caplog) == 0
