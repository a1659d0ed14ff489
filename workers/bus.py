"""A worker's connection to the bus. The connection has its own threads, so it sends heartbeats even
while the worker computes.

The worker's own thread receives messages with ``take`` and sends messages with ``post``, which does
not wait for the network. A worker registers with each broker of a list, and has a link to each
broker (``link.py``). Each received message has the number of its link. The worker posts a message
about a request to the link over which the request came.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

from ..protocol.bodies import encode_body
from ..protocol.endpoints import separate
from ..protocol.frames import Frames
from ..protocol.header import Header, encode_header
from ..protocol.health_file import HealthFile
from ..protocol.keys import OwnKey
from ..protocol.metrics import Series
from ..protocol.worker_messages import Heartbeat, Refused, Register, Registered
from ..transport.waiting import get_within
from .link import FromBus as FromBus
from .link import Link

log = logging.getLogger(__name__)


LEASE_ENDED = b"LEASE_ENDED"
"""The type of a message that this module makes; brokers do not send it. If the worker has several
brokers, ``take`` returns this message when the lease at one broker has ended. The worker may never
register with this broker again."""


class BusEndedError(RuntimeError):
    """The connection has ended permanently, although the worker did not close it."""


class Bus:
    """The connection of one worker to its brokers. ``endpoint``: the addresses of the brokers,
    separated by commas.

    ``registration`` returns the worker's registration. It is called on a bus thread. ``load``,
    ``metrics`` and ``sandbox_ms`` return the content of heartbeats: ``load`` the number of requests
    and the gauges, ``metrics`` the counters, and ``sandbox_ms`` the CPU time of controllers.

    ``first`` is called with new messages at once, on a bus thread. It handles the messages that
    must not wait for another thread, and returns the other messages. ``take`` returns these other
    messages. If ``first`` raises an exception, it receives the same messages again one by one, so
    that only the faulty message is dropped.

    ``health`` is updated with each heartbeat. ``key``: the worker's key, if the brokers have keys.
    ``link_of``: the link of a live request; None if the request is unknown. ``elsewhere``: the
    number of requests that belong to the brokers of other links. Only one thread at a time calls
    these functions. Raises AddressError if an address is not valid.
    """

    def __init__(
        self,
        endpoint: str,
        registration: Callable[[], Register],
        load: Callable[[], tuple[int, dict[str, float]]],
        first: Callable[[list[FromBus]], list[FromBus]] | None = None,
        metrics: Callable[[], list[Series]] = list,
        health: HealthFile | None = None,
        key: OwnKey | None = None,
        sandbox_ms: Callable[[], dict[str, int]] = dict,
        link_of: Callable[[int], int | None] = lambda request: None,
        elsewhere: Callable[[int], int] = lambda link: 0,
    ) -> None:
        self._inbox: SimpleQueue[list[FromBus]] = SimpleQueue()
        """The messages for ``take``; an empty list only wakes ``take``. Unlike a Condition, the
        queue is implemented in C, so a signal handler that interrupts a ``put`` may call ``put``
        too."""
        self._turn = threading.RLock()
        """A bus thread holds this lock while it calls a function of the worker. So two of these
        calls never overlap."""
        self._registration = registration
        self._ended: str | None = None
        self._step_started: float | None = None
        self._load = load
        self._metrics = metrics
        self._sandbox_ms = sandbox_ms
        self._health = health
        self._first = first
        self._link_of = link_of
        self._elsewhere = elsewhere
        self._serves = False
        """Whether the worker can serve requests. A GPU worker can serve requests if it has a model
        or loads models on demand; any other worker always can."""
        self._process = secrets.randbits(63) or 1
        """Number of this process, by which brokers distinguish it from other processes with the
        same worker name."""
        addresses = separate(endpoint)
        self._links = [Link(n, address, self, key) for n, address in enumerate(addresses)]

    @property
    def num_links(self) -> int:
        """The number of brokers."""
        return len(self._links)

    def start(self) -> None:
        """Connects and registers."""
        for link in self._links:
            link.start()

    def take(self, wait_s: float) -> list[FromBus]:
        """Returns all messages that have arrived. If no message has arrived, waits for a message
        for up to ``wait_s`` seconds.

        Raises BusEndedError if messages cannot arrive any more.
        """
        taken: list[FromBus] = []
        inbox = self._inbox
        with contextlib.suppress(Empty):
            if wait_s > 0 and self._ended is None:
                first = get_within(inbox, wait_s)
                taken += first
            while not inbox.empty():
                taken += inbox.get_nowait()
        if self._ended and not taken:
            raise BusEndedError(f"the connection to the broker has ended: {self._ended}")
        return taken

    def interrupt(self) -> None:
        """Makes a waiting ``take``, or the next ``take``, return at once."""
        self._inbox.put([])

    def post(self, frames: Frames, link: int = 0, wake: bool = True) -> None:
        """Queues a message for a link, and does not wait until it is sent. The messages of a link
        are sent in order. If ``wake`` is false, the message is sent together with the next message.

        Drops the message if the lease for which it was made has ended.
        """
        self._links[link].post(frames, wake)

    def post_all(self, frames: Frames) -> None:
        """Sends a message to every broker."""
        for link in self._links:
            link.post(frames, True)

    def post_to_any(self, frames: Frames, turn: int) -> None:
        """Sends a message to one of the brokers that have registered this worker. ``turn`` selects
        the broker. If the message is not answered, the caller repeats it with ``turn + 1``. The
        repeated message goes to the next broker, because the first broker may have failed."""
        there = [link for link in self._links if link.lease.registered] or self._links
        there[turn % len(there)].post(frames, True)

    def post_to(self, worker: int, frames: Frames) -> None:
        """Sends a message to the worker with this id, over the broker that assigned the id; drops
        the message if that broker is disconnected."""
        for link in self._links:
            if len(self._links) == 1 or link.assigned(worker):
                link.post(frames, True)
                return

    def kept(self, answer: Registered, link: int = 0) -> frozenset[int] | None:
        """The requests of a link that continue after this ``REGISTERED``. The worker drops the
        link's other requests. The result is None if ``REGISTERED`` confirms only an update of the
        registration; all requests then continue."""
        return self._links[link].kept(answer)

    def registered(self, answer: Registered, link: int = 0) -> None:
        """Called when the worker has handled this ``REGISTERED``, and has dropped the requests that
        do not continue.

        After this call, posted messages are sent over the link again. If yet another lease has
        begun since this ``REGISTERED``, they are still dropped.
        """
        self._links[link].registered(answer)

    def flush(self) -> None:
        """Sends the messages that were posted without ``wake``."""
        for link in self._links:
            link.flush()

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """A context for a step or other work that may hang. Heartbeats report how long the work has
        been running. An inner step counts as part of the outer step."""
        outer = self._step_started
        if outer is None:
            self._step_started = time.monotonic()
        try:
            yield
        finally:
            self._step_started = outer

    def changed(self) -> None:
        """Reports a changed registration to every broker."""
        for link in self._links:
            link.post_own(link.lease.changed())

    def drain(self, reason: str, successor: bool | None = False) -> None:
        """Asks the brokers to send no further requests. ``successor``: True if another process will
        replace this worker; the worker's streams may then move at once. None if all processes on
        this machine end."""
        for link in self._links:
            link.post_own(link.lease.drain(reason, successor))

    def close(self, reason: str) -> None:
        """Leaves the bus: sends the posted messages, unregisters, and ends the threads."""
        for link in self._links:
            link.post_own(link.lease.leave(reason))
        for link in self._links:
            link.close()

    # --- on a bus thread ------------------------------------------------------------------------

    def registration(self, link: int) -> Register:
        """The registration at a broker, with the live requests of this broker and the live requests
        whose broker is unknown."""
        with self._turn:
            registration = self._registration()
            if len(self._links) > 1:
                registration.live = [
                    one for one in registration.live if self._link_of(one.request) in (link, None)
                ]
            self._serves = bool(
                registration.role != "gpu" or registration.models or registration.patterns
            )
        registration.step_age_s = self._step_age_s(time.monotonic())
        registration.process = self._process
        return registration

    def beat(self, link: int, now: float) -> Heartbeat:
        """The heartbeat for a broker."""
        step_age_s = self._step_age_s(now)
        with self._turn:
            requests, load = self._load()
            if self._health is not None:
                leases = [one.lease for one in self._links]
                taking = any(lease.registered and not lease.draining for lease in leases)
                self._health.beat(taking and self._serves, step_age_s, now)
            return Heartbeat(
                requests=requests,
                elsewhere=self._elsewhere(link) if len(self._links) > 1 else 0,
                step_age_s=step_age_s,
                load=load,
                metrics=self._metrics(),
                sandbox_ms=self._sandbox_ms(),
            )

    def take_in(self, messages: list[FromBus]) -> None:
        """Calls ``first`` with messages, and queues the messages that it returns for ``take``."""
        if self._first is not None:
            with self._turn:
                messages = self._see_first(self._first, messages)
        if messages:
            self._inbox.put(messages)

    def lease_ended(self, link: int) -> None:
        """Removes messages for requests of an ended lease from the queue of ``take``."""
        waiting: list[FromBus] = []
        with contextlib.suppress(Empty):
            while True:
                waiting += self._inbox.get_nowait()
        kept = [m for m in waiting if m.link != link or _outlives_lease(m)]
        if len(self._links) > 1:
            kept.append(FromBus(LEASE_ENDED, Header(), b"", [], link))
        self._inbox.put(kept)

    def link_ended(self, reason: str) -> None:
        """Handles the end of a link's thread. After an unexpected end, ``take`` raises
        BusEndedError. ``reason`` is empty if the link was closed."""
        self._ended = reason
        self._inbox.put([])

    def _step_age_s(self, now: float) -> float | None:
        started = self._step_started
        return round(now - started, 3) if started is not None else None

    def _see_first(
        self, first: Callable[[list[FromBus]], list[FromBus]], messages: list[FromBus]
    ) -> list[FromBus]:
        try:
            return first(messages)
        except Exception:
            if len(messages) == 1:
                log.exception("dropped a %s message", messages[0].type.decode("ascii", "replace"))
                return []
        return [rest for message in messages for rest in self._see_first(first, [message])]


def refused_frames(message: FromBus, elsewhere: int = 0, unknown: str = "") -> Frames:
    """The REFUSED with which a worker returns a request or a START to the broker, because the
    worker is full or the controller of a START is unknown. ``elsewhere``: the number of requests
    that this worker runs for other brokers. ``unknown``: the error of an unknown controller."""
    made = Refused(type=message.type.decode(), elsewhere=elsewhere, unknown=unknown)
    body = encode_body(made, "msgpack")
    header = encode_header(message.header.request)
    return [b"REFUSED", header, body, message.body, *message.attachments]


def _outlives_lease(message: FromBus) -> bool:
    return not message.header.request and message.type != b"REGISTERED"
