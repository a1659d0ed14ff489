"""ZAP, ZeroMQ's authentication protocol (RFC 27): asks the keyring about each new connection.

ZeroMQ asks once for each handshake, through a socket within the process, and encrypts by itself
(CURVE, RFC 26): no message costs the broker more. Its answer names the peer's public key, with
which each message of the connection arrives as the metadata ``User-Id``.
"""

from __future__ import annotations

import logging

import zmq

from ..protocol.keys import OwnKey, Role
from .keyring import Keyring

log = logging.getLogger(__name__)

ENDPOINT = "inproc://zeromq.zap.01"
VERSION = b"1.0"
FRAMES = 7
"""Of a request with CURVE: version, request id, domain, address, routing id, mechanism, key."""


class Zap:
    """Answers ZeroMQ's questions of one context. ``answer`` is called when ``fd`` is readable."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keyring: Keyring) -> None:
        self._keyring = keyring
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        self.fd = int(self._socket.getsockopt(zmq.FD))

    def answer(self) -> None:
        """Answers all questions that have arrived."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._socket.send_multipart(self._answer(frames))

    def close(self) -> None:
        """Answers no more."""
        self._socket.close(0)

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        number = frames[1] if len(frames) > 1 else b""
        if len(frames) == FRAMES and frames[0] == VERSION and frames[5] == b"CURVE":
            role: Role = "worker" if frames[2] == _domain("worker") else "client"
            key = frames[6].hex()
            if self._keyring.admits(role, key):
                return [VERSION, number, b"200", b"OK", key.encode(), b""]
            address = frames[3].decode("ascii", "replace")
            log.warning("a %s at %s was refused: its key %s is not allowed", role, address, key)
        return [VERSION, number, b"400", b"this key is not allowed", b"", b""]


def require_keys(socket: zmq.Socket[bytes], key: OwnKey, role: Role) -> None:
    """Lets only peers with an allowed key of this role connect. Before the socket is bound."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(key.secret))
    socket.setsockopt(zmq.ZAP_DOMAIN, _domain(role))


def _domain(role: Role) -> bytes:
    return role.encode()
