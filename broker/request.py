"""A client's request: the fields that the broker reads, and its progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

from ..protocol.messages import (
    ControllerName,
    GroupName,
    ModelInfo,
    ModelName,
    Name,
    RequestId,
    StreamId,
    Timeout,
    TraceParent,
    UserName,
    controller_of,
)
from .lifecycle import OPEN, RequestState
from .reconcile import Progress

if TYPE_CHECKING:
    from .session import Session
    from .worker import Worker

CancelReason = Literal["cancelled", "timeout"]

ROLES = {
    b"GENERATE": "gpu",
    b"SCORE": "gpu",
    b"MODEL_INFO": "gpu",
    b"TOKENIZER": "gpu",
    b"EMBED": "gpu",
    b"UPLOAD": "controller",
    b"TAG": "controller",
    b"TAGS": "controller",
    b"DELETE": "controller",
}
"""By type of request: the role of the workers that answer such a request."""
STREAMS = frozenset((b"GENERATE", b"SCORE"))
"""The types of requests that are answered by TOKENs. If the worker of such a request is lost, the
request continues after its last entry."""
REPEATABLE = frozenset((b"MODEL_INFO", b"TOKENIZER", b"EMBED", b"UPLOAD", b"TAG", b"TAGS"))
"""The types of requests that may be computed twice. If the worker of such a request is lost,
another worker repeats the request."""


class RoutingFields(Struct, kw_only=True, gc=False):
    """The fields of a request's body that the broker decodes when the request arrives. Later, the
    broker reads only the prompt and ``buffers`` (``prefixes.py``)."""

    stream_id: StreamId
    model: ModelName = ""
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    buffers: tuple[Name, ...] = ()
    timeout_s: Timeout | None = None
    controller: ControllerName | None = None
    heal_prompt: bool = False
    by: UserName = ""
    """The user of the request if its client serves several users, else ``""``."""
    group: GroupName = ""
    """A secret that several sessions share. These sessions count as one in the turns of a queue.
    Empty if the session has no group."""
    trace: TraceParent = ""
    request_id: RequestId = ""

    def steered_by(self, message_type: bytes) -> str:
        """The name of the controller of a request of this type; empty without a controller."""
        if message_type != b"GENERATE":
            return ""
        return controller_of(self.controller, self.heal_prompt)


@dataclass(slots=True)
class Interruption:
    """The record of the loss of a request's worker. It exists while the request waits for another
    worker."""

    left: str
    """The name of the lost worker."""
    process: int
    """The number of the lost worker's process. If this process registers again, the stream may
    continue there. 0 if the stream must not continue there."""
    why: str
    at: float
    """The time of the lost worker's last message, in seconds."""
    since: float
    """The time at which the worker was lost, in seconds."""
    sent: bytes
    """The entries that were routed for the request, as a body of TOKEN in msgpack; may be empty."""
    answered: int = 0
    """Number of ATTACHes that were answered with entries of ``sent``."""


@dataclass(slots=True)
class Steering:
    """The controller of a request, and the worker that runs it."""

    name: str
    worker: Worker | None = None
    """The worker that runs the controller, or has a place reserved for it."""
    owner: str = ""
    """The client for which this place is counted: the key of the session or, without a key, the
    session. The key of an adopted request may become known later."""
    awaited: bool = False
    """Whether no worker served the controller when the request was accepted. The broker accepts
    such a request if a worker may still register. The flag is cleared when a worker is chosen."""
    started: bool = False
    """Whether START was sent to the worker that runs the controller."""
    served_as: str = ""
    """The name or pattern under which a worker has started the controller; ``""`` before the first
    start."""
    adopted_at: float | None = None
    """The time at which the request was adopted, in seconds. None if this run of the broker
    accepted the request, or claimed its session."""
    unknown: str = ""
    """While the START waits because a worker did not know the controller: the error of this worker.
    Otherwise empty."""
    has_inputs: bool = False
    """Whether an input was sent to the state worker. The state worker then has data of the request,
    even if no controller has started."""


class Attachment(Enum):
    """Whether the client of a stream receives the stream's entries, or has to send ATTACH first."""

    ATTACHED = "attached"
    RESUMED = "resumed"
    """The client has resumed the session on another connection, and has not attached to the stream
    yet."""


class Unclaimed(NamedTuple):
    """The stream was adopted, and its client has not attached to it yet."""

    claimed: int
    """The part of ``Request.moves`` that this broker's CLAIM has added (``Journal.claimed``)."""


@dataclass(slots=True, eq=False)
class Request:
    """A request, from its arrival to the message that ends the request."""

    id: int
    session: Session
    type: bytes
    fields: RoutingFields
    frames: list[bytes]
    """Body, attachments and buffers, as sent to the worker. Empty if the broker does not store
    them; then the request cannot move."""
    arrived: float
    deadline: float | None = None
    state: RequestState = RequestState.NEW
    """Only ``lifecycle.py`` changes the state."""
    worker: Worker | None = None
    """The worker that has the request. Only ``lifecycle.py`` changes this field."""
    dispatched: float | None = None
    """The time at which the request was sent to its worker, in seconds. None if it was not sent
    yet, or if sending failed because the worker's connection had closed."""
    steering: Steering | None = None
    """The controller of the request; None without a controller."""
    attachment: Attachment | Unclaimed = Attachment.ATTACHED
    attaching: list[int] = field(default_factory=list)
    """``Attach.received`` of each ATTACH that the request's worker has not answered."""
    interruption: Interruption | None = None
    """The loss of the request's worker; None unless the request waits for another worker."""
    began_with: ModelInfo | None = None
    """The model with which a moved request began, as its first worker reported it; None if this
    worker had not reported the model."""
    entries: int = 0
    """Number of entries that had been routed when the request was sent to its present worker."""
    moves: int = 0
    """How often the request has moved to another worker, in this and earlier runs of the broker."""
    deaths: int = 0
    """Number of consecutive workers that died before they sent a new token of the request."""
    cancelled: CancelReason | None = None
    """Why the request was cancelled; None if it was not cancelled. The worker of a cancelled
    request has received a CANCEL. If the worker has not ended the request at ``deadline``, the
    broker ends the request."""
    error: str | None = None
    """The message of the error with which the broker ended the request, if any."""

    @property
    def stream_id(self) -> int:
        """The ``stream_id`` that the client has chosen for the request."""
        return self.fields.stream_id

    @property
    def model(self) -> str:
        """The model that the client named; ``""`` stands for the default model."""
        return self.fields.model

    @property
    def priority(self) -> int:
        """The priority of the request. Requests with a higher priority leave a queue first."""
        return self.fields.priority

    @property
    def trace(self) -> str:
        """The ``traceparent`` of the request, or ``""``."""
        return self.fields.trace

    @property
    def role(self) -> str:
        """The role of the workers that answer requests of this type."""
        return ROLES[self.type]

    @property
    def controller(self) -> str:
        """The name of the request's controller, or ``""``."""
        return self.steering.name if self.steering is not None else ""

    @property
    def steered(self) -> Steering:
        """The controller of the request, which must have a controller."""
        assert self.steering is not None
        return self.steering

    @property
    def steered_by(self) -> Worker | None:
        """The worker that runs the controller of the request, or has a place reserved for the
        controller."""
        return self.steering.worker if self.steering is not None else None

    @property
    def open(self) -> bool:
        """Whether the client still waits for the end of the request. A closed request only waits
        for its worker to report the end."""
        return self.state in OPEN

    @property
    def movable(self) -> bool:
        """Whether the request can continue at another worker. To continue a request, the broker
        must store the request's frames and entries."""
        return bool(self.frames)

    @property
    def awaits_attach(self) -> bool:
        """Whether the client has to send ATTACH, or waits for the answer to an ATTACH. Until the
        client has received this answer, it drops entries of the stream."""
        return bool(self.attaching) or self.attachment is not Attachment.ATTACHED

    @property
    def reported(self) -> Progress | None:
        """How far the stream has come since its worker reported it. None if the stream was not
        adopted, or if its client has attached to it."""
        if not isinstance(self.attachment, Unclaimed):
            return None
        return Progress(self.moves - self.attachment.claimed, self.entries)

    @property
    def routed(self) -> Progress:
        """The entries that were routed of a stream that waits for a worker or returns to its former
        worker, and all its moves."""
        return Progress(self.moves, self.entries)

    @property
    def turn(self) -> int | str:
        """The unit that takes turns in a queue: the request's group or, without a group, its
        session."""
        return self.fields.group or self.session.id

    @property
    def queue(self) -> tuple[str, str]:
        """The key of the queue in which the request waits for a worker: the role and the model."""
        return self.role, self.fields.model

    @property
    def bytes(self) -> int:
        """The size of the request's frames, in bytes."""
        return sum(map(len, self.frames))
