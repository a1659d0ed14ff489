"""The broker's tables: sessions (clients), workers, and the requests between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from typing import Literal

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
    """Waiting requests of all sessions of one key. Each session without a key has its own."""

    queued: int = 0
    queued_bytes: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Session:
    """A client, over whichever connection it has at the moment.

    The first fields are those that each TOKEN needs: of many sessions, none is in the processor's
    cache, and what is together is there with one access to the memory.
    """

    peer: bytes | None
    """The routing id of its connection; None while it has no connection."""
    alive: bool = True
    """Whether it is in the table."""
    bodies: bool = False
    """Whether the client takes several bodies in one TOKEN."""
    id: int
    token: str
    """Empty while the client of a session of an earlier run has not come back."""
    key: str
    """The client's CURVE public key; empty without CURVE."""
    encoding: Encoding
    last_seen: float
    recovering: bool = False
    """Whether it is one of an earlier run of the broker, so that workers may report its streams."""
    greeted: bool = False
    """Whether it began with HELLO; only such a session can be taken over."""
    carries_users: bool = False
    """Whether its client is a gateway, whose users are not the operator."""
    recovers: bool = False
    """Whether its client can come back to another broker, which adopts its streams."""
    pings: bool = False
    """Whether the client sends PINGs, so that its silence means that it is gone."""
    columns: bool = False
    """Whether the client takes TOKEN in columns."""
    texts: bool = False
    """Whether it takes columns with texts."""
    client: str = ""
    detached_at: float | None = None
    """When it lost its connection; None while it has one."""
    probed: float | None = None
    """The ``last_seen`` of the silence in which it was last looked whether it has a connection."""
    cut: bool = False
    """Whether it lost it by silence, so that its client may still be there."""
    displaced: bool = False
    """Whether another broker has claimed streams of it while its client was connected here.
    RELEASED sets it. The client's next HELLO clears it, and this broker claims them back."""
    streams: dict[int, Request] = field(default_factory=dict)
    """Its live streams, by their stream_id."""
    buffers: dict[str, bytes] = field(default_factory=dict)
    buffer_bytes: int = 0
    queued: int = 0
    """Its requests that wait for a worker."""
    queued_bytes: int = 0
    use: KeyUse = field(default_factory=KeyUse)
    """Shared by the sessions of its key; the table of sessions sets it."""
    pace: Pace = field(default_factory=Pace)
    """At which its streams end."""
    journal: Journal
    """What was routed for its live streams."""
    acks: bool = False
    """Whether its client acknowledges the ends that it has received."""
    ends: KeptEnds = field(default_factory=KeptEnds)
    """The ends that its client may not have received."""

    @property
    def tenant(self) -> bytes:
        """Whose modules it may use: those of its key, or of all clients without one."""
        return self.key.encode()

    @property
    def flags(self) -> int:
        """What a worker must know of it: the bits of a header that say how bodies are encoded."""
        if self.encoding == "json":
            return 0
        if not self.columns:
            return Flag.MSGPACK
        return Flag.MSGPACK | Flag.COLUMNS | (Flag.TEXTS if self.texts else 0)


class SessionTable:
    """The sessions, by id, by connection and by token.

    Each session is in ``by_id``, in ``by_token`` where its token is known, and in ``by_peer``
    exactly while it has a connection: ``session.peer`` is changed by this class only.
    """

    def __init__(self, recent: Recent) -> None:
        self.recent = recent
        """What was routed of late for all of them."""
        self.by_id: dict[int, Session] = {}
        self.by_peer: dict[bytes, Session] = {}
        self.by_token: dict[str, Session] = {}
        self._by_key: dict[str, dict[int, Session]] = {}
        """Those of clients with a key."""
        self._uses: dict[str, KeyUse] = {}
        """By key, as long as it has a session."""
        self.unread = UnreadAnswers()

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Session]:
        """A copy, so that sessions can be removed on the way."""
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
        """The client of a session of an earlier run has come back."""
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
            session.use = use

    def _remove_key(self, session: Session) -> None:
        same = self._by_key.get(session.key)
        if same is not None:
            same.pop(session.id, None)
            if not same:
                del self._by_key[session.key], self._uses[session.key]

    def attach(self, session: Session, peer: bytes) -> None:
        """Gives a session the connection ``peer`` in place of the one it had, if any."""
        self.detach(session)
        session.peer = peer
        self.by_peer[peer] = session

    def detach(self, session: Session) -> None:
        """Takes a session's connection from it."""
        if session.peer is not None:
            self.by_peer.pop(session.peer, None)
            session.peer = None


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
    """Whether it was sent HANDOVER: what it has goes to others."""
    succeeded: bool = False
    """Whether it drains and another process takes its place as soon as it has left. Its DRAIN sets
    it."""
    step_age_s: float | None = None
    stepped_at: float = float("-inf")
    """When its last step began that a heartbeat reported, or the time of that heartbeat if no step
    was running."""
    elsewhere: int = 0
    """Requests, or controllers, of other brokers that it runs, as it last said."""
    load: dict[str, float] = field(default_factory=dict)
    metrics: list[Series] = field(default_factory=list)
    manifest: tuple[bytes, Manifest, list[Session | None]] = NO_MANIFEST
    """Of its last TOKEN: the frame, what is in it, and the sessions that it names. Steps of an
    unchanged batch have the same one."""
    requests: dict[int, Request] = field(default_factory=dict)
    steers: dict[int, Request] = field(default_factory=dict)
    """Of a controller worker: the requests whose controllers it runs, or has a place for."""
    withdrawn: dict[int, set[int]] = field(default_factory=dict)
    """By session: streams that it was told to drop, and may still send entries of."""
    revoked: deque[Request] = field(default_factory=deque)
    """Requests that it begins anew, and whose earlier attempt it has not confirmed to have dropped;
    in the order of its confirmations (``revocations.py``)."""
    process: int = 0
    """Number of its process, which no other process has."""
    registration: int = 0
    """Number of its REGISTER, which a REGISTERED has too."""

    def take(self, request: Request) -> None:
        """A request goes to it, or is with it already."""
        self.requests[request.id] = request
        if self.withdrawn:
            self.dropped(request.session.id, request.stream_id)

    def may_send(self, request: Request) -> bool:
        """Whether it may still send entries of an earlier attempt of a request."""
        return request.stream_id in self.withdrawn.get(request.session.id, ())

    def is_revoked(self, number: int) -> bool:
        """Whether its messages about a request belong to an attempt that was revoked."""
        return any(request.id == number for request in self.revoked)

    def confirmed(self) -> None:
        """It has dropped the earlier attempt of the request that was revoked first."""
        request = self.revoked.popleft()
        if self.requests.get(request.id) is request:
            self.dropped(request.session.id, request.stream_id)

    def withdraw(self, session: int, stream_id: int) -> None:
        """It is told to drop a stream, which another worker has."""
        self.withdrawn.setdefault(session, set()).add(stream_id)

    def dropped(self, session: int, stream_id: int) -> None:
        """Removes a stream that was withdrawn: the worker sends no more of its old entries. Has no
        effect while an earlier attempt of the stream is revoked."""
        if any((r.session.id, r.stream_id) == (session, stream_id) for r in self.revoked):
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
        """Whether one more request fits beside those of this broker and of others."""
        others = self.elsewhere if self.role == "gpu" else 0
        return len(self.requests) + others < self.capacity

    @property
    def fill(self) -> float:
        """The part of its capacity in use, 0 to 1, by this broker and by others."""
        return (len(self.requests) + len(self.steers) + self.elsewhere) / self.capacity

    def names(self) -> list[str]:
        """The models that it offers, patterns included."""
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
    """The worker that it was with."""
    process: int
    """That worker's process, where the stream may go on there if it registers again, else 0."""
    why: str
    at: float
    """When that worker was last heard of."""
    since: float
    """When it was lost."""
    sent: bytes
    """What was routed for the request, as a body of TOKEN in msgpack; empty: nothing."""


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
    """The controller that it names, or ``""``."""
    frames: list[bytes]
    """Body, attachments and buffers, as they go to the worker; kept as long as it can move."""
    arrived: float
    by: str = ""
    """The user whose request it is, where its client serves several."""
    group: str = ""
    """The secret of the sessions with which its session takes turns as one; empty: alone."""
    trace: str = ""
    request_id: str = ""
    dispatched: float | None = None
    """When it went to its worker; None where it has not, as the worker's connection had closed."""
    error: str | None = None
    """Why the broker has ended it, if it has."""
    worker: Worker | None = None
    steered_by: Worker | None = None
    """The worker that runs its controller, or has a place reserved for it."""
    controller_awaited: bool = False
    """It was taken while no worker served its controller, as one might still register."""
    controller_started: bool = False
    """Whether its controller has begun: START went to the worker that runs it."""
    served_as: str = ""
    """Once its controller has begun: the pattern of the worker that served it."""
    cancelled: CancelReason | None = None
    """Why its worker was asked to end it; ``deadline`` is then when the broker ends it itself."""
    queued_for: str = ""
    """The key in whose turn it waits in its queue: that of its session when it came there."""
    place: int = 0
    """The place in its queue that was last reported to its client."""
    open: bool = True
    """Whether the client still waits for it; a closed one only waits for the worker's end."""
    movable: bool = True
    """Whether it can go on at another worker: the broker has what that needs."""
    interruption: Interruption | None = None
    """While it waits for another worker: how it lost the one that it had."""
    began_with: ModelInfo | None = None
    """Of one that has moved: the model that it was with first, where that was loaded."""
    entries: int = 0
    """How many were routed for it before it went to its worker."""
    moves: int = 0
    """How often it has gone on at another worker, also under earlier runs of the broker."""
    deaths: int = 0
    """Workers in a row that died when it had no new token there."""
    lone_deaths: int = 0
    """Workers in a row that died when it was their only stream without a new token."""
    resumed: bool = False
    """Whether its client has taken its session over on another connection, and has not attached."""
    returning: bool = False
    """Whether it is with its worker again, whose JOURNAL of it has not arrived yet."""
    attaching: list[int] = field(default_factory=list)
    """The ``received`` of each ATTACH that its worker has not answered."""
    adopted_at: float | None = None
    """Of one of an earlier run of the broker: when it was adopted (``adoption.py``)."""
    unclaimed: bool = False
    """Whether it was adopted, and its client has not attached yet."""
    pages: list[bytes] | None = None
    """The keys of its prompt's pages, from when they are first needed until it is sent."""

    @property
    def turn(self) -> int | str:
        """With which requests it shares turns in a queue: those of its group, or its session."""
        return self.group or self.session.id

    @property
    def bytes(self) -> int:
        """The size of its frames."""
        return sum(map(len, self.frames))
