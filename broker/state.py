"""The state of the broker: one object that all parts of the broker share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..protocol.errors import TokenbusError
from ..protocol.ids import counting_ids
from ..protocol.metrics import Tally
from ..protocol.worker_messages import ModelState
from .deadlines import Deadlines
from .fair_queue import Queues
from .keyring import Keyring
from .outgoing import Outgoings
from .pools import Pools
from .recent import Recent
from .recovery import Recovery
from .request import Request
from .session import Session, SessionTable
from .settings import BrokerSettings
from .waiting import Waiting
from .worker import Worker


@dataclass(slots=True)
class Counters:
    """Totals since the broker started."""

    requests: int = 0
    refused: int = 0
    token_bodies: int = 0
    slow_clients: int = 0
    workers_lost: int = 0
    bad_worker_messages: int = 0
    internal_errors: int = 0
    """Number of unexpected exceptions in the broker. The log has each of them."""
    requests_moved: int = 0
    """Number of requests that have left a worker before their end."""
    requests_quarantined: int = 0
    errors: Tally = field(default_factory=lambda: Tally("errors", "code"))
    """The ERRORs of the broker itself, by code."""

    def totals(self) -> dict[str, int]:
        """The counters without labels, by name."""
        values = ((name, getattr(self, name)) for name in self.__slots__)
        return {name: value for name, value in values if isinstance(value, int)}


class BrokerState:
    """The tables, the clock, the settings and the outgoing messages of the broker."""

    def __init__(self, settings: BrokerSettings, *, boot: int, now: float) -> None:
        """``boot``: the number of this run of the broker; ``now``: its start, in seconds."""
        self.settings = settings
        self.started = now
        self.now = now
        """The time of the event that is handled, in seconds."""
        self.ids: Iterator[int] = counting_ids(boot)
        """The ids of requests and workers."""
        self.counters = Counters()
        self.out = Outgoings(self.counters.errors)
        self.keyring = Keyring()
        self.recovery = Recovery(settings, now)
        self.recent = Recent(settings.max_journal_bytes, settings.max_total_journal_bytes)
        self.sessions = SessionTable(self.recent)
        self.workers: dict[int, Worker] = {}
        """The workers with a lease, by id."""
        self.pools = Pools(self.is_hung)
        self.requests: dict[int, Request] = {}
        """The requests that the broker has accepted and that have not ended at their worker, by
        id."""
        self.queues = Queues()
        """The requests that wait for their first worker."""
        self.waiting = Waiting()
        """The requests that have lost their worker."""
        self.states: dict[str, ModelState] = {}
        """The models whose weights have changed, or that are or were paused."""
        self.deadlines = Deadlines()
        self.tokenizers = Counter[str]()
        """By key: the requests for tokenizers that have not ended."""
        self.closing: TokenbusError | None = None
        """The error for new requests once the broker is about to stop."""

    @property
    def num_queued(self) -> int:
        """The number of requests without a worker."""
        return sum(map(len, self.queues.values())) + len(self.waiting)

    def is_operator(self, session: Session) -> bool:
        """Whether a client may perform operator actions. A client without a key may, because it is
        on the broker's machine. A client with a key may if the key allows it. A gateway may not,
        because its users could then perform them."""
        allowed = self.keyring.client(session.key)
        local = not session.key
        return not session.carries_users and (local or (allowed is not None and allowed.operator))

    def is_hung(self, worker: Worker) -> bool:
        """Whether a worker's current step has run for so long that it counts as hung."""
        return worker.step_age_s is not None and worker.step_age_s > self.settings.hung_step_s
