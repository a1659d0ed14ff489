"""A broker on real sockets, in a thread, and raw sockets that connect to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq
from tokenbus.broker.server import BrokerServer
from tokenbus.protocol.keys import OwnKey

WAIT_MS = 120_000
"""Time that a socket waits for an answer, in milliseconds. It only bounds a hang."""


@contextmanager
def running(server: BrokerServer) -> Iterator[BrokerServer]:
    """Runs a broker for the ``with`` block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(server.run(),))
    thread.start()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(server.stop)
        thread.join(300)
        loop.close()


class RawPeer:
    """A DEALER whose messages a test sends. The test can choose the routing id."""

    def __init__(self, address: str, key: OwnKey | None = None, routing_id: bytes = b"") -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self.socket.setsockopt(zmq.SNDTIMEO, WAIT_MS)
        if routing_id:
            self.socket.setsockopt(zmq.ROUTING_ID, routing_id)
        if key is not None:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(key.broker))
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(key.public))
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(key.secret))
        self.socket.connect(address)

    def send(self, message_type: bytes, body: Any) -> None:
        """Sends a client's message."""
        self.socket.send_multipart([message_type, msgspec.json.encode(body)])

    def receive(self, message_type: bytes) -> Any:
        """The body of the next message of a type."""
        while True:
            frames = self.socket.recv_multipart()
            if frames[0] == message_type:
                return msgspec.json.decode(frames[1])

    def close(self) -> None:
        """Closes the connection."""
        self.socket.close(0)


def intrude(
    address: str, routing_id: bytes, frames: list[bytes], expected: bytes, key: OwnKey | None = None
) -> tuple[RawPeer, list[bytes]]:
    """Connects a peer with another peer's routing id; returns the new peer and its first answer,
    whose type contains ``expected``.

    The first attempts fail while libzmq or the broker still has the earlier connection.
    """
    while True:
        peer = RawPeer(address, key, routing_id)
        peer.socket.send_multipart(frames)
        if peer.socket.poll(500) and expected in (answer := peer.socket.recv_multipart())[0]:
            return peer, answer
        peer.close()
