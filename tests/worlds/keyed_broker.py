"""A broker with keys on real sockets, in a thread, for tests."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import zmq
from tokenbus.broker.server import BrokerServer
from tokenbus.broker.settings import BrokerSettings
from tokenbus.clients import Client, OwnKey
from tokenbus.clients.cli.keys import new_pair
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.frames import Frames
from tokenbus.protocol.header import encode_header
from tokenbus.protocol.keys import Allowed, KeyFolder, Quotas, Role
from tokenbus.protocol.packing import pack, unpack
from tokenbus.protocol.worker_messages import Register
from tokenbus.protocol.worker_messages import Role as WorkerRole
from tokenbus.transport.dealer import open_dealer

from .running_broker import WAIT_MS, running

Socket = zmq.Socket[bytes]

NONE = Quotas()


class KeyedBroker:
    """A broker that accepts only connections with keys. Clients connect over TCP."""

    def __init__(self, back: str = "") -> None:
        """``back``: the address for workers. If it is empty, workers use a Unix socket."""
        self._temporary = tempfile.TemporaryDirectory(prefix="tb-")
        self.path = Path(self._temporary.name)
        self.keys = KeyFolder(self.path / "keys")
        self.keys.make(new_pair)
        # Ticks are frequent, so that the broker soon reads a changed folder of keys. Leases and
        # sessions are long, so that none expires in a test.
        settings = BrokerSettings(
            expiry_s=600, session_expiry_s=600, session_grace_s=600, tick_s=0.02, drain_s=0
        )
        self.server = BrokerServer(
            "tcp://127.0.0.1:*", back or f"ipc://{self.path}/back.sock", settings, keys=self.keys
        )
        self.front, self.back = self.server.front_endpoint, self.server.back_endpoint
        self._running = running(self.server)

    def __enter__(self) -> Self:
        self._running.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._running.__exit__(kind, error, trace)
        self._temporary.cleanup()

    def new_key(self, name: str, role: Role = "client", quotas: Quotas = NONE) -> OwnKey:
        """Makes and allows a key. It is accepted as soon as the broker has read the key folder."""
        key = self.stranger(name, role)
        self.keys.allow(role, name, Allowed(public=key.public, **msgspec.structs.asdict(quotas)))
        return key

    def stranger(self, name: str = "stranger", role: Role = "client") -> OwnKey:
        """A key that was not allowed."""
        return KeyFolder.issue(name, role, new_pair(), self.keys.broker().public)

    def client(self, key: OwnKey | None, front: str = "") -> Client:
        """A client with this key."""
        return Client(front or self.front, patience_s=WAIT_MS / 1000, key=key)

    def worker(self, key: OwnKey, name: str = "w", patterns: tuple[str, ...] = ("m",)) -> Worker:
        """A registered worker. The test receives and sends its messages."""
        worker = Worker(self.back, key, name)
        worker.register(patterns)
        return worker


class Worker:
    """The connection of a worker whose messages the test sends."""

    def __init__(self, back: str, key: OwnKey | None, name: str = "w") -> None:
        self.name = name
        self.socket = open_dealer(zmq.Context.instance(), back, key=key)
        self.socket.rcvtimeo = self.socket.sndtimeo = WAIT_MS

    def register(self, patterns: tuple[str, ...] = ("m",)) -> None:
        """Registers, and waits for the answer."""
        self.send_registration(patterns)
        self.receive(b"REGISTERED")

    def send_registration(self, patterns: tuple[str, ...] = ("m",)) -> None:
        """Sends a registration."""
        self.send(registration(self.name, patterns))

    def send(self, frames: Frames) -> None:
        """Sends a message."""
        self.socket.send_multipart(pack(frames))

    def receive(self, kind: bytes) -> Frames:
        """The next message of a type."""
        while True:
            frames = unpack(self.socket.recv_multipart())
            if frames[0] == kind:
                return frames

    def close(self) -> None:
        """Closes the connection."""
        self.socket.close(0)


def registration(name: str, patterns: tuple[str, ...] = ("m",), role: WorkerRole = "gpu") -> Frames:
    """The registration of a worker."""
    body = Register(
        name=name, role=role, version=1, pid=1, host="h", capacity=9, patterns=list(patterns)
    )
    return [b"REGISTER", encode_header(), encode_body(body, "msgpack")]
