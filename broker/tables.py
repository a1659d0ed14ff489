"""The broker's tables: sessions (clients), workers, and the requests between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from ..protocol.bodies import Encoding
from ..protocol.header import Flag, Manifest
from ..protocol.messages import ModelInfo
from ..protocol.metrics import Series
from ..protocol.pace import RETRY_AFTER_S as RETRY_AFTER_S
from ..protocol.pace import Pace
from .journal import Journal
from .kept_ends import KeptEnds
from .recent import Recent
from .unread import UnreadAnswers

CancelReason = Literal["cancelled", "timeout"]

NO_MANIFEST: tuple[bytes, Manifest, list[Session | None]] = (b"", Manifest((), (), ()), [])


class WorkerState(Enum):
    """Whether a worker takes new requests."""

    READY = "ready"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class KeyUse:
    """Waiting requests and buffers of all sessions of one key. Each session without a key has its
    own ``KeyUse``."""

    queued: int = 0
    queued_bytes: int = 0
    buffer_bytes: int = 0
    lists_until: float = 0.0
    """The time until which the streams that were listed for STATUS count (``status.py``)."""


@dataclass(slots=True, eq=False, kw_only=True)
class Session:
    """A client, over its present connection.

    The first fields are those that each TOKEN needs. With many sessions, none is in the processor's
    cache, and adjacent fields are loaded with one access to memory.
    """

    peer: bytes | None
    """The routing id of its connection; None while it has no connection."""
    alive: bool = True
    """Whether the session is in the table."""
    bodies: bool = False
    """Whether the client takes several bodies in one TOKEN."""
    id: int
    token: str
    """The token of the session. After a restart of the broker it is empty until the client has
    reconnected."""
    key: str
    """The client's CURVE public key; empty without CURVE."""
    encoding: Encoding
    last_seen: float
    recovering: bool = False
    """Whether the session is of an earlier run of the broker, so that workers may report its
    streams."""
    greeted: bool = False
    """Whether the session began with HELLO; only such a session can be taken over."""
    carries_users: bool = False
    """Whether its client is a gateway, whose users are not the operator."""
    recovers: bool = False
    """Whether its client can come back to another broker, which adopts its streams."""
    pings: bool = False
    """Whether the client sends PINGs, so that its silence means that it is gone."""
    columns: bool = False
    """Whether the client takes TOKEN in columns."""
    texts: bool = False
    """Whether the client takes columns with texts."""
    client: str = ""
    detached_at: float | None = None
    """When the session lost its connection; None while it has one."""
    probed: float | None = None
    """The value of ``last_seen`` when the connection of the silent client was last checked."""
    cut: bool = False
    """Whether the broker detached the connection because the client was silent. The client may
    still run."""
    displaced: bool = False
    """Whether another broker has claimed streams of it while its client was connected here.
    RELEASED sets it. The client's next HELLO clears it, and this broker claims them back."""
    streams: dict[int, Request] = field(default_factory=dict)
    """Its live streams, by their stream_id."""
    buffers: dict[str, bytes] = field(default_factory=dict)
    buffer_bytes: int = 0
    queued: int = 0
    """Number of the session's requests that wait for a worker."""
    queued_bytes: int = 0
    lists_until: float = 0.0
    """As in ``KeyUse``, for a session that carries users."""
    use: KeyUse = field(default_factory=KeyUse)
    """The use of its key, which all sessions of the key share. ``SessionTable`` sets it."""
    pace: Pace = field(default_factory=Pace)
    """Rate at which its streams end."""
    journal: Journal
    """The journal of its live streams."""
    acks: bool = False
    """Whether its client acknowledges the ends that it has received."""
    ends: KeptEnds = field(default_factory=KeptEnds)
    """The ends that its client may not have received."""

    @property
    def tenant(self) -> bytes:
        """The tenant whose modules the session may use: its key, or all clients without a key."""
        return self.key.encode()

    @property
    def flags(self) -> int:
        """The header bits for the encoding of the bodies of this session."""
        if self.encoding == "json":
            return 0
        if not self.columns:
            return Flag.MSGPACK
        return Flag.MSGPACK | Flag.COLUMNS | (Flag.TEXTS if self.texts else 0)


class SessionTable:
    """The sessions, by id, by connection and by token.

    Each session is in ``by_id``, in ``by_token`` if its token is known, and in ``by_peer`` exactly
    while it has a connection: only this class changes ``session.peer``.
    """

    def __init__(self, recent: Recent) -> None:
        self.recent = recent
        """Recently routed messages of all sessions."""
        self.by_id: dict[int, Session] = {}
        self.by_peer: dict[bytes, Session] = {}
        self.by_token: dict[str, Session] = {}
        self._by_key: dict[str, dict[int, Session]] = {}
        """The sessions of clients with a key, by key."""
        self._uses: dict[str, KeyUse] = {}
        """The ``KeyUse`` of each key that has a session."""
        self.unread = UnreadAnswers()

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Session]:
        """Iterates over a copy, so that sessions can be removed meanwhile."""
        return iter(list(self.by_id.values()))

    def add(self, session: Session) -> None:
        """Adds a new session, with the connection that it has."""
        self.by_id[session.id] = session
        self._add_key(session)
        if session.token:
            self.by_token[session.token] = session
        if session.peer is not None:
            self.by_peer[session.peer] = session

    def remove(self, session: Session) -> None:
        """Removes a session that ends."""
        session.alive = False
        self.by_id.pop(session.id, None)
        self.by_token.pop(session.token, None)
        self._remove_key(session)
        self.detach(session)

    def claim(self, session: Session, token: str, key: str) -> None:
        """Gives a session of an earlier run to its client, which has reconnected."""
        self._remove_key(session)
        session.token, session.key = token, key
        self._add_key(session)
        self.by_token[token] = session

    def of_key(self, key: str) -> list[Session]:
        """The sessions of the clients with a key."""
        return list(self._by_key.get(key, {}).values())

    def num_of_key(self, key: str) -> int:
        """The number of sessions of the clients with a key."""
        return len(self._by_key.get(key, ()))

    def keys(self) -> dict[str, int]:
        """The number of sessions of each key."""
        return {key: len(sessions) for key, sessions in self._by_key.items()}

    def _add_key(self, session: Session) -> None:
        if session.key:
            self._by_key.setdefault(session.key, {})[session.id] = session
            use = self._uses.setdefault(session.key, KeyUse())
            use.queued += session.queued
            use.queued_bytes += session.queued_bytes
            use.buffer_bytes += session.buffer_bytes
            session.use = use

    def _remove_key(self, session: Session) -> None:
        same = self._by_key.get(session.key)
        if same is not None:
            same.pop(session.id, None)
            if not same:
                del self._by_key[session.key], self._uses[session.key]

    def attach(self, session: Session, peer: bytes) -> None:
        """Gives a session the connection ``peer`` instead of its earlier one, if any."""
        self.detach(session)
        session.peer = peer
        self.by_peer[peer] = session

    def detach(self, session: Session) -> None:
        """Removes the connection of a session."""
        if session.peer is not None:
            self.by_peer.pop(session.peer, None)
            session.peer = None


class Revocation(NamedTuple):
    """An order to a worker to drop its earlier attempt of a request, which the worker receives
    again."""

    request: Request
    at: float
    """When the order was sent."""


@dataclass(slots=True, eq=False)
class Worker:
    """A worker with a lease."""

    id: int
    peer: bytes
    name: str
    role: str
    pid: int
    host: str
    capacity: int
    models: dict[str, ModelInfo]
    patterns: list[str]
    default: str
    last_seen: float
    state: WorkerState = WorkerState.READY
    handed_over: bool = False
    """Whether HANDOVER was sent to the worker: its streams move to others."""
    succeeded: bool = False
    """Whether the worker drains and another process takes its place as soon as it has left. Its
    DRAIN sets it."""
    step_age_s: float | None = None
    stepped_at: float = float("-inf")
    """When the last step that a heartbeat reported began, or the time of that heartbeat if no step
    was running."""
    elsewhere: int = 0
    """Requests, or controllers, of other brokers that the worker runs, as it last reported."""
    load: dict[str, float] = field(default_factory=dict)
    metrics: list[Series] = field(default_factory=list)
    manifest: tuple[bytes, Manifest, list[Session | None]] = NO_MANIFEST
    """The manifest of its last TOKEN: the frame, its content, and the sessions that it names. Steps
    of an unchanged batch have equal manifests."""
    requests: dict[int, Request] = field(default_factory=dict)
    beyond: set[int] = field(default_factory=set)
    """Requests that the worker received above its capacity. Ended requests may remain in the
    set."""
    steers: dict[int, Request] = field(default_factory=dict)
    """At a controller worker: the requests whose controllers the worker runs or has reserved a
    place for."""
    withdrawn: dict[int, set[int]] = field(default_factory=dict)
    """By session: streams that the worker has to drop, but of which it may still send entries."""
    revoked: deque[Revocation] = field(default_factory=deque)
    """Revocations that the worker has not confirmed, in the order in which it will confirm them
    (``revocations.py``)."""
    process: int = 0
    """Number of the worker's process, unique among processes."""
    registration: int = 0
    """Number of the worker's REGISTER; the REGISTERED that answers it repeats the number."""

    def take(self, request: Request) -> None:
        """Adds a request that goes to the worker, or already runs there."""
        self.requests[request.id] = request
        if self.withdrawn:
            self.dropped(request.session.id, request.stream_id)

    def take_beyond(self, request: Request) -> None:
        """Counts a request as above the capacity. The worker must take the request next."""
        self.beyond &= self.requests.keys()
        self.beyond.add(request.id)

    def may_send(self, request: Request) -> bool:
        """Whether it may still send entries of an earlier attempt of a request."""
        return request.stream_id in self.withdrawn.get(request.session.id, ())

    def is_revoked(self, number: int) -> bool:
        """Whether its messages about a request belong to an attempt that was revoked."""
        return any(revocation.request.id == number for revocation in self.revoked)

    def renew_revocations(self, now: float) -> None:
        """Restarts the time limit of the worker's confirmations, which may have arrived but were
        not read."""
        if self.revoked:
            self.revoked = deque(revocation._replace(at=now) for revocation in self.revoked)

    def confirmed(self) -> None:
        """Records that the worker has dropped the earlier attempt of the request that was revoked
        first."""
        request = self.revoked.popleft().request
        if self.requests.get(request.id) is request:
            self.dropped(request.session.id, request.stream_id)

    def withdraw(self, session: int, stream_id: int) -> None:
        """Records that the worker is ordered to drop a stream that another worker has."""
        self.withdrawn.setdefault(session, set()).add(stream_id)

    def dropped(self, session: int, stream_id: int) -> None:
        """Removes a stream that was withdrawn: the worker sends no more of its old entries. Has no
        effect while an earlier attempt of the stream is revoked."""
        revoked = (revocation.request for revocation in self.revoked)
        if any((r.session.id, r.stream_id) == (session, stream_id) for r in revoked):
            return
        streams = self.withdrawn.get(session, set())
        streams.discard(stream_id)
        if not streams:
            self.withdrawn.pop(session, None)

    def serves(self, model: str) -> bool:
        """Whether a request for this model may go to this worker ("" is its default)."""
        if not model:
            return True
        return model in self.models or any(fnmatchcase(model, p) for p in self.patterns)

    @property
    def has_room(self) -> bool:
        """Whether one more request fits, in addition to those of this broker and of others.
        Requests above the capacity are not counted, so that queued requests get each place that
        becomes free."""
        beyond = len(self.beyond & self.requests.keys()) if self.beyond else 0
        return self._num_requests - beyond < self.capacity

    @property
    def has_room_beyond(self) -> bool:
        """Whether one more request fits into the capacity and an eighth more."""
        return self._num_requests < self.capacity + self.capacity // 8

    @property
    def _num_requests(self) -> int:
        """The requests of this broker and of others."""
        return len(self.requests) + (self.elsewhere if self.role == "gpu" else 0)

    @property
    def fill(self) -> float:
        """The part of its capacity that this broker and others use, 0 to 1."""
        return (len(self.requests) + len(self.steers) + self.elsewhere) / self.capacity

    def names(self) -> list[str]:
        """The models that the worker offers, including patterns."""
        return [*self.models, *(p for p in self.patterns if p not in self.models)]


@dataclass(frozen=True, slots=True)
class Loss:
    """How the broker loses a worker, or a request that the worker had."""

    why: str
    died: bool
    """Whether the worker did not leave as planned. The loss counts against requests that had no
    new token at the worker."""
    returns: bool = True
    """Whether the requests may continue at the same process, if it registers again."""
    replaced: bool = False
    """Whether the worker has registered again, and is about to be added."""


@dataclass(slots=True)
class Interruption:
    """How a request lost its worker, while it waits for another."""

    left: str
    """The worker that had the request."""
    process: int
    """The process of that worker if the stream may continue there after it registers again, else
    0."""
    why: str
    at: float
    """When that worker last sent a message."""
    since: float
    """When the worker was lost."""
    sent: bytes
    """The entries that were routed for the request, as a body of TOKEN in msgpack; may be empty."""


@dataclass(slots=True, eq=False)
class Request:
    """A request from its arrival to the message that ends it."""

    id: int
    session: Session
    stream_id: int
    type: bytes
    role: str
    model: str
    priority: int
    deadline: float | None
    controller: str
    """The name of its controller, or ``""``."""
    frames: list[bytes]
    """Body, attachments and buffers, as sent to the worker; stored as long as the request can
    move."""
    arrived: float
    by: str = ""
    """The user of the request if its client serves several users, else ``""``."""
    group: str = ""
    """The secret of the group of sessions that count as one in the turns of a queue; empty if the
    session has no group."""
    trace: str = ""
    request_id: str = ""
    dispatched: float | None = None
    """When it went to its worker; None if it did not, because the worker's connection had
    closed."""
    error: str | None = None
    """The message of the error with which the broker ended the request; None if the broker did not
    end it."""
    worker: Worker | None = None
    steered_by: Worker | None = None
    """The worker that runs its controller, or has a place reserved for it."""
    controller_awaited: bool = False
    """Whether it was accepted while no worker served its controller, because one might still
    register."""
    controller_started: bool = False
    """Whether its controller has begun: START went to the worker that runs it."""
    served_as: str = ""
    """The pattern of the worker that served its controller; ``""`` before the controller begins."""
    cancelled: CancelReason | None = None
    """The reason of the CANCEL to the request's worker; None if no CANCEL was sent. After a CANCEL,
    the broker itself ends the request at ``deadline``."""
    queued_for: str = ""
    """The key in whose turn it waits in its queue: the key of its session when it was queued."""
    place: int = 0
    """The place in its queue that was last reported to its client."""
    open: bool = True
    """Whether the client still waits for it; a closed request only waits for the worker's end."""
    movable: bool = True
    """Whether the request can continue at another worker, because the broker has the frames and
    entries."""
    interruption: Interruption | None = None
    """The loss of the request's worker; None unless the request waits for another worker."""
    began_with: ModelInfo | None = None
    """The model with which a moved request began, if it was loaded there."""
    entries: int = 0
    """Number of entries that were routed before the request went to its present worker."""
    moves: int = 0
    """How often it has continued at another worker, including earlier runs of the broker."""
    deaths: int = 0
    """Consecutive workers that died while they had no new token of the request."""
    resumed: bool = False
    """Whether the client has resumed the session on another connection, and has not attached to
    this stream yet."""
    returning: bool = False
    """Whether the request has returned to its worker, whose JOURNAL has not arrived yet."""
    attaching: list[int] = field(default_factory=list)
    """The ``received`` of each ATTACH that its worker has not answered."""
    adopted_at: float | None = None
    """When a request of an earlier run of the broker was adopted (``adoption.py``)."""
    unclaimed: bool = False
    """Whether it was adopted, and its client has not attached yet."""
    pages: list[bytes] | None = None
    """The keys of its prompt's pages, from their first use until the request is sent."""

    @property
    def turn(self) -> int | str:
        """The unit that takes turns in a queue: its group, or its session."""
        return self.group or self.session.id

    @property
    def bytes(self) -> int:
        """The size of its frames."""
        return sum(map(len, self.frames))
