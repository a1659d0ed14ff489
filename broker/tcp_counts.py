"""Counts bytes of a TCP connection: the received bytes, the received bytes that libzmq has not read
yet, and the bytes of one message on the wire."""

from __future__ import annotations

import socket as sockets
import struct
from collections.abc import Iterable
from fcntl import ioctl
from termios import FIONREAD

RECEIVED_AT = 128
"""The offset of ``tcpi_bytes_received`` in ``struct tcp_info`` (``linux/tcp.h``)."""
SHORT_FRAME_BYTES = 255
"""A frame with more bytes has a header of 9 bytes, any other frame a header of 2 bytes (ZMTP
3.1)."""
CURVE_BYTES = 33
"""Bytes that CURVE adds to each frame: the name of the command, a nonce, a tag and flags
(RFC 26)."""
_U64 = struct.Struct("=Q")
_INT = struct.Struct("=i")
_INFO_BYTES = RECEIVED_AT + _U64.size


def bytes_received(fd: int) -> int | None:
    """The bytes that a TCP connection has received; None if ``fd`` is not a TCP connection."""
    try:
        connection = sockets.socket(sockets.AF_INET, sockets.SOCK_STREAM, 0, fileno=fd)
    except OSError:
        return None
    try:
        info = connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _INFO_BYTES)
        return int(_U64.unpack_from(info, RECEIVED_AT)[0])
    except (OSError, struct.error):
        return None
    finally:
        connection.detach()


def bytes_unread(fd: int) -> int:
    """The bytes that a connection has received and libzmq has not read yet; 0 if they cannot be
    counted."""
    try:
        return int(_INT.unpack(ioctl(fd, FIONREAD, bytes(_INT.size)))[0])
    except OSError:
        return 0


def bytes_of_message(frames: Iterable[bytes], encrypted: bool) -> int:
    """The bytes that a message with these frames has on the wire."""
    added = CURVE_BYTES if encrypted else 0
    sizes = [len(frame) + added for frame in frames]
    return sum(size + (9 if size > SHORT_FRAME_BYTES else 2) for size in sizes)
