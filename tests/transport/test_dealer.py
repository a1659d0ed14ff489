"""The connection that workers and clients use, over real sockets."""

from __future__ import annotations

import contextlib
import logging
import re
import resource
import threading
from collections import deque
from collections.abc import Iterator

import pytest
import zmq
from tokenbus.protocol.errors import TokenbusError
from tokenbus.protocol.frames import Frames
from tokenbus.protocol.packing import pack
from tokenbus.transport.dealer import NEVER_MS, AddressError, Dealer, check_address, make_dealer
from zmq.utils.monitor import recv_monitor_message

from ..processes import free_port, until

WAIT_S = 300.0
"""Seconds after which a waiting test fails."""


class Echo:
    """A peer that sends ``hello`` on each new connection, sends the messages in ``to_send``, and
    stores the messages that it receives."""

    def __init__(self) -> None:
        self.to_send: deque[Frames] = deque()
        self.received: list[Frames] = []
        self.turns = 0
        self.silent = False
        """If true, the peer requests a new connection once."""
        self.fails = 0
        """Number of further calls of ``connected`` that raise an exception."""
        self.disconnections = 0
        self.refusals: list[TokenbusError] = []
        self.reasons: list[str] = []

    def connected(self, now: float) -> None:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("the peer has a defect")
        self.to_send.appendleft([b"hello"])

    def disconnected(self, now: float) -> None:
        self.disconnections += 1

    def receive(self, messages: list[Frames], now: float) -> None:
        self.received += messages

    def outgoing(self, now: float) -> Iterator[Frames]:
        self.turns += 1
        while self.to_send:
            yield self.to_send.popleft()

    def wait_s(self, now: float) -> float:
        return 0.05

    def lost(self, now: float) -> bool:
        lost, self.silent = self.silent, False
        return lost

    def refused(self, error: TokenbusError) -> None:
        self.refusals.append(error)

    def ended(self, reason: str) -> None:
        self.reasons.append(reason)


class Router:
    """The broker's end of the connection."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self._socket = context.socket(zmq.ROUTER)
        self._socket.bind(self.address)

    def receive(self) -> list[bytes]:
        """The next message: its sender, and its frames."""
        assert self._socket.poll(int(WAIT_S * 1000)), "no message came"
        return self._socket.recv_multipart()

    def send(self, frames: list[bytes]) -> None:
        self._socket.send_multipart(frames)

    def close(self, linger_ms: int = 0) -> None:
        self._socket.close(linger=linger_ms)


@pytest.fixture
def router() -> Iterator[Router]:
    router = Router(zmq.Context.instance())
    yield router
    router.close()


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Within this context, the process cannot open files or sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Standard input, output and error are always open, and no other number is below the limit.
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def pauses(caplog: pytest.LogCaptureFixture, address: str) -> list[float]:
    """The pauses of the connections to an address that were logged, in seconds."""
    line = rf"the connection to {re.escape(address)} .* opening a new one in ([\d.]+) s"
    found = re.findall(line, caplog.text)
    return [float(seconds) for seconds in found]


def test_messages_go_both_ways_and_a_close_sends_what_is_left(router: Router) -> None:
    peer = Echo()
    dealer = Dealer(router.address, peer, "test", linger_ms=60_000)
    dealer.start()
    client, hello = router.receive()
    assert hello == b"hello"
    for number in range(1000):
        router.send([client, b"%d" % number])
    until(lambda: len(peer.received) == 1000, WAIT_S, "all messages were received")
    assert peer.received == [[b"%d" % number] for number in range(1000)]
    peer.to_send += [[b"one", b"more"], [b"last"]]
    dealer.close()
    assert [router.receive()[1:] for _ in range(2)] == [[b"one", b"more"], [b"last"]]
    assert peer.reasons == [""]


def test_a_worker_at_the_address_for_clients_logs_once_that_it_needs_the_other_one(
    router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    peer = Echo()
    dealer = Dealer(router.address, peer, "test", linger_ms=0, packed=True)
    dealer.start()
    worker, _ = router.receive()
    for frames in ([b"ERROR", b"body"], [b"ERROR", b"body"], pack([b"HEARTBEAT"])):
        router.send([worker, *frames])
    until(lambda: peer.received == [[b"HEARTBEAT"]], WAIT_S, "the last message was received")
    dealer.close()
    [record] = [one for one in caplog.records if "dropped a message" in one.message]
    assert "a worker needs the broker's address for workers (the setting back)" in record.message


def test_a_wake_up_from_another_thread_sends_at_once(router: Router) -> None:
    peer = Echo()
    peer.wait_s = lambda now: 3600.0  # type: ignore[method-assign]
    dealer = Dealer(router.address, peer, "test", linger_ms=0)
    dealer.start()
    assert router.receive()[1] == b"hello"

    def hand_over() -> None:
        peer.to_send.append([b"from another thread"])
        dealer.wake()

    threading.Thread(target=hand_over).start()
    assert router.receive()[1] == b"from another thread"
    dealer.close()


def test_other_threads_send_on_the_socket_while_its_own_receives(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All messages arrive in order. In neither direction does a message wait for the thread's next
    wake-up."""
    senders: set[str] = set()

    def send(socket: zmq.Socket[bytes], frames: Frames) -> None:
        senders.add(threading.current_thread().name)
        socket.send_multipart(frames)

    monkeypatch.setattr("tokenbus.transport.dealer.send", send)
    peer = Echo()
    peer.wait_s = lambda now: 3600.0  # type: ignore[method-assign]
    dealer = Dealer(router.address, peer, "own", linger_ms=0)
    dealer.start()
    client, hello = router.receive()
    assert hello == b"hello"
    count, names = 500, [b"a", b"b", b"c"]

    def hand_over(name: bytes) -> None:
        for number in range(count):
            peer.to_send.append([name, b"%d" % number])
            dealer.send(peer.to_send)

    threads = [threading.Thread(target=hand_over, args=(n,), name=n.decode()) for n in names]
    for thread in threads:
        thread.start()
    got: dict[bytes, list[int]] = {name: [] for name in names}
    for number in range(count * len(names)):
        _, name, sent = router.receive()
        got[name].append(int(sent))
        router.send([client, b"%d" % number])
    assert got == {name: list(range(count)) for name in names}
    until(lambda: len(peer.received) == count * len(names), WAIT_S, "all answers were received")
    for thread in threads:
        thread.join()

    def sent_here() -> bool:
        """Sends a message; returns whether this thread has sent a message itself. Usually this
        thread sends it, because the connection's thread waits."""
        peer.to_send.append([b"d", b"0"])
        dealer.send(peer.to_send)
        return threading.current_thread().name in senders

    until(sent_here, WAIT_S, "a message is sent without the connection's thread")
    dealer.close()


def test_what_is_handed_over_before_there_is_a_socket_follows_the_peers_first_message(
    router: Router,
) -> None:
    peer = Echo()
    peer.wait_s = lambda now: 3600.0  # type: ignore[method-assign]
    dealer = Dealer(router.address, peer, "test", linger_ms=0)
    peer.to_send.append([b"early"])
    dealer.send(peer.to_send)
    dealer.start()
    assert [router.receive()[1] for _ in range(2)] == [b"hello", b"early"]
    dealer.close()


def test_a_broker_that_is_lost_gets_a_new_socket(router: Router) -> None:
    peer = Echo()
    dealer = Dealer(router.address, peer, "test", linger_ms=0)
    dealer.start()
    first, _ = router.receive()
    peer.silent = True
    second, hello = router.receive()
    assert hello == b"hello"
    assert first != second
    dealer.close()


def test_zeromq_does_not_send_queued_messages_to_the_next_broker() -> None:
    """If ZeroMQ sent queued messages, a restarted broker would receive them before the peer's first
    message."""
    socket = make_dealer(zmq.Context.instance())
    events = socket.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED)
    socket.connect(f"tcp://127.0.0.1:{free_port()}")
    socket.send(b"queued")
    assert events.poll(int(WAIT_S * 1000)), "no event came"
    assert recv_monitor_message(events)["value"] >= NEVER_MS
    socket.disable_monitor()
    events.close(0)
    socket.close()


def test_messages_that_arrived_before_the_loss_are_received(router: Router) -> None:
    peer = Echo()
    dealer = Dealer(router.address, peer, "test", linger_ms=0)
    dealer.start()
    client, _ = router.receive()
    sent = [[b"%d" % number] for number in range(500)]
    for frames in sent:
        router.send([client, *frames])
    router.close(linger_ms=60_000)
    until(lambda: peer.disconnections, WAIT_S, "the loss of the connection")
    assert peer.received == sent
    dealer.close()


def test_without_descriptors_it_tries_again_with_growing_pauses(
    router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    peer = Echo()
    dealer = Dealer(router.address, peer, "test", linger_ms=0)
    with no_descriptors(), caplog.at_level(logging.WARNING):
        dealer.start()
        until(lambda: len(pauses(caplog, router.address)) >= 4, WAIT_S, "four attempts failed")
        turns = peer.turns
        until(lambda: peer.turns > turns, WAIT_S, "the peer's deadlines go on")
    assert pauses(caplog, router.address)[:4] == [0.05, 0.1, 0.2, 0.4]
    assert router.receive()[1] == b"hello"
    dealer.close()


def test_the_peer_is_notified_that_it_has_no_socket_before_it_sends_again(
    router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    peer = Echo()
    dealer = Dealer(router.address, peer, "test", linger_ms=0)
    dealer.start()
    assert router.receive()[1] == b"hello"
    assert peer.disconnections == 0
    with no_descriptors(), caplog.at_level(logging.WARNING):
        peer.silent = True
        until(lambda: len(pauses(caplog, router.address)) >= 2, WAIT_S, "two attempts failed")
        assert peer.disconnections >= 1
    assert router.receive()[1] == b"hello"
    dealer.close()


def test_a_peer_that_fails_gets_a_new_socket_after_a_pause(
    router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    peer = Echo()
    peer.fails = 2
    dealer = Dealer(router.address, peer, "test", linger_ms=0)
    dealer.start()
    assert router.receive()[1] == b"hello"
    assert pauses(caplog, router.address) == [0.05, 0.1]
    assert "the peer has a defect" in caplog.text
    dealer.close()


def test_a_thread_that_cannot_start_may_be_started_again(router: Router) -> None:
    dealer = Dealer(router.address, Echo(), "test", linger_ms=0)
    size = threading.stack_size(2**46)  # no system allows such a stack
    try:
        with pytest.raises(RuntimeError):
            dealer.start()
    finally:
        threading.stack_size(size)
    assert not dealer.started
    dealer.start()
    assert router.receive()[1] == b"hello"
    dealer.close()


def test_a_terminated_context_ends_it_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    monkeypatch.setattr(zmq.Context, "instance", lambda: context)
    router = Router(context)
    peer = Echo()
    dealer = Dealer(router.address, peer, "test", linger_ms=0)
    dealer.start()
    router.receive()
    router.close()
    context.term()
    until(lambda: peer.reasons, WAIT_S, "the dealer ended")
    assert peer.reasons == ["the ZeroMQ context was terminated"]
    dealer.close()


@pytest.mark.parametrize(
    "address", ["", "nowhere", "tcp://127.0.0.1", "carrier://pigeon", "tcp://127.0.0.1:70000"]
)
def test_an_invalid_address_is_refused_with_its_value(address: str) -> None:
    with pytest.raises(AddressError, match=re.escape(repr(address))):
        Dealer(address, Echo(), "test", linger_ms=0)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://localhost:5555",
        "tcp://[::1]:5555",
        "tcp://127.0.0.2;127.0.0.1:5555",
        "tcp://a-b_c.example:1",
        "tcp://*:5555",
        "tcp://127.0.0.1:*",
        "tcp://127.0.0.1:5 5",
        "tcp:// 127.0.0.1:5555",
        "tcp://user@host:5555",
        "tcp://é:5555",
        "ipc:///tmp/none.sock",
        "ipc://@none",
        "ipc://@",
        "ipc:///" + "x" * 106,
        "ipc:///" + "x" * 107,
        "ipc:///" + "é" * 54,
    ],
)
def test_the_addresses_that_zeromq_accepts_are_valid(address: str) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        try:
            socket.connect(address)
        except zmq.ZMQError:
            with pytest.raises(AddressError):
                check_address(address)
        else:
            check_address(address)


def test_a_dealer_that_has_not_started_makes_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connected: list[str] = []
    monkeypatch.setattr(zmq.Socket, "connect", lambda _, address: connected.append(address))
    dealer = Dealer("tcp://127.0.0.1:5555,ipc:///none", Echo(), "test", linger_ms=0)
    assert not dealer.started
    assert connected == []
    dealer.close()


@pytest.fixture
def other() -> Iterator[Router]:
    router = Router(zmq.Context.instance())
    yield router
    router.close()


def test_of_several_brokers_it_takes_the_next_where_one_is_gone(
    router: Router, other: Router
) -> None:
    peer = Echo()
    dealer = Dealer(f"{router.address},{other.address}", peer, "test", 0)
    brokers = {router.address: router, other.address: other}
    dealer.start()
    first = dealer.address
    sender, said = brokers[first].receive()
    assert said == b"hello"
    brokers[first].send([sender, b"welcome"])
    until(lambda: peer.received, WAIT_S, "the first broker is connected")
    brokers[first].close()
    until(lambda: dealer.address != first, WAIT_S, "the other broker's turn")
    assert brokers[dealer.address].receive()[1] == b"hello"
    assert peer.disconnections >= 1
    dealer.close()


def test_of_several_brokers_it_takes_one_that_is_there(router: Router) -> None:
    nobody = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    peer = Echo()
    dealer = Dealer(",".join([*nobody, router.address]), peer, "test", 0)
    dealer.start()
    assert router.receive()[1] == b"hello"
    assert dealer.address == router.address
    dealer.close()
