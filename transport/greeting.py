"""Reads the security mechanism of a broker from the greeting of ZMTP (RFC 37).

The two sides of a connection must have the same mechanism. If they do not, the broker usually
closes the connection before it has sent its mechanism. libzmq's monitor then reports no reason.
``mechanism_of`` sends no mechanism, so the broker sends its whole greeting.
"""

from __future__ import annotations

import contextlib
import socket as sockets
import time

GREETING_S = 2.0
"""Maximum time for which ``mechanism_of`` waits for the greeting, in seconds."""
GREETING_BYTES = 64
SIGNATURE_AND_VERSION = b"\xff" + bytes(8) + b"\x7f" + b"\x03"
"""The first bytes of a greeting in ZMTP 3. A broker that has received them sends the rest of its
own greeting."""
_MECHANISM = slice(12, 32)
"""The bytes of the greeting that name the mechanism, in ASCII and padded with zeros."""


def mechanism_of(address: str) -> str | None:
    """The mechanism of the broker at ``address``, for example ``CURVE``; None if no greeting of
    ZMTP 3 arrives in time."""
    until = time.monotonic() + GREETING_S
    received = b""
    with contextlib.suppress(OSError, ValueError), _connected(address) as socket:
        socket.sendall(SIGNATURE_AND_VERSION)
        while len(received) < GREETING_BYTES:
            socket.settimeout(max(until - time.monotonic(), 0.001))
            if not (chunk := socket.recv(GREETING_BYTES - len(received))):
                return None
            received += chunk
    if len(received) < GREETING_BYTES or received[0] != 0xFF or received[10] < 3:
        return None
    return received[_MECHANISM].rstrip(b"\0").decode("ascii", "replace")


def _connected(address: str) -> sockets.socket:
    """A socket that is connected to ``address``, which has the scheme tcp or ipc."""
    scheme, _, place = address.partition("://")
    if scheme == "tcp":
        host, _, port = place.rpartition(":")
        # In ZeroMQ's form, a source address and a semicolon may precede the host.
        host = host.rpartition(";")[2].strip("[]")
        return sockets.create_connection((host, int(port)), GREETING_S)
    if scheme != "ipc":
        raise ValueError(f"{address!r} has neither the scheme tcp nor ipc")
    socket = sockets.socket(sockets.AF_UNIX)
    try:
        socket.settimeout(GREETING_S)
        # A path that begins with @ is in Linux's abstract namespace.
        socket.connect("\0" + place[1:] if place.startswith("@") else place)
    except BaseException:
        socket.close()
        raise
    return socket
