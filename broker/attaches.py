"""Handles ATTACH, by which a client resumes a stream of its session. Every ATTACH is answered.

Usually the broker passes the ATTACH to the worker of the stream. The worker stores the entries that
it has sent, and answers. If the stream has no worker, or has ended, the broker answers from the log
of the session.

After a restart of the broker, or when a client comes from another broker, the stream may be unknown
to the broker. The broker then holds the ATTACH until a worker reports the stream, and answers from
the report.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from ..protocol.bodies import error_body
from ..protocol.errors import Code, RequestError, UnavailableError
from ..protocol.messages import Attach
from ..protocol.shares import fits_share
from .ends import Ends
from .moves import Moves
from .request import Attachment, Interruption, Request
from .session import Session
from .state import BrokerState
from .worker import RETRY_AFTER_S

MAX_AWAITED = 262_144
"""Maximum number of streams of all sessions together for which the broker holds an ATTACH, or
records a CANCEL, until a worker reports the stream."""
MAX_ATTACHING = 64
"""Maximum number of unanswered ATTACHes to one stream at the stream's worker."""
MAX_ANSWERED = 8
"""Maximum number of ATTACHes to one stream that are answered with entries while the stream waits
for another worker. For each of these answers, the broker decodes the stream's entries."""


class Attaches:
    """Answers ATTACHes, or passes them to workers. Holds an ATTACH if a worker may still report its
    stream."""

    def __init__(self, state: BrokerState, ends: Ends, moves: Moves) -> None:
        self._state = state
        self._out = state.out
        self._max_streams = state.settings.max_streams
        self._ends = ends
        self._moves = moves
        self._awaited: dict[int, dict[int, Attach | None]] = {}
        """By session and stream, for streams that no worker has reported yet: the held ATTACH, or
        None if the client has cancelled the stream."""
        self._num_awaited = 0

    # --- clients --------------------------------------------------------------------------------

    def on_attach(self, session: Session, message: Attach, hold: bool) -> None:
        """Handles a client's ATTACH. ``hold``: whether a worker may still report streams of this
        session.

        Raises RequestError if the stream does not exist.
        """
        request = session.streams.get(message.stream_id)
        if request is not None:
            self._pass_on(request, message)
        elif self._ends.attach(session, message.stream_id, message.received):
            pass
        elif hold:
            self._hold(session, message)
        else:
            raise _unknown(message.stream_id)

    def on_cancel(self, session: Session, stream_id: int, hold: bool) -> bool:
        """Drops the held ATTACH and the stored end of a stream that a client cancels. Returns True
        if this broker does not have the stream: the stream has ended, or no worker has reported it
        yet. ``hold``: as in ``on_attach``."""
        self._take(session, stream_id)
        self._ends.drop(session, stream_id)
        if stream_id in session.streams:
            return False
        if hold:
            # If the bound is reached, the CANCEL is not recorded. A stream that is then reported
            # ends because no client attaches to it.
            self._await(session, stream_id, None)
        return True

    def _hold(self, session: Session, message: Attach) -> None:
        """Holds an ATTACH until a worker reports its stream. Raises UnavailableError if the bound
        of such streams is reached."""
        if not self._await(session, message.stream_id, message):
            raise UnavailableError(
                Code.CLIENT_LIMIT,
                "this session has too many ATTACHes and CANCELs for streams that workers have not "
                f"reported; {self._max_streams} are allowed for one session and {MAX_AWAITED} for "
                "all sessions; send the request again",
                retry_after_s=RETRY_AFTER_S,
            )

    def _await(self, session: Session, stream_id: int, message: Attach | None) -> bool:
        """Records the ATTACH or the CANCEL (None) of a stream that no worker has reported; returns
        False if the bound of such streams is reached."""
        awaited = self._awaited.get(session.id, {})
        if stream_id not in awaited:
            own = len(awaited)
            if own >= self._max_streams or not fits_share(own, self._num_awaited, MAX_AWAITED):
                return False
            self._num_awaited += 1
        self._awaited.setdefault(session.id, awaited)[stream_id] = message
        return True

    def _take(self, session: Session, stream_id: int) -> Attach | None:
        """Removes and returns the ATTACH that is held for a stream."""
        awaited = self._awaited.get(session.id, {})
        if stream_id not in awaited:
            return None
        self._num_awaited -= 1
        taken = awaited.pop(stream_id)
        if not awaited:
            del self._awaited[session.id]
        return taken

    def drop_held(self, session: int) -> list[int]:
        """Removes the held ATTACHes and the recorded CANCELs of a session, because the session has
        ended or because workers have reported all its streams. Returns the streams of the
        ATTACHes."""
        dropped = self._awaited.pop(session, {})
        self._num_awaited -= len(dropped)
        return [stream_id for stream_id, message in dropped.items() if message is not None]

    def _pass_on(self, request: Request, message: Attach) -> None:
        message = _from_beginning_if_behind(request, message)
        if len(request.attaching) >= MAX_ATTACHING:
            raise UnavailableError(
                Code.CLIENT_LIMIT,
                f"the worker of stream {request.stream_id} has not answered {MAX_ATTACHING} "
                "ATTACHes, and more are not allowed; wait for its answers",
                retry_after_s=RETRY_AFTER_S,
            )
        if request.worker is None and request.interruption is not None:
            self._count(request, request.interruption, message.received)
        request.attachment = Attachment.ATTACHED
        if request.worker is None:
            self._moves.attach(request, message.received)
        else:
            request.attaching.append(message.received)
            flags, owner = request.session.flags, request.session.owner
            self._out.to_worker(request.worker, b"ATTACH", message, request.id, flags, owner)

    @staticmethod
    def _count(request: Request, interruption: Interruption, received: int) -> None:
        """Counts an ATTACH to a stream that waits for another worker; raises UnavailableError if
        too many such ATTACHes were answered with entries."""
        if received >= request.entries:
            return
        if interruption.answered >= MAX_ANSWERED:
            raise UnavailableError(
                Code.CLIENT_LIMIT,
                f"stream {request.stream_id} waits for another worker, and {MAX_ANSWERED} ATTACHes "
                "to it were answered during this wait, which is the maximum; attach again when the "
                "stream has moved",
                retry_after_s=RETRY_AFTER_S,
            )
        interruption.answered += 1

    # --- streams --------------------------------------------------------------------------------

    def on_adopted(self, request: Request, sent: bytes, flags: int) -> None:
        """Handles a worker's report of a stream. ``sent``: the entries that the worker has sent, as
        a body of TOKEN. If an ATTACH for the stream is held, the broker answers the ATTACH itself,
        because the worker may be in a long step.

        If the client no longer accepts the form in which the worker encodes the stream's entries,
        the broker forwards the ATTACH to the worker, which then changes the form. ``flags``: the
        header flags that describe the worker's form.
        """
        held = self._take(request.session, request.stream_id)
        if held is None:
            return
        if request.worker is None or flags != request.session.flags:
            self._pass_on(request, held)
        else:
            held = _from_beginning_if_behind(request, held)
            request.attachment = Attachment.ATTACHED
            self._moves.answer(request, sent, held.received)

    def on_adopted_end(self, request: Request, sent: bytes) -> None:
        """Handles a worker's report of a stream that has ended with the entries ``sent``."""
        session, stream_id = request.session, request.stream_id
        self._ends.keep(request, sent)
        held = self._take(session, stream_id)
        if held is not None:
            self._ends.attach(session, stream_id, held.received)

    def held(self, session: Session, stream_id: int) -> Attach | None:
        """The held ATTACH for a stream, if any."""
        return self._awaited.get(session.id, {}).get(stream_id)

    def is_cancelled(self, session: int, stream_id: int) -> bool:
        """Whether the client has cancelled a stream that no worker had reported."""
        return self._awaited.get(session, {}).get(stream_id, ...) is None

    def refuse_held(self, sessions: Mapping[int, Session], waiting: Collection[int]) -> None:
        """Refuses the held ATTACHes of all sessions except those in ``waiting``. Called when
        workers have reported all streams of the other sessions."""
        for number in [number for number in self._awaited if number not in waiting]:
            self.refuse(number, sessions.get(number))

    def refuse(self, number: int, session: Session | None) -> None:
        """Refuses the held ATTACHes of a session. Called when workers have reported all streams of
        the session."""
        for stream_id in self.drop_held(number):
            if session is not None:
                error = error_body(_unknown(stream_id), stream_id)
                self._out.to_session(session, b"ERROR", error)


def _from_beginning_if_behind(request: Request, message: Attach) -> Attach:
    """If the client has received more entries than the adopted copy has, they were entries of
    another copy that has moved less often. Then returns an ATTACH for all entries of the stream.
    Otherwise returns ``message``.

    The two copies may order the entries of different sequences differently. So the client must
    receive all entries, and discards for each sequence those that it already has.
    """
    is_other = request.reported is not None and request.entries < message.received
    return replace(message, received=0) if is_other else message


def _unknown(stream_id: int) -> RequestError:
    return RequestError(Code.UNKNOWN_STREAM, f"this session has no live stream {stream_id}")
