"""The queue of unanswered ATTACH and CLAIM messages, and the columns of tokens in the answers.

An answer can contain all entries of a stream, up to 100,000. A client may send many ATTACHes or
cause many CLAIMs. So each pass of the worker's loop sends a bounded number of entries. The keys of
clients take turns, and so do the sessions of each key. A CLAIM is answered with a JOURNAL for each
stream of its session, and with CLAIMED. Entries that are rows (``streams.ROW``) are sent in
columns, without an object for each token. If a pass answers several streams of a session, one
message has the rows of all these streams.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ....protocol.bodies import encode_body
from ....protocol.columns import TokenColumns
from ....protocol.header import encode_token_header
from ..sampling.candidates import Candidate, candidate_columns
from .streams import ROW, ROWS, Frames, Stream

MAX_ENTRIES = 2048
"""The budget of one pass of the loop: the number of entries that the pass may send. The last answer
of a pass may exceed the budget. Later passes then send less."""
ROWS_PER_ENTRY = 4
"""This number of rows in columns counts as one entry. Together they are about as large as one entry
in msgpack."""
CANDIDATES_PER_ENTRY = 20
"""This number of reported candidates (``Token.kept``) counts as one entry."""
ANSWER_ENTRIES = 4
"""The cost of an answer is this number of entries plus the entries that it sends."""
JOURNAL_BYTES_PER_ENTRY = 1024
"""Some parts of a JOURNAL are copied without encoding them again. In these parts, this number of
bytes counts as one entry."""


class Attaching(NamedTuple):
    """An unanswered ATTACH."""

    stream: Stream
    link: int
    """The link to the broker that forwarded the ATTACH."""
    received: int
    """Number of entries that the client has received."""

    @property
    def cost(self) -> int:
        """The number of entries that the answer takes from the budget."""
        missed, rows = self.stream.missed(self.received)
        candidates = self.stream.num_candidates // CANDIDATES_PER_ENTRY if missed else 0
        return ANSWER_ENTRIES + missed - rows + rows // ROWS_PER_ENTRY + candidates


class Claiming(NamedTuple):
    """A stream of a claimed session whose JOURNAL has not been sent."""

    stream: Stream
    link: int
    """The link to the broker that has sent the CLAIM."""

    @property
    def cost(self) -> int:
        """The number of entries that the JOURNAL takes from the budget."""
        copied = self.stream.packed_bytes + sum(map(len, self.stream.frames))
        return ANSWER_ENTRIES + self.stream.num_entries + copied // JOURNAL_BYTES_PER_ENTRY


class ClaimEnd(NamedTuple):
    """The message CLAIMED, which is sent after the JOURNALs of a session."""

    session: int
    link: int


_Waiting = deque[Attaching | Claiming | ClaimEnd]


def rows_frames(session: int, streams: Mapping[Stream, int]) -> Frames:
    """A ``TOKEN`` in columns. It has the last rows of several streams of one session. ``streams``:
    for each stream, the number of its rows."""
    parts = [stream.rows[-rows * ROW.size :] for stream, rows in streams.items()]
    joined = np.frombuffer(b"".join(parts), ROWS)
    ids = np.array([stream.stream_id for stream in streams], "<u8")
    body = TokenColumns(
        streams=np.repeat(ids, list(streams.values())).tobytes(),
        tokens=joined["token"].tobytes(),
        logprobs=joined["logprob"].tobytes(),
        positions=joined["pos"].tobytes(),
    )
    if joined["seq"].any():
        body.seqs = joined["seq"].tobytes()
    texts: list[str | None] = []
    candidates: list[Candidate] = []
    for stream, rows in streams.items():
        texts += stream.row_texts[-rows:] or [None] * rows
        candidates += stream.row_candidates[-rows:] or [Candidate()] * rows
    if any(text is not None for text in texts):
        body.texts = texts
    body.processed, body.kept = candidate_columns(candidates)
    return [b"TOKEN", encode_token_header([session]), encode_body(body, "msgpack")]


class ReportQueue:
    """The unanswered ATTACHes and CLAIMs. Each pass of the loop begins with ``renew``."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, OrderedDict[int, _Waiting]] = OrderedDict()
        """By owner and by session: the messages of the session in order. An owner is a client's
        key, or the session itself if the client does not have a key. The first owner has the next
        turn, and the first session of this owner."""
        self._left = MAX_ENTRIES
        """Number of entries that this pass may still send; negative after a large answer."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, attaching: Attaching, owner: int) -> None:
        """Adds an ATTACH of a session of ``owner``."""
        self._of(owner, attaching.stream.session).append(attaching)

    def add_claim(self, session: int, owner: int, link: int, streams: Iterable[Stream]) -> None:
        """Adds a CLAIM of a session of ``owner``. ``streams``: the streams of the session."""
        waiting = self._of(owner, session)
        for stream in streams:
            stream.claimed_by = link
            waiting.append(Claiming(stream, link))
        waiting.append(ClaimEnd(session, link))

    def drop_claims(self, link: int) -> None:
        """Drops the CLAIMs of a link whose lease has ended."""
        for owner, sessions in list(self._waiting.items()):
            for session, waiting in list(sessions.items()):
                for one in waiting:
                    if isinstance(one, Claiming) and one.link == link:
                        self._claimed(one)
                kept = deque(w for w in waiting if isinstance(w, Attaching) or w.link != link)
                if kept:
                    sessions[session] = kept
                else:
                    del sessions[session]
            if not sessions:
                del self._waiting[owner]

    def renew(self) -> None:
        """Renews the budget at the beginning of a pass of the loop."""
        self._left = min(MAX_ENTRIES, self._left + MAX_ENTRIES)

    def spend(self, entries: int) -> None:
        """Takes this number of entries from the budget."""
        self._left -= entries

    def next(self) -> Attaching | Claiming | ClaimEnd | None:
        """Removes and returns the next message to answer: an ATTACH, or a part of a CLAIM. Returns
        None if no message waits or the budget of this pass is used up."""
        if self._left <= 0 or not self._waiting:
            return None
        owner, sessions = self._waiting.popitem(last=False)
        session, waiting = sessions.popitem(last=False)
        first = waiting.popleft()
        if waiting:
            sessions[session] = waiting
        if sessions:
            self._waiting[owner] = sessions
        if isinstance(first, Claiming):
            self._claimed(first)
        return first

    def _of(self, owner: int, session: int) -> _Waiting:
        # A broker of an earlier release does not name the owner.
        sessions = self._waiting.setdefault(owner or session, OrderedDict())
        return sessions.setdefault(session, deque())

    @staticmethod
    def _claimed(claiming: Claiming) -> None:
        """Records that this CLAIM does not wait for the stream's JOURNAL any more. If another
        broker has sent a later CLAIM, the later CLAIM still waits."""
        if claiming.stream.claimed_by == claiming.link:
            claiming.stream.claimed_by = None
