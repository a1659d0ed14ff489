"""A client's connection on each of the four transports: lines of LMTP in both directions.

No connection uses our client library. Each does only what its transport requires of any program.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import zmq
from tokenbus.inprocess import InProcess
from websockets.sync.client import ClientConnection

from ..processes import Bus, Gateway, clean_environment
from ..websocket import connect

WAIT_S = 120.0
"""Time in seconds after which a test fails if no message arrives."""


class Lmtp(ABC):
    """One connection. Each transport implements ``send_line``, ``receive_line`` and ``close``."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    @abstractmethod
    def send_line(self, line: str) -> None:
        """Sends a message."""

    @abstractmethod
    def receive_line(self) -> str:
        """Waits for the next message and returns it. Fails the test if no message arrives."""

    @abstractmethod
    def close(self) -> None:
        """Ends the connection without a BYE."""

    def send(self, kind: str, **body: Any) -> None:
        """Sends a message with this body."""
        self.send_line(f"{kind} {json.dumps(body)}")

    def receive(self) -> tuple[str, Any]:
        """The type and the body of the next message that is not SYSTEM, because a busy machine may
        cause events of streams."""
        kind, body = self.receive_any()
        while kind == "SYSTEM":
            kind, body = self.receive_any()
        return kind, body

    def receive_any(self) -> tuple[str, Any]:
        """The type and the body of the next message."""
        kind, _, body = self.receive_line().partition(" ")
        return kind, json.loads(body)

    def hello(self, **body: Any) -> Any:
        """Begins a session, and returns the body of WELCOME."""
        self.send("HELLO", client="tests", **body)
        kind, welcome = self.receive()
        assert kind == "WELCOME", welcome
        return welcome

    def begin(self, kind: str, **body: Any) -> int:
        """Sends a request with a new stream id, and returns the id."""
        stream_id = next(self._numbers)
        self.send(kind, stream_id=stream_id, **body)
        return stream_id

    def ask(self, kind: str, **body: Any) -> tuple[str, Any]:
        """Sends a request, and returns the type and the body of its answer, a MSG or an ERROR."""
        stream_id = self.begin(kind, **body)
        word, answer = self.receive()
        assert answer["stream_id"] == stream_id
        return word, answer

    def stream(self, kind: str, **body: Any) -> list[Any]:
        """Sends a request, and returns all entries of its stream."""
        return self.rest_of(self.begin(kind, **body))

    def rest_of(self, stream_id: int) -> list[Any]:
        """Receives the remaining entries of a stream, which must be the only running stream."""
        entries: list[Any] = []
        while not entries or entries[-1]["finish_reason"] is None or entries[-1].get("live", 0):
            kind, body = self.receive()
            assert kind == "TOKEN", body
            entries += body
        assert {entry["stream_id"] for entry in entries} == {stream_id}
        return entries


class ZeroMQ(Lmtp):
    """A DEALER socket. The type and the body of a message are separate frames."""

    def __init__(self, front: str) -> None:
        super().__init__()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(front)

    def send_line(self, line: str) -> None:
        """Sends a message."""
        self._socket.send_multipart([part.encode() for part in line.split(" ", 1)])

    def receive_line(self) -> str:
        """The next message."""
        assert self._socket.poll(int(WAIT_S * 1000)), "no message arrived"
        return b" ".join(self._socket.recv_multipart()).decode()

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()


class WebSocket(Lmtp):
    """A WebSocket. Each line is a text message."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._socket: ClientConnection = connect(url, max_size=None).__enter__()

    def send_line(self, line: str) -> None:
        """Sends a message."""
        self._socket.send(line)

    def receive_line(self) -> str:
        """The next message."""
        message = self._socket.recv(WAIT_S)
        assert isinstance(message, str)
        return message

    def close(self) -> None:
        """Ends the connection, without a closing handshake."""
        self._socket.close_socket()


class Stdio(Lmtp):
    """A process of ``tokenbus lmtp --stdio``."""

    def __init__(self, front: str) -> None:
        super().__init__()
        self._process = subprocess.Popen(
            [Path(sys.executable).parent / "tokenbus", "lmtp", "--stdio"],
            env=clean_environment(front=front),
            cwd="/tmp",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._lines: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def send_line(self, line: str) -> None:
        """Sends a message."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def receive_line(self) -> str:
        """The next message."""
        return self._lines.get(timeout=WAIT_S)

    def close(self) -> None:
        """Kills the process."""
        self._process.kill()
        self._process.communicate()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.decode())


class Memory(Lmtp):
    """A connection to a system within this process."""

    def __init__(self, system: InProcess) -> None:
        super().__init__()
        self._connection = system.connect()

    def send_line(self, line: str) -> None:
        """Sends a message."""
        self._connection.send(line)

    def receive_line(self) -> str:
        """The next message."""
        line = self._connection.receive(WAIT_S)
        assert line is not None
        return line

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()


class Transport:
    """One of the four transports, and a system that serves it."""

    def __init__(
        self, name: str, bus: Bus | None, gateway: Gateway | None, system: InProcess | None
    ) -> None:
        self.name = name
        self._bus = bus
        self._gateway = gateway
        self._system = system
        self._open: list[Lmtp] = []

    @property
    def address(self) -> str:
        """The address at which ``Client`` connects to the same system."""
        if self._system is not None:
            return self._system.address
        assert self._bus is not None
        return self._bus.front

    def connect(self) -> Lmtp:
        """A new connection, which is closed after the last test."""
        connection: Lmtp
        if self._system is not None:
            connection = Memory(self._system)
        elif self._gateway is not None:
            connection = WebSocket(self._gateway.ws_url)
        elif self.name == "stdio":
            connection = Stdio(self.address)
        else:
            connection = ZeroMQ(self.address)
        self._open.append(connection)
        return connection

    def close(self) -> None:
        """Closes all connections."""
        for connection in self._open:
            connection.close()
