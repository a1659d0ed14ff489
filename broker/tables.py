"""The broker's three tables: sessions (clients), workers, and requests between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase

from ..protocol.bodies import Encoding
from ..protocol.messages import ModelInfo


class WorkerState(Enum):
    """Where a worker stands between REGISTER and its end."""

    READY = "ready"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class Session:
    """A client, whatever connection it has at the moment."""

    id: int
    token: str
    key: str
    """The client's CURVE public key, empty without CURVE."""
    encoding: Encoding
    peer: bytes | None
    """The routing id of its connection; None while it has none."""
    last_seen: float
    greeted: bool = False
    """Whether it said HELLO; only such a session can be taken over."""
    pings: bool = False
    """Whether it promised to ping, and so may expire."""
    client: str = ""
    detached_at: float | None = None
    streams: dict[int, Request] = field(default_factory=dict)
    """Its live streams, by their stream_id."""
    buffers: dict[str, bytes] = field(default_factory=dict)
    buffer_bytes: int = 0

    @property
    def tenant(self) -> bytes:
        """Whose modules it may use: those of its key, or of all clients without one."""
        return self.key.encode()


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
    step_age_s: float | None = None
    load: dict[str, float] = field(default_factory=dict)
    requests: dict[int, Request] = field(default_factory=dict)
    steers: dict[int, Request] = field(default_factory=dict)
    """Of a controller worker: the requests whose controllers it runs."""

    def serves(self, model: str) -> bool:
        """Whether a request for this model may go to this worker ("" is its default)."""
        if not model:
            return True
        return model in self.models or any(fnmatchcase(model, p) for p in self.patterns)

    @property
    def fill(self) -> float:
        """The part of its capacity in use, 0 to 1."""
        return (len(self.requests) + len(self.steers)) / self.capacity

    def names(self) -> list[str]:
        """The models that it offers, patterns included."""
        return [*self.models, *(p for p in self.patterns if p not in self.models)]


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
    """Body, attachments and buffers, as they go to the worker; empty once they went."""
    worker: Worker | None = None
    steered_by: Worker | None = None
    """The worker that runs its controller."""
    place: int = 0
    """The place in its queue that its client was told last."""
    open: bool = True
    """Whether the client still waits for it; a closed one only waits for the worker's end."""
