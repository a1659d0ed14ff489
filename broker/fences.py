"""Fences discard a worker's messages about attempts that the broker has given up.

An attempt is one worker's work on a request. The broker gives up an attempt if another worker has a
later copy of the request, if the client comes from another broker, or if no client needs the
request. The worker may still send entries of the attempt, even after the broker has sent the
request to this worker again. So a fence discards the worker's messages about the attempt. The
broker usually forwards bodies of TOKEN without reading them. While a worker has a fence, the broker
decodes the worker's bodies for the session of the fence, and removes the entries of the fenced
stream.

After the broker has given up the attempt, it sends a CLAIM for the fence. The worker answers with
CLAIMED, which ends the fence. A worker handles messages in order, but may send a CLAIMED later: it
answers CLAIMs of the same session in order, and CLAIMs of different sessions in any order. There
are two kinds of fences:

- For an attempt that the worker is ordered to drop: the broker ignores all messages of the worker
  about the request.
- For an attempt that the worker is asked to report: the broker discards only entries of the
  attempt. The fence also ends when the broker adopts the request from its JOURNAL.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..protocol.bodies import decode_as, encode_body, encoding_of
from ..protocol.columns import TokenBody, TokenColumns, column_entries
from ..protocol.errors import Code, RequestError
from ..protocol.worker_messages import Claim, Registered

if TYPE_CHECKING:
    from .state import BrokerState
    from .worker import Worker

NO_SESSION = 0
"""The session number in a CLAIM that does not request streams, and in the answer to such a
CLAIM."""


@dataclass(slots=True, eq=False)
class Fence:
    """Marks an attempt whose messages the broker discards."""

    request: int
    session: int
    stream_id: int
    end: int | None = None
    """The number of the CLAIM whose answer ends the fence; None before the CLAIM was sent."""
    void: int = 0
    """All messages about the request are ignored until the CLAIM with this number is answered. 0 if
    only entries are discarded."""


@dataclass(slots=True)
class _Unanswered:
    """A CLAIM without an answer."""

    since: float
    """The time at which the CLAIM was sent, in seconds."""
    fences: list[Fence]
    """The fences that the answer ends."""


class Fences:
    """The fences of one worker during one lease."""

    __slots__ = (
        "_asked",
        "_by_request",
        "_of_session",
        "_reported_at",
        "_unanswered",
        "by_session",
    )

    def __init__(self) -> None:
        self._asked = 0
        """Number of CLAIMs that were sent."""
        self._unanswered: dict[int, _Unanswered] = {}
        """The unanswered CLAIMs by number, oldest first."""
        self._of_session: dict[int, deque[int]] = {}
        """The numbers of the unanswered CLAIMs of each session."""
        self._reported_at = 0.0
        """The time of the last JOURNAL or CLAIMED, in seconds."""
        self._by_request: dict[int, Fence] = {}
        self.by_session: dict[int, dict[int, list[Fence]]] = {}
        """The fences by session and stream. A stream may have several fences, because a client may
        reuse its ``stream_id``."""

    def __len__(self) -> int:
        return len(self._by_request)

    def add(self, request: int, session: int, stream_id: int) -> Fence:
        """Adds or restarts the fence of a request. After the next CLAIM, the caller passes this
        fence to ``asked``. The fence ends when the worker answers this CLAIM, or when ``reported``
        is called."""
        fence = self._by_request.get(request)
        if fence is None:
            fence = self._by_request[request] = Fence(request, session, stream_id)
            self.by_session.setdefault(session, {}).setdefault(stream_id, []).append(fence)
        fence.end = None
        return fence

    def of(self, session: int, stream_id: int) -> Sequence[Fence]:
        """The fences of a stream."""
        return self.by_session.get(session, {}).get(stream_id, ())

    def unasked(self, session: int) -> list[Fence]:
        """The fences of a session for which no CLAIM was sent yet (``Fence.end`` is None)."""
        streams = self.by_session.get(session, {}).values()
        return [fence for fences in streams for fence in fences if fence.end is None]

    def all_unasked(self) -> list[Fence]:
        """All fences for which no CLAIM was sent yet (``Fence.end`` is None)."""
        return [fence for fence in self._by_request.values() if fence.end is None]

    def asked(self, fences: list[Fence], now: float, session: int = NO_SESSION) -> int:
        """Records that a CLAIM with this session is sent. The answer to this CLAIM will end these
        fences. Returns the number of the CLAIM."""
        self._asked += 1
        number = self._asked
        self._unanswered[number] = _Unanswered(now, fences)
        self._of_session.setdefault(session, deque()).append(number)
        for fence in fences:
            fence.end = number
        return number

    def answered(self, session: int, now: float) -> int:
        """Handles a CLAIMED with this session; returns the number of the answered CLAIM. Raises
        RequestError if every CLAIM with this session is already answered."""
        numbers = self._of_session.get(session)
        if not numbers:
            raise RequestError(
                Code.BAD_MESSAGE, f"a CLAIMED of session {session} came without a CLAIM"
            )
        number = numbers.popleft()
        if not numbers:
            del self._of_session[session]
        self.progressed(now)
        for fence in self._unanswered.pop(number).fences:
            # The request's JOURNAL may have ended the fence already. Or ``add`` has restarted the
            # fence, and the answer to a later CLAIM ends it.
            if self._by_request.get(fence.request) is fence and fence.end == number:
                self._remove(fence)
        return number

    def progressed(self, now: float) -> None:
        """Restarts the time in which the worker must answer. A worker with many entries to report
        sends some of them after each step, and does not count as hung meanwhile."""
        self._reported_at = now

    def reported(self, request: int) -> None:
        """Ends the fence of a request, whose JOURNAL has arrived."""
        fence = self._by_request.get(request)
        if fence is not None:
            self._remove(fence)

    def is_void(self, request: int) -> bool:
        """Whether the worker's messages about a request are ignored."""
        fence = self._by_request.get(request)
        return fence is not None and fence.void in self._unanswered

    def waited_s(self, now: float) -> float:
        """Seconds since the oldest unanswered CLAIM was sent or, if that is later, since the worker
        last reported something. 0 if every CLAIM is answered."""
        if not self._unanswered:
            return 0.0
        oldest = next(iter(self._unanswered.values()))
        return now - max(oldest.since, self._reported_at)

    def _remove(self, fence: Fence) -> None:
        del self._by_request[fence.request]
        streams = self.by_session[fence.session]
        streams[fence.stream_id].remove(fence)
        if not streams[fence.stream_id]:
            del streams[fence.stream_id]
        if not streams:
            del self.by_session[fence.session]

    def without_fenced(self, frames: Sequence[bytes], sessions: Sequence[int]) -> list[bytes]:
        """Returns the frames of a TOKEN, without the entries of streams that have a fence.
        ``sessions`` has the session of each body; the bodies begin at the third frame. A body of
        which no entries remain becomes empty.

        Raises RequestError if a body is malformed.
        """
        kept = list(frames)
        for i, session in enumerate(sessions, 2):
            if session in self.by_session:
                kept[i] = _without(frames[i], self.by_session[session].keys())
        return kept


def _without(body: bytes, streams: Iterable[int]) -> bytes:
    read: TokenBody = decode_as(TokenBody, body)
    entries = column_entries(read) if isinstance(read, TokenColumns) else read
    own = [entry for entry in entries if entry.stream_id not in streams]
    if len(own) == len(entries):
        return body
    return encode_body(own, encoding_of(body)) if own else b""


def registered(
    state: BrokerState,
    worker: Worker,
    unknown: Sequence[int] = (),
    wanted: Sequence[int] = (),
) -> Registered:
    """The answer to a worker that registers. ``unknown``: the requests that the worker must drop.
    ``wanted``: the requests whose journals the worker must send."""
    return Registered(
        worker=worker.id,
        heartbeat_s=state.settings.heartbeat_s,
        expiry_s=state.settings.expiry_s,
        unknown=list(unknown),
        wanted=list(wanted),
        states=list(state.states.values()) if worker.role == "gpu" else [],
        registration=worker.registration,
    )


def drop(state: BrokerState, worker: Worker, requests: Sequence[int]) -> None:
    """Orders a worker to drop requests that it has reported."""
    state.out.to_worker(worker, b"REGISTERED", registered(state, worker, unknown=requests))


def give_up(state: BrokerState, worker: Worker, request: int, session: int, stream_id: int) -> None:
    """Orders a worker to drop its attempt of a request, and ignores the worker's messages about the
    attempt until the worker has confirmed the order."""
    drop(state, worker, [request])
    fence = worker.fences.add(request, session, stream_id)
    fence.void = send_claim(state, worker, [fence])


def send_claim(
    state: BrokerState, worker: Worker, fences: list[Fence], session: int = NO_SESSION
) -> int:
    """Sends a CLAIM, whose answer ends these fences; returns the number of the CLAIM. If
    ``session`` is given, the worker reports the streams of this session before it answers."""
    known = state.sessions.by_id.get(session)
    owner = known.owner if known is not None else session
    state.out.to_worker(worker, b"CLAIM", Claim(session=session), address=owner)
    return worker.fences.asked(fences, state.now, session)


def overdue(state: BrokerState, worker: Worker) -> str:
    """Returns a reason to treat a worker as lost if the worker has not answered a CLAIM in time;
    otherwise ``""``.

    A worker answers between two steps, so the limit is the longest time that a step may take.
    """
    waited_s = worker.fences.waited_s(state.now)
    if waited_s <= state.settings.hung_step_s:
        return ""
    return f"it has not answered a CLAIM for {waited_s:.0f} s"
