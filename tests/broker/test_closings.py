"""The broker notices a worker's closed connection long before a heartbeat is due, and ends a lease
on time."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from tokenbus.broker.server import BrokerServer
from tokenbus.broker.settings import BrokerSettings
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.header import Flag, decode_header, encode_header
from tokenbus.protocol.packing import pack, unpack
from tokenbus.protocol.worker_messages import Register

from ..worlds.broker import Bench, generate

Socket = zmq.Socket[bytes]


@pytest.fixture(params=["ipc", "tcp"])
def server(request: pytest.FixtureRequest) -> Iterator[BrokerServer]:
    """A broker on its own thread. It sends only the first heartbeat."""
    with tempfile.TemporaryDirectory(prefix="tb-") as folder:
        settings = BrokerSettings(heartbeat_s=3600, expiry_s=36_000, drain_s=0)
        back = f"ipc://{folder}/back.sock" if request.param == "ipc" else "tcp://127.0.0.1:*"
        server = BrokerServer(f"ipc://{folder}/front.sock", back, settings)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_until_complete, args=(server.run(),))
        thread.start()
        yield server
        loop.call_soon_threadsafe(server.stop)
        thread.join(300)
        loop.close()


def connect(endpoint: str) -> Socket:
    socket: Socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.rcvtimeo = 60_000
    socket.connect(endpoint)
    return socket


def register(endpoint: str, name: str) -> Socket:
    """A worker that serves the model ``m``."""
    worker = connect(endpoint)
    body = Register(name=name, role="gpu", version=1, pid=1, host="h", capacity=9, patterns=["m"])
    worker.send_multipart(pack([b"REGISTER", encode_header(), encode_body(body, "msgpack")]))
    assert unpack(worker.recv_multipart())[0] == b"REGISTERED"
    return worker


def next_request(worker: Socket) -> list[bytes]:
    while (frames := unpack(worker.recv_multipart()))[0] != b"GENERATE":
        pass
    return list(frames)


def test_the_streams_of_a_worker_whose_connection_closes_move_at_once(server: BrokerServer) -> None:
    client = connect(server.front_endpoint)
    last = register(server.back_endpoint, "worker 0")
    # The broker notices each of three losses. Each loss has its own stream, because the broker does
    # not immediately restart a stream that was at two lost workers.
    for number in range(1, 4):
        client.send_multipart([b"GENERATE", msgspec.json.encode(generate(number))])
        next_request(last)
        other = register(server.back_endpoint, f"worker {number}")
        last.close()
        frames = next_request(other)
        assert decode_header(frames[1]).flags & Flag.MOVED
        client.send_multipart([b"CANCEL", msgspec.json.encode({"stream_id": number})])
        last = other
    last.close()
    client.close()


def test_the_next_tick_is_due_when_a_lease_ends() -> None:
    bench = Bench(expiry_s=5.0, tick_s=0.25)
    assert bench.broker.wait_s(bench.now) == 0.25
    bench.worker("w")
    bench.pass_time(4.75)
    bench.now += 0.2
    assert bench.broker.wait_s(bench.now) == pytest.approx(0.05)
    # The lease lasts up to and including this time. Until it ends, the broker does not tick in a
    # busy loop.
    bench.now += 0.05
    assert bench.broker.wait_s(bench.now) > 0
    bench.now += bench.broker.wait_s(bench.now)
    bench.broker.tick(bench.now)
    assert not bench.broker.state.workers
    assert bench.broker.wait_s(bench.now) == 0.25
