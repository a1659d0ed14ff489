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
from .quotas import Quotas
from .recent import Recent
from .recovery import Recovery
from .request import Request
from .session import Session, SessionTable
from .settings import BrokerSettings
from .waiting import Waiting
from .worker import Worker


@dataclass(slots=True)
class Counters:
    """Counts of events since the broker started."""

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
    """Number of ERRORs that the broker itself has made, by error code. A worker's ERROR does not
    count."""

    def totals(self) -> dict[str, int]:
        """The counts by name, without ``errors``, which has a count for each code."""
        values = ((name, getattr(self, name)) for name in self.__slots__)
        return {name: value for name, value in values if isinstance(value, int)}


class BrokerState:
    """The tables, the clock, the settings and the outgoing messages of the broker."""

    def __init__(self, settings: BrokerSettings, *, boot: int, now: float) -> None:
        """``boot``: the number of this run of the broker. ``now``: the time of its start, in
        seconds."""
        self.settings = settings
        self.started = now
        self.now = now
        """The time of the event that the broker is handling, in seconds."""
        self.ids: Iterator[int] = counting_ids(boot)
        """Yields the ids of new requests, of new workers and of orders (``rollouts.py``)."""
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
        """The accepted requests, by id. An ended request stays here until its worker has reported
        the end."""
        self.queues = Queues()
        """The requests that wait for their first worker, in a queue for each role and model."""
        self.waiting = Waiting()
        """The requests that have lost their worker and wait for another one."""
        self.states: dict[str, ModelState] = {}
        """The weights and the pause of each model whose weights have changed, or that is paused or
        was paused before."""
        self.deadlines = Deadlines()
        self.quotas = Quotas(self)
        self.tokenizers = Counter[str]()
        """By key: the number of TOKENIZER requests that have not ended."""
        self.closing: TokenbusError | None = None
        """The error with which a broker that is about to stop refuses new requests; None before."""

    @property
    def num_queued(self) -> int:
        """The number of requests without a worker."""
        return sum(map(len, self.queues.values())) + len(self.waiting)

    def is_operator(self, session: Session) -> bool:
        """Whether a client may send the operator's messages and see the streams of all clients.
        If the broker has no keys, each client may do so, because all clients run on the broker's
        machine. With keys, the client's key decides. A gateway may never do so, because its users
        would then have the same rights."""
        allowed = self.keyring.client(session.key)
        local = not session.key
        return not session.carries_users and (local or (allowed is not None and allowed.operator))

    def is_hung(self, worker: Worker) -> bool:
        """Whether a worker's current step has run for longer than ``hung_step_s``."""
        return worker.step_age_s is not None and worker.step_age_s > self.settings.hung_step_s
