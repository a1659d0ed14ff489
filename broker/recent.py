"""Stores the recently routed TOKENs of all sessions in one buffer, in the order of their arrival.

A message has the bodies of many sessions. A copy of the whole message into this buffer takes 0.4
µs. Adding each of eight bodies to its session's journal takes ten times as long, because these
writes touch new memory.

Most streams end while their bodies are in the buffer, and bodies that no live stream needs are
dropped unread. The other bodies are distributed to the journals, oldest first: some of them at each
tick, and more when the buffer is full.

The buffer also stores notes: actions on journals that must be done between two messages. For
example, the note of a request's start is done after all earlier messages were distributed, and
before any later one.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING

from ..protocol.header import decode_manifest
from ..protocol.packing import unpack

if TYPE_CHECKING:
    from .journal import Journal

SEGMENT_BYTES = 2 * 1024 * 1024
"""Bytes of a segment. A segment is reused when all its messages are distributed or dropped."""
SEGMENTS = 32
"""Maximum number of segments. The memory of about two segments is always unused: the unused ends of
all segments, and one free segment."""
MESSAGES = 4096
"""Maximum number of messages in a segment. The bound limits the time of a move, which has to
distribute the whole buffer first."""
NOTE_BYTES = 100
"""Bytes that are counted for a note, in addition to the bodies that its action adds to journals."""
BODIES_AT_ONCE = 500
"""Approximate number of bodies that are distributed at once. Distributing a body takes 1 to 2 µs if
the message has many sessions, and twice as long if the previous message has a different layout."""

_POPULATE_WRITE = 23
"""Linux's MADV_POPULATE_WRITE, for which Python has no constant."""

_NONE = mmap.mmap(-1, 1)
"""A placeholder for memory that is not allocated yet."""

Note = Callable[[], None]
"""An action on a journal between two messages."""


class Segment:
    """A part of the buffer's memory: messages, and the notes between these messages."""

    __slots__ = ("ends", "live", "noted", "notes", "number", "read", "start")

    def __init__(self, number: int) -> None:
        self.number = number
        self.ends = array("I")
        """The offset of the end of each message, from the start of the whole memory."""
        self.read = 0
        """Number of messages that are already distributed."""
        self.start = number * SEGMENT_BYTES
        """The offset of the first message that is not distributed, from the start of the whole
        memory."""
        self.notes: deque[tuple[int, int, Note]] = deque()
        """For each note: the number of the message after it, the bytes that count for the note, and
        its action."""
        self.noted = 0
        """Bytes that count for all notes of the segment."""
        self.live = 0
        """Number of live requests whose note of the start is in this segment and was not handled
        yet."""

    @property
    def size(self) -> int:
        """Bytes that are not distributed yet."""
        return (self.ends[-1] - self.start if self.ends else 0) + self.noted

    def clear(self) -> None:
        """Drops all messages and notes of the segment."""
        del self.ends[:]
        self.read, self.start = 0, self.number * SEGMENT_BYTES
        self.notes.clear()
        self.noted = 0


class Recent:
    """The buffer of messages that are not distributed to journals yet. This object also checks the
    sizes of all journals.

    ``max_journal_bytes`` is the bound of one session, ``max_total_bytes`` the bound of all sessions
    together. The bounds always hold, because all messages in the shared buffer count towards each
    session's bound and towards the total.
    """

    def __init__(self, max_journal_bytes: int, max_total_bytes: int) -> None:
        self.enabled = max_journal_bytes > 0
        self.journals: dict[int, Journal] = {}
        """By session: the journals to which bodies are distributed, because the note of the start
        of one of their requests was handled."""
        self.total = 0
        """Bytes of all journals, without the messages in this buffer."""
        self._max_journal, self._max_total = max_journal_bytes, max_total_bytes
        self.most = max_journal_bytes - max_journal_bytes // 8
        """Maximum size of a journal; the rest of the bound is reserved for messages in this
        buffer."""
        self.max_total = max_total_bytes - max_total_bytes // 8
        self.beyond: set[Journal] = set()
        """Journals that are larger than ``most``."""
        self._largest = self._grown = 0
        """``_largest``: an upper bound of the size of the largest journal. ``_grown``: the largest
        size of a journal that has grown since the last complete walk."""
        self.pending: list[bytes] = []
        """Packed TOKENs of the current event. ``settle`` copies them into the buffer at the end of
        the event."""
        self._memory = _NONE
        full = min(SEGMENTS - 2, -(-max_total_bytes // SEGMENT_BYTES))
        self._max_here = full * SEGMENT_BYTES
        self._bytes = self._max_here + 2 * SEGMENT_BYTES
        """The size of ``_memory``, in bytes."""
        self._free = list(range(full + 2))[::-1]
        """Numbers of the segments that are not in use. The last one, whose memory was used most
        recently, is used next."""
        self._segments = deque((Segment(self._free.pop()),))
        self._ends = self._segments[0].ends
        self._rolled = False
        """Whether a segment was filled since the last tick."""
        self._at = 0
        """The offset at which the next message will begin."""
        self._room = 0
        """The offset up to which messages may be written, in the last segment."""
        self._others = 0
        """Bytes in this buffer, without the messages of the last segment."""
        self._touched: list[Journal] = []
        """Journals that receive bodies in the current distribution."""

    @property
    def size(self) -> int:
        """Bytes in this buffer."""
        return self._others + self._at - self._segments[-1].start

    @property
    def limit(self) -> int:
        """Maximum bytes in this buffer."""
        left = min(self._max_journal - self._largest, self._max_total - self.total)
        return min(self._max_here, left)

    def reserve(self) -> None:
        """Allocates the memory of all segments now, 64 MiB in about 25 ms.

        Otherwise each memory page (4 KiB) would be allocated when a message is first written to it.
        This takes 2.6 µs, and a step of 64 tokens fills half a page.
        """
        if not self.enabled or self._memory is not _NONE:
            return
        self._memory = _map(self._bytes)
        self._set_room()
        # A kernel without this option allocates each memory page when it is first used.
        with contextlib.suppress(OSError, AttributeError):
            self._memory.madvise(_POPULATE_WRITE)

    # --- messages that arrive -------------------------------------------------------------------

    def settle(self) -> bool:
        """Copies all ``pending`` messages at once, because one large copy takes less time than many
        small copies. Returns whether journals may have grown."""
        pending, at = self.pending, self._at
        if not pending:
            return False
        joined = b"".join(pending)
        end = at + len(joined)
        if end > self._room or len(self._ends) >= MESSAGES:
            self._settle_each()
            return True
        self._memory[at:end] = joined
        ends = accumulate(map(len, pending), initial=at)
        next(ends)
        self._ends.extend(ends)
        self._at = end
        pending.clear()
        return False

    def _settle_each(self) -> None:
        """Copies the ``pending`` messages one by one, because the last segment does not have room
        for all of them."""
        pending = self.pending[:]
        self.pending.clear()
        for message in pending:
            self._make_room(len(message))
            end = self._at + len(message)
            if end > self._room:
                # A message that does not fit within the bounds is distributed at once.
                self.note(len(message), partial(self._deliver_packed, message))
                self.distribute()
                continue
            self._memory[self._at : end] = message
            self._at = end
            self._ends.append(end)

    def keep(self, sessions: Sequence[int], bodies: Sequence[bytes]) -> None:
        """Adds the bodies of a TOKEN that is too large to be packed into one frame."""
        self.note(sum(map(len, bodies)), partial(self.deliver_each, sessions, bodies))

    def note(self, size: int, do: Note) -> Segment:
        """Adds an action on a journal after all messages so far; returns the segment that has the
        note. ``size``: bytes of the bodies that the action adds to journals."""
        self.settle()
        segment = self._segments[-1]
        size += NOTE_BYTES
        segment.notes.append((len(segment.ends), size, do))
        segment.noted += size
        self._others += size
        self._set_room()
        return segment

    def _make_room(self, size: int) -> None:
        """Makes room for a message of ``size`` bytes, as far as the bounds allow."""
        if self._at + size <= self._room and len(self._ends) < MESSAGES:
            return
        while self.size > max(0, self.limit - max(size, SEGMENT_BYTES // 8)):
            self.distribute(BODIES_AT_ONCE)
        if self._memory is _NONE:
            self._memory = _map(self._bytes)
        end = (self._segments[-1].number + 1) * SEGMENT_BYTES
        full = self._at + size > end or len(self._ends) >= MESSAGES
        if full and size <= SEGMENT_BYTES:
            self._roll()
        self._set_room()

    def _roll(self) -> None:
        """Begins a new segment, because the last one is full."""
        while not self._free:
            self.distribute(BODIES_AT_ONCE)
        self._others += self._at - self._segments[-1].start
        self._rolled = True
        segment = Segment(self._free.pop())
        self._segments.append(segment)
        self._ends, self._at = segment.ends, segment.start

    def _set_room(self) -> None:
        segment = self._segments[-1]
        end = (segment.number + 1) * SEGMENT_BYTES if self._memory is not _NONE else 0
        self._room = min(end, segment.start + self.limit - self._others)

    # --- distribution ---------------------------------------------------------------------------

    def tick(self) -> None:
        """Distributes some of the oldest bodies. If a segment was filled since the last tick, fewer
        are distributed, because streams may end before the rest is distributed."""
        self.distribute(BODIES_AT_ONCE // 8 if self._rolled else BODIES_AT_ONCE)
        self._rolled = False

    def distribute(self, most: int | None = None) -> None:
        """Distributes the oldest bodies to the journals that need them: about ``most`` bodies, or
        all bodies if ``most`` is None."""
        self.settle()
        left = most if most is not None else 1 << 62
        while left > 0 and self.size:
            segment = self._segments[0]
            start, noted = segment.start, segment.noted
            left -= self._read(segment, left)
            self._others -= noted - segment.noted
            if segment is not self._segments[-1]:
                self._others -= segment.start - start
            if segment.read == len(segment.ends) and not segment.notes:
                self._drop_first()
        for journal in self._touched:
            journal.pack()
        self._touched.clear()
        self._set_room()

    def _read(self, segment: Segment, most: int) -> int:
        """Distributes about the first ``most`` bodies of a segment. Returns the work that was done,
        counted in bodies: a note counts as one body, and parsing a layout as the bodies of one more
        message."""
        memory, ends, notes = self._memory, segment.ends, segment.notes
        done = 0
        while done < most:
            while notes and notes[0][0] <= segment.read:
                _, size, do = notes.popleft()
                segment.noted -= size
                do()
                done += 1
            if segment.read == len(ends):
                break
            if not self.journals:
                # No journal needs the messages before the next note.
                segment.read = notes[0][0] if notes else len(ends)
                segment.start = ends[segment.read - 1]
                continue
            start, size = segment.start, ends[segment.read] - segment.start
            head = memory[start : start + _head_size(memory, start)]
            layout = _layout(head, size)
            # Messages of consecutive steps often have the same layout. Such messages are
            # distributed together.
            last = segment.read + 1 + (most - done) // (len(layout) or 1)
            last = min(last, notes[0][0] if notes else len(ends), len(ends))
            at, read = start + size, segment.read + 1
            while read < last and ends[read] - at == size and memory[at : at + len(head)] == head:
                at += size
                read += 1
            for session, first, end in layout:
                if session in self.journals:
                    bodies = [memory[i + first : i + end] for i in range(start, at, size)]
                    self.deliver(session, bodies)
            done += (read - segment.read + 1) * len(layout)
            segment.start, segment.read = at, read
        return done

    def deliver(self, session: int, bodies: Sequence[bytes]) -> None:
        """Adds bodies to the journal of a session."""
        journal = self.journals.get(session)
        if journal is not None and bodies:
            if not journal.tail:
                self._touched.append(journal)
            journal.tail += bodies

    def _deliver_packed(self, message: bytes) -> None:
        _, head, *bodies = unpack([message])
        self.deliver_each(decode_manifest(head).sessions, bodies)

    def deliver_each(self, sessions: Sequence[int], bodies: Sequence[bytes]) -> None:
        """Adds the bodies of a message, each to the journal of its session. An empty body is
        skipped."""
        for session, body in zip(sessions, bodies, strict=False):
            if body:
                self.deliver(session, (body,))

    def trim(self) -> None:
        """Drops messages that no live request needs, after requests have ended."""
        while not (self.journals or self._segments[0].live):
            last = len(self._segments) == 1
            self._drop_first()
            if last:
                self.pending.clear()
                break

    def _drop_first(self) -> None:
        """Drops the rest of the first segment."""
        segment = self._segments[0]
        self._others -= segment.noted
        if len(self._segments) > 1:
            self._others -= segment.size - segment.noted
            self._segments.popleft()
            self._free.append(segment.number)
        segment.clear()
        if segment is self._segments[0]:
            self._at, self._others = segment.start, 0
        self._set_room()

    # --- bounds ---------------------------------------------------------------------------------

    def grew(self, journal: Journal, by: int) -> None:
        """Records that the size of a journal has changed by ``by`` bytes."""
        self.total += by
        size = journal.size
        if size > self.most:
            self.beyond.add(journal)
        if size > self._largest:
            self._largest = size
        if size > self._grown:
            self._grown = size

    def walked(self, largest: int) -> None:
        """Records that all journals were checked since the last call. The largest has ``largest``
        bytes."""
        self._largest, self._grown = max(largest, self._grown), 0
        self._set_room()


def _head_size(memory: mmap.mmap, start: int) -> int:
    """Bytes that precede the bodies in the packed TOKEN that begins at ``start``
    (``packing.py``)."""
    count = int.from_bytes(memory[start + 2 : start + 4], "little")
    sizes = int.from_bytes(memory[start + 4 : start + 8], "little")
    sizes += int.from_bytes(memory[start + 8 : start + 12], "little")
    return 4 * count + sizes


@lru_cache(maxsize=256)
def _layout(head: bytes, size: int) -> list[tuple[int, int, int]]:
    """The bodies of a packed TOKEN of ``size`` bytes: the session, the start offset and the end
    offset of each."""
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
