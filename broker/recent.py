"""Stores the recently routed TOKENs of all sessions in one buffer, in the order of their arrival.

A message has the bodies of many sessions. Copying a whole message with eight bodies into this
buffer takes 0.4 µs. Adding the eight bodies to the logs of their sessions would take ten times as
long, because these writes touch new memory.

Most streams end while their bodies are in the buffer, and bodies that no live stream needs are
dropped unread. The other bodies are distributed to the logs, oldest first: some of them at each
tick, and more when the buffer is full.

Messages are numbered. A log needs the bodies of its session from all messages since the oldest
request in the log began.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from array import array
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

from ..protocol.header import decode_manifest
from ..protocol.packing import unpack

if TYPE_CHECKING:
    from .stream_log import StreamLog

SEGMENT_BYTES = 2 * 1024 * 1024
"""Bytes of a segment. A segment is reused when all its messages are distributed or dropped."""
SEGMENTS = 32
"""Maximum number of segments. Memory of about two segments is unused: one free segment, and the
ends of all other segments, which together have about the size of one."""
MESSAGES = 4096
"""Maximum number of messages in a segment. Before a stream can move, the whole buffer has to be
distributed; this bound limits the time for that."""
BUFFER_PART = 2
"""This buffer takes at most 1/``BUFFER_PART`` of the journals' bound of one session, and of their
bound of all sessions together. The logs get the rest."""
BODIES_AT_ONCE = 500
"""Approximate number of bodies that are distributed at once. Distributing a body takes 1 to 2 µs if
the message has many sessions, and twice as long if the previous message has a different layout
(``_layout``)."""

_POPULATE_WRITE = 23
"""Linux's MADV_POPULATE_WRITE, for which Python has no constant."""

_NONE = mmap.mmap(-1, 1)
"""A placeholder for memory that is not allocated yet."""


class Segment:
    """A part of the buffer's memory, and its messages."""

    __slots__ = ("ends", "first", "large", "part", "read", "start")

    def __init__(self, part: int, first: int) -> None:
        self.part = part
        """The number of the part of the memory."""
        self.first = first
        """The number of the first message."""
        self.ends = array("I")
        """The offset at which each message ends, from the start of the whole memory."""
        self.read = 0
        """Number of messages that are already distributed."""
        self.start = part * SEGMENT_BYTES
        """The offset of the first message that is not distributed, from the start of the whole
        memory."""
        self.large: dict[int, tuple[Sequence[int], Sequence[bytes]]] = {}
        """The sessions and the bodies of each message that is stored outside the segment's memory.
        The key is the message's index in this segment."""

    @property
    def next(self) -> int:
        """The number of the message that follows this segment."""
        return self.first + len(self.ends)

    @property
    def size(self) -> int:
        """Bytes that are not distributed yet."""
        large = sum(sum(map(len, bodies)) for _, bodies in self.large.values())
        return large + (self.ends[-1] - self.start if self.ends else 0)


class Recent:
    """The buffer of the messages that are not distributed to logs yet. This object also has the
    total size of all logs.

    ``max_journal_bytes`` is the bound of one session, ``max_total_bytes`` the bound of all sessions
    together. All messages in the shared buffer count towards each of these bounds.
    """

    def __init__(self, max_journal_bytes: int, max_total_bytes: int) -> None:
        self.enabled = max_journal_bytes > 0
        self.logs: dict[int, StreamLog] = {}
        """By session: the logs that have requests."""
        self.total = 0
        """Bytes of all logs, without the messages in this buffer."""
        self.size = 0
        """Bytes in this buffer."""
        most = min(max_journal_bytes, max_total_bytes) // BUFFER_PART
        full = min(SEGMENTS - 2, -(-most // SEGMENT_BYTES))
        self.limit = min(most, full * SEGMENT_BYTES)
        """Maximum bytes in this buffer."""
        self.most = max_journal_bytes - self.limit
        """Maximum size of a log."""
        self.max_total = max_total_bytes - self.limit
        """Maximum bytes of all logs."""
        self.beyond: set[StreamLog] = set()
        """Logs above a bound: logs that are larger than ``most``, and logs that have grown while
        all logs together were larger than ``max_total``."""
        self.pending: list[bytes] = []
        """Packed TOKENs of the current event. ``settle`` copies them into the buffer at the end of
        the event."""
        self._memory = _NONE
        self._bytes = (full + 2) * SEGMENT_BYTES
        """The size of ``_memory``, in bytes."""
        self._free = list(range(full + 2))[::-1]
        """Numbers of the parts of the memory that no segment uses. The next segment gets the last
        part in this list, which was used most recently."""
        self._segments: deque[Segment] = deque()
        self._at = 0
        """The offset at which the next message will begin."""
        self._room = 0
        """The offset up to which messages may be written."""
        self._begin_segment(0)
        self._begun: dict[int, int] = {}
        """Number of live requests that began in each segment, by the number of the segment's first
        message. Distributed segments are included."""
        self._rolled = False
        """Whether a segment was filled since the last tick."""
        self._touched: list[StreamLog] = []
        """Logs that receive bodies in the current distribution."""

    @property
    def next(self) -> int:
        """The number of the next message."""
        return self._segments[-1].next + len(self.pending)

    @property
    def distributed(self) -> int:
        """The number of the first message that is not distributed."""
        return self._segments[0].first + self._segments[0].read

    def reserve(self) -> None:
        """Allocates the memory of all segments now, 64 MiB in about 25 ms.

        Otherwise each memory page (4 KiB) would be allocated when a message is first written to it.
        This takes 2.6 µs, and a step of 64 tokens fills half a page.
        """
        if not self.enabled or self._memory is not _NONE:
            return
        self._allocate()
        # A kernel without this option allocates each memory page when it is first used.
        with contextlib.suppress(OSError, AttributeError):
            self._memory.madvise(_POPULATE_WRITE)

    # --- requests -------------------------------------------------------------------------------

    def begin(self, log: StreamLog) -> int:
        """Records that a request of a log begins with the next message. Returns the number of the
        current segment's first message, to be passed to ``end``."""
        self.logs[log.session] = log
        segment = self._segments[-1].first
        self._begun[segment] = self._begun.get(segment, 0) + 1
        return segment

    def end(self, log: StreamLog, segment: int) -> None:
        """Handles the end of a request that began in a segment. Drops messages that no live request
        needs."""
        # After the session was opened again, it has another log. Streams of the earlier log may end
        # later.
        if log.oldest is None and self.logs.get(log.session) is log:
            del self.logs[log.session]
        self._begun[segment] -= 1
        if self._begun[segment]:
            return
        del self._begun[segment]
        oldest = next(iter(self._begun), None)
        while self._segments[0] is not self._segments[-1]:
            if oldest is not None and oldest <= self._segments[0].first:
                return
            self._drop_first()
        if oldest is None:
            self.pending.clear()
            self._drop_first()

    # --- messages that arrive -------------------------------------------------------------------

    def settle(self) -> None:
        """Copies all ``pending`` messages at once, because one large copy takes less time than many
        small copies."""
        pending, at = self.pending, self._at
        if not pending:
            return
        joined = b"".join(pending)
        size = len(joined)
        end = at + size
        if end > self._room or size > self.limit - self.size or len(self._ends) >= MESSAGES:
            self._settle_each()
            return
        self._memory[at:end] = joined
        ends = accumulate(map(len, pending), initial=at)
        next(ends)
        self._ends.extend(ends)
        self._at = end
        self.size += size
        pending.clear()

    def _settle_each(self) -> None:
        """Copies the ``pending`` messages one by one, because the last segment does not have room
        for all of them."""
        pending = self.pending[:]
        self.pending.clear()
        for message in pending:
            size = len(message)
            if size > min(self.limit, SEGMENT_BYTES):
                _, head, *bodies = unpack([message])
                self.keep(decode_manifest(head).sessions, bodies)
                continue
            self._make_room(size)
            end = self._at + size
            self._memory[self._at : end] = message
            self._at = end
            self._ends.append(end)
            self.size += size

    def keep(self, sessions: Sequence[int], bodies: Sequence[bytes]) -> None:
        """Adds a message that is not copied into the memory, for example because it is large.
        ``sessions`` has the session of each body; an empty body is skipped."""
        self.settle()
        self._segments[-1].large[len(self._ends)] = sessions, bodies
        self._ends.append(self._at)
        self.size += sum(map(len, bodies))
        while self.size > self.limit:
            self.distribute(BODIES_AT_ONCE)

    def _make_room(self, size: int) -> None:
        """Makes room for a message of ``size`` bytes."""
        if self.size + size > self.limit:
            while self.size > max(0, self.limit - max(size, SEGMENT_BYTES // 8)):
                self.distribute(BODIES_AT_ONCE)
        if self._memory is _NONE:
            self._allocate()
        if self._at + size > self._room or len(self._ends) >= MESSAGES:
            while not self._free:
                self.distribute(BODIES_AT_ONCE)
            self._rolled = True
            self._begin_segment(self._segments[-1].next)

    def _begin_segment(self, first: int) -> None:
        """Begins a segment, whose first message has the number ``first``."""
        segment = Segment(self._free.pop(), first)
        self._segments.append(segment)
        self._ends = segment.ends
        self._at = segment.start
        self._room = self._at + SEGMENT_BYTES if self._memory is not _NONE else 0

    def _allocate(self) -> None:
        self._memory = _map(self._bytes)
        self._room = (self._segments[-1].part + 1) * SEGMENT_BYTES

    # --- distribution ---------------------------------------------------------------------------

    def tick(self) -> None:
        """Distributes some of the oldest bodies. If a segment was filled since the last tick, fewer
        bodies are distributed: many streams may end soon, and their bodies are then dropped
        undistributed."""
        self.distribute(BODIES_AT_ONCE // 8 if self._rolled else BODIES_AT_ONCE)
        self._rolled = False

    def distribute(self, most: int = 1 << 62) -> None:
        """Distributes about ``most`` of the oldest bodies to the logs that need them."""
        self.settle()
        while most > 0 and self.distributed < self.next:
            segment = self._segments[0]
            most -= self._read(segment, most)
            if segment.read == len(segment.ends):
                self._drop_first()
        for log in self._touched:
            log.pack()
        self._touched.clear()

    def _read(self, segment: Segment, most: int) -> int:
        """Distributes about ``most`` bodies of a segment, oldest first. Returns the work that was
        done, counted in bodies. Parsing a layout (``_layout``) of n bodies counts as n bodies."""
        memory, ends = self._memory, segment.ends
        done = 0
        while done < most and segment.read < len(ends):
            number, large = segment.first + segment.read, segment.large.pop(segment.read, None)
            if large is not None:
                sessions, bodies = large
                for session, body in zip(sessions, bodies, strict=False):
                    if body:
                        self._deliver(session, number, [body])
                done += len(bodies)
                self.size -= sum(map(len, bodies))
                segment.read += 1
                continue
            start, size = segment.start, ends[segment.read] - segment.start
            head = memory[start : start + _head_size(memory, start)]
            layout = _layout(head, size)
            # Messages of consecutive steps often have the same layout. Such messages are
            # distributed together.
            last = segment.read + 1 + (most - done) // (len(layout) or 1)
            last = min(last, len(ends))
            at, read = start + size, segment.read + 1
            while read < last and ends[read] - at == size and memory[at : at + len(head)] == head:
                at += size
                read += 1
            for session, first, end in layout:
                if session in self.logs:
                    copies = [memory[i + first : i + end] for i in range(start, at, size)]
                    self._deliver(session, number, copies)
            done += (read - segment.read + 1) * len(layout)
            self.size -= at - start
            segment.start, segment.read = at, read
        return done

    def _deliver(self, session: int, number: int, bodies: list[bytes]) -> None:
        """Adds the bodies of consecutive messages to the log of a session. Does nothing if all
        these messages precede the requests of the log. ``number``: the number of the first
        message."""
        log = self.logs.get(session)
        if log is None or number + len(bodies) <= log.first:
            return
        if not log.tail:
            self._touched.append(log)
        log.tail += bodies
        log.numbers += range(number, number + len(bodies))

    def _drop_first(self) -> None:
        """Frees the first segment without reading its remaining messages."""
        segment = self._segments.popleft()
        self.size -= segment.size
        self._free.append(segment.part)
        if not self._segments:
            self._begin_segment(segment.next)

    # --- bounds ---------------------------------------------------------------------------------

    def grew(self, log: StreamLog, by: int) -> None:
        """Records that the size of a log has changed by ``by`` bytes."""
        self.total += by
        if log.size > self.most or self.total > self.max_total:
            self.beyond.add(log)


def _head_size(memory: mmap.mmap, start: int) -> int:
    """Bytes that precede the bodies in the packed TOKEN that begins at ``start``
    (``packing.py``)."""
    count = int.from_bytes(memory[start + 2 : start + 4], "little")
    sizes = int.from_bytes(memory[start + 4 : start + 8], "little")
    sizes += int.from_bytes(memory[start + 8 : start + 12], "little")
    return 4 * count + sizes


@lru_cache(maxsize=256)
def _layout(head: bytes, size: int) -> list[tuple[int, int, int]]:
    """The session, the start offset and the end offset of each body in a packed TOKEN of ``size``
    bytes."""
    count = int.from_bytes(head[2:4], "little")
    kind, *sizes = struct.unpack_from(f"<{count - 1}I", head, 4)
    sessions = decode_manifest(head[4 * count + kind :]).sessions
    ends = [*accumulate(sizes[1:], initial=len(head)), size]
    found = zip(sessions, ends, ends[1:], strict=False)
    return [(session, first, end) for session, first, end in found if end > first]


def _map(size: int) -> mmap.mmap:
    """Reserves ``size`` bytes of address space. The kernel allocates memory when it is first
    written to."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return mmap.mmap(-1, size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
