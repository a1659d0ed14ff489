"""Numbers the connections of a socket, and accepts only the keys of the keyring. Both use ZAP,
ZeroMQ's authentication protocol (RFC 27).

For each handshake, ZeroMQ sends one ZAP request over a socket within the process. The answer has a
text, the *User-Id*. It consists of a number that no other connection has, and of the peer's public
key if the broker has keys. ZeroMQ adds the text to each message of the connection, as the metadata
``User-Id``. ZeroMQ itself encrypts the messages (CURVE, RFC 26).
"""

from __future__ import annotations

import logging
from itertools import count

import zmq

from ..protocol.keys import OwnKey, Role
from .keyring import Keyring

log = logging.getLogger(__name__)

ENDPOINT = "inproc://zeromq.zap.01"
VERSION = b"1.0"
FRAMES = 6
"""Number of frames of a ZAP request without CURVE: version, request id, domain, address, routing
id, mechanism. With CURVE, the peer's public key follows."""


class Zap:
    """Answers the authentication requests of one ZeroMQ context. Call ``answer`` when the
    descriptor ``fd`` is readable."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], keyring: Keyring | None = None
    ) -> None:
        """``keyring``: the keys that may connect; None if the broker has no keys."""
        self._keyring = keyring
        self._numbers = count(1)
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        self.fd = int(self._socket.getsockopt(zmq.FD))

    def answer(self) -> None:
        """Answers all requests that have arrived."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._socket.send_multipart(self._answer(frames))

    def close(self) -> None:
        """Stops answering."""
        self._socket.close(0)

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        number = frames[1] if len(frames) > 1 else b""
        if len(frames) < FRAMES or frames[0] != VERSION:
            return [VERSION, number, b"400", b"this is not a request of ZAP 1.0", b"", b""]
        if self._keyring is None and frames[5] == b"NULL":
            return [VERSION, number, b"200", b"OK", self._user(""), b""]
        if self._keyring is not None and frames[5] == b"CURVE" and len(frames) > FRAMES:
            role: Role = "worker" if frames[2] == _domain("worker") else "client"
            key = frames[6].hex()
            if self._keyring.admits(role, key):
                return [VERSION, number, b"200", b"OK", self._user(key), b""]
            address = frames[3].decode("ascii", "replace")
            log.warning("a %s at %s was refused: its key %s is not allowed", role, address, key)
        return [VERSION, number, b"400", b"this key is not allowed", b"", b""]

    def _user(self, key: str) -> bytes:
        """A new ``User-Id``, for a connection of a peer with this key."""
        return f"{next(self._numbers)} {key}".encode()


def number_of(user: str) -> int:
    """The number of the connection with a ``User-Id``. Later connections have larger numbers."""
    return int(user.partition(" ")[0])


def key_of(user: str) -> str:
    """The public key of the peer with a ``User-Id``; empty without keys."""
    return user.partition(" ")[2]


def number_connections(socket: zmq.Socket[bytes], role: Role) -> None:
    """Makes ZeroMQ authenticate each connection of a socket. Call it before the socket is bound."""
    socket.setsockopt(zmq.ZAP_DOMAIN, _domain(role))


def require_keys(socket: zmq.Socket[bytes], key: OwnKey) -> None:
    """Lets only peers with an allowed key connect. Call it before the socket is bound."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(key.secret))


def _domain(role: Role) -> bytes:
    return role.encode()
