"""A worker with a lease, and the reasons for its loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ..protocol.errors import RequestError
from ..protocol.header import Manifest
from ..protocol.messages import ModelInfo, Tool
from ..protocol.metrics import Series
from ..protocol.pace import RETRY_AFTER_S as RETRY_AFTER_S
from .fences import Fences
from .in_flight import InFlight

if TYPE_CHECKING:
    from .request import Request
    from .session import Session

STORE_REQUESTS = 1_024
"""Maximum number of requests to the module store at a controller worker. The worker refuses further
requests of a client before the number is reached."""
NO_MANIFEST: tuple[bytes, Manifest, list[Session | None]] = (b"", Manifest((), (), ()), [])


class UnreadableError(RequestError):
    """A message of a worker cannot be read. So tokens of any of the worker's streams may be
    missing."""


class WorkerState(Enum):
    """Whether a worker takes new requests."""

    READY = "ready"
    DRAINING = "draining"


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
    """Whether HANDOVER was sent to the worker, so that its streams move to other workers."""
    succeeded: bool = False
    """Whether another process will replace this worker as soon as it has left. The worker's DRAIN
    sets the flag."""
    system_ends: bool = False
    """Whether the other workers on the worker's host are about to drain too
    (``Drain.system_ends``)."""
    step_age_s: float | None = None
    stepped_at: float = float("-inf")
    """Start time of the step in the last heartbeat, or the time of that heartbeat if no step was
    running."""
    missing_layers: list[str] = field(default_factory=list)
    """Layers of isolation that the guests of a controller worker lack, with the reasons."""
    elsewhere: int = 0
    """Number of requests or controllers of other brokers that the worker runs, as it last
    reported."""
    load: dict[str, float] = field(default_factory=dict)
    metrics: list[Series] = field(default_factory=list)
    manifest: tuple[bytes, Manifest, list[Session | None]] = NO_MANIFEST
    """The manifest of the worker's last TOKEN: its frame, its content, and the sessions that it
    names. Steps of an unchanged batch have equal manifests. An equal manifest is not decoded
    again."""
    requests: dict[int, Request] = field(default_factory=dict)
    beyond: set[int] = field(default_factory=set)
    """Ids of the requests that the worker received although it was full
    (``Placement.beyond_capacity``). Ids of ended requests may remain in the set."""
    steers: dict[int, Request] = field(default_factory=dict)
    """At a controller worker: the requests whose controllers run at the worker, or have a reserved
    place there."""
    tools: dict[str, Tool] = field(default_factory=dict)
    """The functions that a tool worker serves, by name."""
    calls: set[tuple[int, int, int]] = field(default_factory=set)
    """At a tool worker: the ids of its running calls (``tools.py``)."""
    fences: Fences = field(default_factory=Fences)
    """The fences of those attempts of this worker that the broker has given up (``fences.py``)."""
    in_flight: InFlight = field(default_factory=InFlight)
    """At a GPU worker: the requests that the worker has not taken yet."""
    process: int = 0
    """The number of the worker's process. Each process has a different number."""
    registration: int = 0
    """Number of the worker's REGISTER; the REGISTERED that answers this message repeats the
    number."""
    brokers: int = 1
    """The number of brokers at which the worker registers."""

    def take(self, request: Request) -> None:
        """Adds a request that is sent to the worker, or already runs there."""
        self.requests[request.id] = request

    def take_beyond(self, request: Request) -> None:
        """Counts a request as above the capacity. Call this method before ``take``."""
        self.beyond &= self.requests.keys()
        self.beyond.add(request.id)

    def leaves_with(self, other: Worker) -> bool:
        """Whether this worker and ``other`` leave together: both are on the same host, and the
        whole system on this host is about to end."""
        return other.system_ends and self.host == other.host

    def serves(self, model: str) -> bool:
        """Whether a request for this model may go to this worker. ``""`` is the worker's default
        model."""
        if not model:
            return True
        return model in self.models or any(fnmatchcase(model, p) for p in self.patterns)

    @property
    def has_room(self) -> bool:
        """Whether the worker has room for one more request. Its requests of all brokers count,
        except those above the capacity (``beyond``). So each place that becomes free goes to a
        queued request."""
        beyond = len(self.beyond & self.requests.keys()) if self.beyond else 0
        return self._num_requests - beyond < self._max_requests and self.in_flight.has_room

    def has_room_beyond(self, part: int) -> bool:
        """Whether one more request fits into the capacity plus a fraction 1/``part`` of the
        capacity."""
        most = self._max_requests + self._max_requests // part
        return self._num_requests < most and self.in_flight.has_room

    @property
    def _max_requests(self) -> int:
        """Maximum number of requests. The capacity of a controller worker is for controllers."""
        return STORE_REQUESTS if self.role == "controller" else self.capacity

    @property
    def _num_requests(self) -> int:
        """Number of the worker's requests of this broker and of other brokers. Attempts with a
        fence count too, because the worker may still run them, or report them for adoption."""
        elsewhere = self.elsewhere if self.role == "gpu" else 0
        return len(self.requests) + len(self.fences) + elsewhere

    @property
    def fill(self) -> float:
        """The part of the worker's capacity that this and other brokers use: 1 if the worker is
        full, more with requests above the capacity."""
        return self.num_assigned / self.capacity

    @property
    def num_assigned(self) -> int:
        """Number of the worker's requests, controllers and calls, of this broker and of other
        brokers."""
        return len(self.requests) + len(self.steers) + len(self.calls) + self.elsewhere

    @property
    def has_place(self) -> bool:
        """Whether a controller worker has a place for one more controller. Requests to the module
        store do not take places, because the uploads of one client could take all of them."""
        return len(self.steers) + self.elsewhere < self.capacity

    def has_place_beyond(self, part: int) -> bool:
        """Whether one more controller fits into the capacity of a controller worker plus a fraction
        1/``part`` of the capacity."""
        return len(self.steers) + self.elsewhere < self.capacity + self.capacity // part

    def names(self) -> list[str]:
        """The models, including patterns, and the tools that the worker offers."""
        patterns = (p for p in self.patterns if p not in self.models)
        return [*self.models, *patterns, *self.tools]


@dataclass(frozen=True, slots=True)
class Loss:
    """Describes why and how the broker loses a worker, or only a request of the worker."""

    why: str
    died: bool
    """Whether the worker left unexpectedly. If so, the loss counts against each request of which
    the worker had not sent a new token (``quarantine.py``)."""
    returns: bool = True
    """Whether the requests may continue at the same process if this process registers again."""
    replaced: bool = False
    """Whether the same worker has registered again, and is about to be added to the tables
    again."""
