"""The broker without its sockets: it receives frames and times, and returns the frames to send."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..protocol.errors import Code, RequestError, UnavailableError
from ..protocol.keys import Allowed
from ..protocol.packing import pack, unpack
from .admission import Admission
from .adoption import Adoption
from .attaches import Attaches
from .back import Back
from .back import Handler as WorkerHandler
from .buffers import Buffers
from .controllers import Controllers
from .dispatch import Dispatcher
from .drains import Drains
from .ends import Ends
from .front import Front
from .front import Handler as ClientHandler
from .inputs import Inputs
from .keyring import revoked
from .leases import Leases
from .moves import Moves
from .outgoing import Outgoing, Side
from .placement import Placement
from .prefixes import Prefixes
from .quarantine import Quarantine
from .relay import RELAYED, Relay
from .request import ROLES, STREAMS, Request
from .rollouts import Rollouts
from .sessions import Sessions
from .settings import BrokerSettings
from .state import BrokerState
from .status import Statuses
from .tools import Tools

log = logging.getLogger(__name__)

Message = tuple[bytes, list[bytes]]
"""The routing id of a connection, and the frames of a message from this connection."""
KeyedMessage = tuple[bytes, list[bytes], str]
"""Like ``Message``, with the public key of the connection's peer."""

LATE_TICKS = 8
"""If an event occurs more than this number of tick intervals after the last tick, this process was
paused. All leases and sessions are then renewed before the event is handled."""
BEHIND_S = 0.01
"""Seconds until the next tick if a tick has left work to do."""
RETRY_S = 2.0
"""Seconds after which a client should try again if this broker stops. By then, another broker may
have taken the place of this one."""
PLACES_EVERY_S = 2.0
"""Seconds between two rounds of notices, which report to clients the places of their requests in
the queues."""


class Broker:
    """Routes messages between clients (front) and workers (back). The broker does no I/O and has no
    clock: messages and times are arguments.

    ``boot`` is the number of this run, which makes the ids of this run differ from those of other
    runs. ``now`` is the present time of any clock that does not go back, in seconds.
    """

    def __init__(self, settings: BrokerSettings, *, boot: int, now: float) -> None:
        self.settings = settings
        self.state = state = BrokerState(settings, boot=boot, now=now)
        self._moves = moves = Moves(state, Quarantine())
        self._ends = ends = Ends(state)
        self._tools = tools = Tools(state)
        controllers = Controllers(state, tools)
        self.prefixes = prefixes = Prefixes(settings.route_by_prefix)
        placement = Placement(state, prefixes)
        self.dispatcher = dispatcher = Dispatcher(state, controllers, moves, ends, placement)
        buffers = Buffers(state, dispatcher)
        attaches = Attaches(state, ends, moves)
        self.adoption = adoption = Adoption(state, dispatcher, attaches, ends, controllers)
        self._admission = admission = Admission(state, dispatcher, buffers, ends)
        self._sessions = sessions = Sessions(state, dispatcher, buffers, adoption, ends)
        drains = Drains(state, placement, controllers)
        inputs = Inputs(state, controllers)
        self._rollouts = rollouts = Rollouts(state, placement)
        statuses, relay = Statuses(state, tools), Relay(state, controllers, inputs)
        from_clients = {
            **_client_handlers(admission, adoption, buffers, drains, statuses, inputs),
            b"PAUSE": rollouts.pause,
            b"RESUME": rollouts.resume,
            b"UPDATE_WEIGHTS": rollouts.update,
            b"WEIGHTS": rollouts.send,
        }
        self._front = Front(state, sessions, dispatcher, ends, from_clients)
        self._leases = leases = Leases(state, dispatcher, adoption, drains, rollouts)
        from_workers: Mapping[bytes, WorkerHandler] = dict.fromkeys(RELAYED, relay.on_message) | {
            b"HEARTBEAT": leases.on_heartbeat,
            b"UNREGISTER": leases.on_unregister,
            b"DRAIN": drains.on_drain,
            b"JOURNAL": adoption.on_journal,
            b"CLAIMED": adoption.on_claimed,
            b"RELEASED": adoption.on_released,
            b"REFUSED": dispatcher.on_refused,
            b"ORDER_DONE": rollouts.on_done,
            b"FETCH_WEIGHTS": rollouts.on_fetch,
            b"PAGES": prefixes.on_pages,
            b"BUFFER": buffers.on_save,
            b"START": controllers.on_start,
            b"CALL": tools.on_call,
            b"CALL_ANSWER": tools.on_answer,
        }
        self._back = Back(state, leases, dispatcher, ends, from_workers)
        self._quotas = state.quotas
        self._places_at = self._ticked_at = now

    def on_client(
        self, peer: bytes, frames: list[bytes], now: float, key: str = ""
    ) -> list[Outgoing]:
        """Handles a message of the client connection ``peer``, whose CURVE key is ``key``."""
        self._at(now)
        self._front.on_frames(peer, frames, key, now)
        return self._taken()

    def on_worker(self, peer: bytes, frames: list[bytes], now: float) -> list[Outgoing]:
        """Handles a message of the worker connection ``peer``."""
        self._at(now)
        if frames and frames[0] == b"TOKEN":
            self._back.on_tokens(peer, frames, now, pack(frames))
        else:
            self._back.on_frames(peer, frames, now)
        return self._taken()

    def on_clients(self, messages: Iterable[Message], now: float) -> list[Outgoing]:
        """Handles several messages of clients, each with its connection."""
        self._at(now)
        for peer, frames in messages:
            self._guarded(self._front.on_frames, peer, frames, "", now)
        return self._taken()

    def on_workers(self, messages: Iterable[Message], now: float) -> list[Outgoing]:
        """Handles several messages of workers, in the packed form of the socket
        (``packing.py``)."""
        return self._on_workers(messages, self._back.on_tokens, now)

    def _on_workers(
        self,
        messages: Iterable[Message],
        on_tokens: Callable[[bytes, list[bytes], float, list[bytes]], None],
        now: float,
    ) -> list[Outgoing]:
        self._at(now)
        back = self._back
        for peer, received in messages:
            try:
                frames = unpack(received)
                if frames[0] == b"TOKEN":
                    on_tokens(peer, frames, now, received)
                else:
                    back.on_frames(peer, frames, now)
            except RequestError as error:
                self._guarded(back.on_unreadable, peer, error)
            except Exception as error:
                self.dispatcher.on_defect("a worker's message", error)
        return self._taken()

    def on_keyed_clients(self, messages: Iterable[KeyedMessage], now: float) -> list[Outgoing]:
        """Handles several messages of clients if the broker has keys. A message with a revoked key
        is refused."""
        self._at(now)
        admits = self.state.keyring.admits
        for peer, frames, key in messages:
            if admits("client", key):
                self._guarded(self._front.on_frames, peer, frames, key, now)
            else:
                self._guarded(self._front.refuse, peer, frames, revoked("client", key))
        return self._taken()

    def on_keyed_workers(self, messages: Iterable[KeyedMessage], now: float) -> list[Outgoing]:
        """Handles several messages of workers if the broker has keys. A worker with a revoked key
        counts as lost."""
        admits = self.state.keyring.admits
        served = []
        for peer, frames, key in messages:
            if admits("worker", key):
                served.append((peer, frames))
            else:
                self._guarded(self._leases.revoke, peer, revoked("worker", key), now)
        counted = self._quotas.counts_tokens
        on_tokens = self._on_counted_tokens if counted else self._back.on_tokens
        return self._on_workers(served, on_tokens, now)

    def _on_counted_tokens(
        self, peer: bytes, frames: list[bytes], now: float, received: list[bytes]
    ) -> None:
        self._back.on_tokens(peer, frames, now, received)
        self._quotas.on_tokens(frames, now)

    def on_keys(
        self, clients: Mapping[str, Allowed], workers: Mapping[str, Allowed], now: float
    ) -> list[Outgoing]:
        """Applies a change of the allowed keys. The sessions of revoked clients end. The lease of a
        revoked worker ends when the worker's next message arrives, for example a heartbeat."""
        self._at(now)
        self.state.keyring.replace("worker", workers)
        for key in self.state.keyring.replace("client", clients):
            self._guarded(self._front.revoke, key, revoked("client", key))
        return self._taken()

    def on_gone(
        self, side: Side, peer: bytes, now: float, unsent: Sequence[bytes] = ()
    ) -> list[Outgoing]:
        """Handles the end of a connection. ``unsent``: the frames of a message that could not be
        sent because the connection had ended, if any."""
        self._at(now)
        if side is Side.FRONT:
            self.state.sessions.unread.on_gone(peer)
            self._guarded(self._sessions.on_gone, peer, now)
        else:
            self._guarded(self._leases.on_gone, peer, now, unsent)
        return self._taken()

    def on_full(self, message: Outgoing) -> list[Outgoing]:
        """Handles a message that was dropped because the queue of its peer is full."""
        if message.side is Side.FRONT:
            self._guarded(self._front.on_slow, message)
        return self._taken()

    def tick(self, now: float) -> list[Outgoing]:
        """Checks leases and deadlines, and sends notices. Call it again after ``wait_s``
        seconds."""
        self._at(now)
        self._ticked_at = now
        ticks = (self._leases, self.adoption, self._sessions, self.dispatcher, self._rollouts)
        parts = [*(part.tick for part in ticks), self._tools.tick, self._ends.answers.tick]
        for part in parts:
            self._guarded(part, now)
        if now - self._places_at >= PLACES_EVERY_S:
            self._places_at = now
            self._guarded(self.dispatcher.report_places)
        else:
            self._guarded(self.dispatcher.report_more_places)
        return self._taken()

    @property
    def due_at(self) -> float:
        """The time in seconds at which ``expire`` must be called next. This is the earliest
        deadline of a request."""
        return self.state.deadlines.first

    def expire(self, now: float) -> list[Outgoing]:
        """Ends requests whose deadline has passed. Call it between ticks, at ``due_at``."""
        self._at(now)
        self._guarded(self.dispatcher.expire, now)
        return self._taken()

    def wait_s(self, now: float) -> float:
        """Seconds until ``tick`` is to be called again: ``tick_s``, or less if a lease ends
        earlier. If the last tick left work to do, the result is a short pause, in which messages
        are handled."""
        parts = (self.dispatcher, self._sessions, self._leases, self._ends.answers)
        if any(part.behind for part in parts):
            return BEHIND_S
        return max(0.001, min(self.settings.tick_s, self._leases.expires_at - now))

    def leave(self) -> list[Outgoing]:
        """Prepares to leave: another broker is about to replace this broker, and adopts the
        requests that workers report. Requests that cannot be adopted must end first."""
        self._guarded(self._admission.leave, self._stopping())
        return self._taken()

    @property
    def can_leave(self) -> bool:
        """Whether this broker can stop now without the loss of a request."""
        requests = self.state.requests.values()
        if any(r.open and r.worker is not None and not _outlives(r) for r in requests):
            return False
        workers = self.state.workers.values()
        if any(worker.succeeded and worker.requests for worker in workers):
            # A worker that another process is about to replace leaves after its current step, and
            # does not report its streams to the next broker.
            return False
        roles = {worker.role for worker in workers}
        return all(request.role not in roles for request in self.state.waiting)

    def stepped_since(self, then: float) -> bool:
        """Whether each worker with requests has begun a step after the time ``then``, as its
        heartbeats report. A worker that has received a signal to stop sends DRAIN before its next
        step. So if the result is True, every worker with requests that had received the signal by
        ``then`` has also sent DRAIN."""
        workers = self.state.workers.values()
        return all(worker.stepped_at > then for worker in workers if worker.requests)

    def left(self) -> list[Outgoing]:
        """Leaves: requests that the next broker cannot adopt end with an error, so that clients
        send them again."""
        for request in list(self.state.requests.values()):
            if request.worker is None or not _outlives(request):
                self._guarded(self.dispatcher.abandon, request, self._stopping())
        return self._taken()

    def drain(self) -> list[Outgoing]:
        """Prepares to stop: refuses new requests and finishes running ones."""
        self._guarded(self._admission.close, self._stopping())
        return self._taken()

    @property
    def drained(self) -> bool:
        """Whether all requests have ended, and all answers to ATTACHes are complete."""
        return not self.state.requests and not self._ends.answers.behind

    def stop(self) -> list[Outgoing]:
        """Stops: every live stream ends with an error."""
        self._guarded(self._front.end_all, self._stopping())
        return self._taken()

    def _at(self, now: float) -> None:
        """Sets the time of an event. If the last tick was long ago, this process was paused. Leases
        and sessions are then renewed, because the broker has not yet read what workers and clients
        have sent."""
        self.state.now = now
        if now - self._ticked_at > LATE_TICKS * self.settings.tick_s:
            self._ticked_at = now
            self._guarded(self._leases.renew, now)
            self._guarded(self._sessions.renew, now)

    @staticmethod
    def _stopping() -> UnavailableError:
        return UnavailableError(
            Code.SHUTTING_DOWN, "the broker is stopping; try again later", retry_after_s=RETRY_S
        )

    def _guarded(self, part: Callable[..., None], *args: Any) -> None:
        """Runs one part of the handling of an event. An unexpected exception is logged, and does
        not stop the other parts."""
        try:
            part(*args)
        except Exception as error:
            self.dispatcher.on_defect(part.__qualname__, error)

    def _taken(self) -> list[Outgoing]:
        """Returns the outgoing messages at the end of an event."""
        if self._ends.answers.behind:
            self._guarded(self._ends.answers.advance)
        if self.state.recent.pending or self.state.recent.beyond:
            self._guarded(self._moves.settle)
        return self.state.out.take() if self.state.out else []


def _client_handlers(
    admission: Admission,
    adoption: Adoption,
    buffers: Buffers,
    drains: Drains,
    statuses: Statuses,
    inputs: Inputs,
) -> Mapping[bytes, ClientHandler]:
    """The handlers of the messages of clients, by type."""
    requests: dict[bytes, ClientHandler] = dict.fromkeys(ROLES, admission.submit)
    return requests | {
        b"MODEL_INFO": admission.on_model_info,
        b"CANCEL": adoption.on_cancel,
        b"ATTACH": adoption.on_attach,
        b"BUFFER": buffers.on_buffer,
        b"INPUT": inputs.on_input,
        b"DRAIN": drains.ask,
        b"STATUS": statuses.on_status,
    }


def _outlives(request: Request) -> bool:
    """Whether a running request can continue at another broker. The request must be a stream,
    because workers report only streams. Its client must be able to resume the stream there."""
    return request.type in STREAMS and request.session.recovers
