"""A channel between the worker and one thread of a guest process. A channel consists of shared
memory and two eventfds.

The shared memory has an area for each direction, with room for one part of a message. A message
that is larger than the area is sent in several parts. The receiver acknowledges each part except
the last. Masks have a separate area, to which only the guest process writes. The worker copies each
part before it decodes the part, because the process may change the shared memory at any time.

In this folder, a *request* is a message of the worker that the process answers. It is not a
client's request. A batch is a request with several *items* (``messages.py``). Each item is a round
of one controller.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import struct
from typing import NamedTuple

HEAD_BYTES = 4096
AREA_BYTES = 1024 * 1024
"""Bytes of the area of each direction."""
MASK_BYTES = 2 * 1024 * 1024
"""Bytes of the area for masks. The area has the masks of several rounds that run in one request
(``batches.py``), or one mask and a bias. Pages that were never written do not occupy memory."""
SHARED_BYTES = HEAD_BYTES + 2 * AREA_BYTES + MASK_BYTES
KEPT_BYTES = 64 * 1024
"""If any part of a request or of its answer has more than this number of bytes, the memory of both
areas is freed after the request."""
MAX_MESSAGE_BYTES = 512 * 1024 * 1024
"""Maximum bytes of a message to the guest process. A compiled module has up to 256 MiB."""
MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Maximum bytes of a message from the guest process. The number of items in a batch is chosen so
that their answers fit."""
MAX_REASON = 4096
"""Maximum bytes of the error that a failing process sends, and that the worker logs."""
CLOSED_MS = 1000
"""Interval in milliseconds at which a waiting thread of the worker checks whether the channel is
closed. ``close`` also notifies the eventfd, but a compromised process may consume this notice."""
QUICK_MS = 1
"""Milliseconds that a thread of the worker waits for an answer before it frees its slot in the
thread pool (``pool.py``)."""

_ONE = (1).to_bytes(8, "little")
_PART = struct.Struct("<II")
"""The head of a part: its size, and whether further parts follow."""
_CURRENT_AT = 64
"""Offset in the shared memory, in bytes, of the number of the item that the process is running."""


class ChannelFiles(NamedTuple):
    """The descriptors of a channel, which are sent to the process."""

    memory: int
    to_guest: int
    to_worker: int

    @classmethod
    def make(cls) -> ChannelFiles:
        """Creates the files of a new channel. Raises OSError."""
        flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
        made = [os.memfd_create("channel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)]
        try:
            os.ftruncate(made[0], SHARED_BYTES)
            _seal(made[0])
            made.append(os.eventfd(0, flags))
            made.append(os.eventfd(0, flags))
        except OSError:
            for descriptor in made:
                os.close(descriptor)
            raise
        return cls(*made)


class ChannelClosed(Exception):
    """The channel was closed, or the other side has sent a part that is not valid."""


class Channel:
    """One side of a channel. Its methods, except ``close``, may be called by one thread at a
    time."""

    def __init__(self, files: ChannelFiles, *, guest: bool) -> None:
        """``guest``: whether this is the side of the guest process. The caller closes
        ``files.memory``; the channel owns the other descriptors. Raises OSError if the process has
        no free descriptor."""
        self._map = mmap.mmap(files.memory, SHARED_BYTES)
        view = memoryview(self._map)
        first = view[HEAD_BYTES : HEAD_BYTES + AREA_BYTES]
        second = view[HEAD_BYTES + AREA_BYTES : HEAD_BYTES + 2 * AREA_BYTES]
        self._head = view[:HEAD_BYTES]
        self._out, self._in = (second, first) if guest else (first, second)
        self._out_at, self._in_at = (32, 0) if guest else (0, 32)
        self.masks = view[HEAD_BYTES + 2 * AREA_BYTES :]
        self._theirs = files.to_worker if guest else files.to_guest
        self._mine = files.to_guest if guest else files.to_worker
        self._max_received = MAX_MESSAGE_BYTES if guest else MAX_ANSWER_BYTES
        self._check_ms = None if guest else CLOSED_MS
        self._poll = select.poll()
        self._poll.register(self._mine, select.POLLIN)
        self._closed = False
        self._largest = 0
        """Bytes of the largest part since the last ``shrink``."""

    def send(self, message: bytes) -> None:
        """Sends a message. Raises ChannelClosed if the channel is closed."""
        size = len(message)
        if size <= AREA_BYTES:
            self._put(message, 0)
            return
        for at in range(0, size, AREA_BYTES):
            more = at + AREA_BYTES < size
            self._put(message[at : at + AREA_BYTES], more)
            if more:
                self.wait()

    def receive(self) -> bytes:
        """Waits for a message, and returns the whole message. Raises ChannelClosed if the channel
        is closed, or if a part is not valid."""
        self.wait()
        part, more = self.take_part()
        return self.receive_rest(part) if more else part

    def quick(self) -> bool:
        """Whether a part arrives within ``QUICK_MS``. Raises ChannelClosed if the channel is
        closed."""
        return self._arrives(QUICK_MS)

    def wait(self) -> None:
        """Waits for a part. Raises ChannelClosed if the channel is closed."""
        while not self._arrives(self._check_ms):
            pass

    def take_part(self, before: int = 0) -> tuple[bytes, bool]:
        """The part that has arrived, and whether further parts follow. ``before``: total bytes of
        the message's earlier parts. Raises ChannelClosed if the part is not valid."""
        size, more = _PART.unpack_from(self._head, self._in_at)
        self._largest = max(self._largest, size)
        total = before + size
        if size > AREA_BYTES or total > self._max_received:
            raise ChannelClosed(f"a part of a message has {size} bytes, all parts {total}")
        return bytes(self._in[:size]), bool(more)

    def receive_rest(self, part: bytes) -> bytes:
        """Waits for the parts after the first one, and returns the whole message. Raises
        ChannelClosed if the channel is closed, or if a part is not valid."""
        parts, total, more = [part], len(part), True
        while more:
            self._notify(self._theirs)
            self.wait()
            part, more = self.take_part(total)
            parts.append(part)
            total += len(part)
        return b"".join(parts)

    @property
    def current(self) -> int:
        """The number of the item that the process is running. A compromised process may set any
        number."""
        return int.from_bytes(self._head[_CURRENT_AT : _CURRENT_AT + 4], "little")

    @current.setter
    def current(self, number: int) -> None:
        self._head[_CURRENT_AT : _CURRENT_AT + 4] = number.to_bytes(4, "little")

    def shrink(self, *, masks: bool) -> None:
        """Called by the worker after a request. If ``masks`` is true, frees the memory of both
        areas and of the masks. If ``masks`` is false, frees the memory of both areas if a part was
        large, and keeps the memory of the masks. Freed memory reads as zeros."""
        if masks:
            self._map.madvise(mmap.MADV_REMOVE, HEAD_BYTES, SHARED_BYTES - HEAD_BYTES)
        elif self._largest > KEPT_BYTES:
            self._map.madvise(mmap.MADV_REMOVE, HEAD_BYTES, 2 * AREA_BYTES)
        self._largest = 0

    def close(self) -> None:
        """Ends the channel. Every thread that waits now or later gets ChannelClosed. Any thread may
        call this method."""
        self._closed = True
        self._notify(self._mine)

    def free(self) -> None:
        """Closes the descriptors. Called when no thread uses the channel any more."""
        self._closed = True
        if self._mine >= 0:
            self._poll.unregister(self._mine)
            os.close(self._mine)
            os.close(self._theirs)
            self._mine = self._theirs = -1

    def _put(self, part: bytes, more: int) -> None:
        self._largest = max(self._largest, len(part))
        self._out[: len(part)] = part
        _PART.pack_into(self._head, self._out_at, len(part), more)
        if self._closed:
            raise ChannelClosed("the process has ended")
        self._notify(self._theirs)

    @staticmethod
    def _notify(descriptor: int) -> None:
        try:
            os.write(descriptor, _ONE)
        except BlockingIOError:
            pass  # The counter is full, so the reader was notified before.

    def _arrives(self, wait_ms: int | None) -> bool:
        """Waits up to ``wait_ms`` for a notice of the other side. If ``wait_ms`` is None, the wait
        has no bound. Returns whether a notice has arrived, and consumes it."""
        self._poll.poll(wait_ms)
        if self._closed:
            raise ChannelClosed("the process has ended")
        try:
            os.read(self._mine, 8)
        except BlockingIOError:
            return False
        return True


def _seal(memory: int) -> None:
    """Fixes the size of the memory. If a guest process could shrink the memory, SIGBUS would end
    the worker when the worker reads the removed part."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
