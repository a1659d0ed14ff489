"""The ends of a session's requests that the session's client may not have received.

Each end has a position on the connection on which it was sent. A client with the capability ``ack``
acknowledges positions with PING. An end that was sent on an earlier connection, or was not sent,
waits for the client's ATTACH or CANCEL.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

MAX_ENDS = 16_384
"""Maximum number of stored ends of a session. Above this number, the oldest end is dropped."""


@dataclass(slots=True, eq=False)
class End:
    """How a request has ended. An ``End`` does not refer to its session, so that no reference cycle
    arises."""

    request: int
    stream_id: int
    moves: int
    closing: Sequence[bytes] | None
    """The frames of the message that ended the request; None if an entry of TOKEN ended it."""
    stored: bool
    """Whether the request is a stream, and the journal has all its entries. The answer to an ATTACH
    is then a MSG, the entries and the end."""
    count: int = 0
    """Number of entries if a worker has reported the end for adoption, otherwise 0."""
    since: float = 0.0
    """When the end was stored, or the session was last resumed, in seconds."""
    position: int = 0
    """Position of the end on the present connection. 0 if the end was not sent on this connection;
    the end then waits for an ATTACH."""


@dataclass(slots=True, eq=False)
class Answer:
    """An incomplete answer to an ATTACH."""

    end: End
    skip: int
    """Number of entries that the client already has, and that were not read yet."""

    def sends_next(self, ends: KeptEnds) -> bool:
        """Whether the next entry that was read is sent to the client."""
        stream_id = self.end.stream_id
        if (
            ends.answering.get(stream_id) is not self
            or ends.by_stream.get(stream_id) is not self.end
        ):
            return False
        self.skip -= 1
        return self.skip < 0


class KeptEnds:
    """The stored ends of one session, oldest first."""

    __slots__ = ("_sent", "answering", "by_stream", "lost", "position", "reading")

    def __init__(self) -> None:
        self.by_stream: dict[int, End] = {}
        self.lost: dict[int, End] = {}
        """By stream: ends whose message was dropped because the queue of the connection was
        full."""
        self.answering: dict[int, Answer] = {}
        """By stream: the incomplete answers to the client's ATTACHes on the present connection. The
        end of an answer may already be dropped from ``by_stream``."""
        self.reading: Iterator[int] | None = None
        """Reads the entries of ``answering``. Each ``next`` reads a part (``answers.py``)."""
        self.position = 0
        """The position of the last end that was sent to the client."""
        self._sent: dict[int, End] = {}
        """By position: the ends that were sent on the present connection."""

    def add(self, end: End, now: float) -> None:
        """Stores an end. If the stream has an earlier end, call ``drop`` first."""
        end.since = now
        self.by_stream[end.stream_id] = end

    def on_sent(self, end: End) -> None:
        """Records that an end is sent on the present connection."""
        self._sent.pop(end.position, None)
        self.position += 1
        end.position = self.position
        self._sent[end.position] = end

    def on_lost(self, end: End) -> None:
        """Records that the message with an end was dropped. Acknowledgements do not apply to the
        end before it is sent again."""
        self._sent.pop(end.position, None)
        end.position = 0
        self.lost[end.stream_id] = end

    def of(self, request: int, stream_id: int) -> End | None:
        """The stored end of a request, if any."""
        end = self.by_stream.get(stream_id)
        return end if end is not None and end.request == request else None

    def drop(self, end: End) -> None:
        """Removes an end."""
        if self.by_stream.get(end.stream_id) is end:
            del self.by_stream[end.stream_id]
            self.lost.pop(end.stream_id, None)
        self._sent.pop(end.position, None)

    def acknowledged(self, position: int) -> list[End]:
        """The ends up to a position, which the client has acknowledged."""
        sent = takewhile(lambda item: item[0] <= position, self._sent.items())
        return [end for _, end in sent]

    def on_taken_over(self, now: float) -> None:
        """Handles a new connection of the client. The client will attach to the ends that it has
        not received."""
        self._sent.clear()
        self.lost.clear()
        for end in self.by_stream.values():
            end.since, end.position = now, 0

    def expired(self, before: float, most: int) -> list[End]:
        """Up to ``most`` ends whose ``since`` precedes the time ``before``."""
        older = takewhile(lambda end: end.since < before, self.by_stream.values())
        return list(islice(older, most))
