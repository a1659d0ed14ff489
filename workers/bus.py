"""A worker's connection to the bus, with a thread of its own, so that heartbeats go out while a
forward runs.

The worker's own thread takes messages with ``take`` and sends with ``post``; neither waits for the
network.

After a lease has ended, nothing that was computed for its requests may reach anybody: the broker
has given them to others. So from the ``REGISTER`` of a new lease on, what is posted is dropped,
until the worker has handled the ``REGISTERED`` that answers it, and calls ``registered``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import NamedTuple

from ..protocol.errors import TokenbusError
from ..protocol.frames import Frames
from ..protocol.header import Header, decode_header
from ..protocol.health_file import HealthFile
from ..protocol.keys import OwnKey
from ..protocol.metrics import Series
from ..protocol.worker_messages import Heartbeat, Register, Registered
from ..transport.carrier import carrier
from .lease import Lease, RefusedError

log = logging.getLogger(__name__)

LINGER_MS = 1000
"""How long a worker that leaves goes on sending what it has posted."""


class FromBus(NamedTuple):
    """A message that the broker passed on: its type, header, body and attachments."""

    type: bytes
    header: Header
    body: bytes
    attachments: list[bytes]


def _outlives_lease(message: FromBus) -> bool:
    return not message.header.request and message.type != b"REGISTERED"


class BusEndedError(RuntimeError):
    """The connection has ended for good, though the worker did not close it."""


class Bus:
    """The connection of one worker.

    ``registration`` returns what to register with (called on the bus thread); ``load`` the number
    of requests and the gauges for the heartbeat, ``metrics`` its counters. ``first`` gets new
    messages at once, on the bus thread, and returns those that are for ``take``: for answers that
    must not wait for another thread. Where it raises, it gets the same messages again one by one,
    so that only the one at fault is dropped. ``health`` is kept up to date with each heartbeat.
    so that only the one at fault is dropped. ``key``: the worker's, where the broker has keys.
    ``sandbox_ms``: the CPU time of controllers for the heartbeat.
    Raises AddressError.
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
    ) -> None:
        self._inbox: SimpleQueue[list[FromBus]] = SimpleQueue()
        """An empty list only wakes ``take``. Unlike a Condition it is all in C, and a signal
        handler that interrupts a ``put`` may ``put`` too."""
        self._outbox: deque[Frames] = deque()
        self._gate = threading.Lock()
        self._muted = False
        """Whether what is posted is dropped; changed by who holds ``_gate``."""
        self._handled = 0
        """The lease whose ``REGISTERED`` the worker has handled."""
        self._registration = registration
        self._ended: str | None = None
        self._step_started: float | None = None
        self._load = load
        self._metrics = metrics
        self._sandbox_ms = sandbox_ms
        self._health = health
        self._serves = False
        """Whether it can be given requests: a GPU worker has a model, or loads any on demand."""
        lease = Lease(self._current_registration, self._beat, time.monotonic())
        self._lease = lease
        put = self._inbox.put
        peer = _WorkerPeer(
            endpoint, lease, self._outbox, put, first, self._end, self._drop, self._mute
        )
        self._carrier = carrier(endpoint, peer, "bus", LINGER_MS, packed=True, key=key)

    def start(self) -> None:
        """Connects and registers."""
        self._carrier.start()

    def take(self, wait_s: float) -> list[FromBus]:
        """All messages that have arrived, waiting up to ``wait_s`` seconds for the first.

        Raises BusEndedError where none can arrive any more.
        """
        taken: list[FromBus] = []
        inbox = self._inbox
        with contextlib.suppress(Empty):
            if wait_s > 0 and self._ended is None:
                taken += inbox.get(timeout=wait_s)
            while not inbox.empty():
                taken += inbox.get_nowait()
        if self._ended and not taken:
            raise BusEndedError(f"the connection to the broker has ended: {self._ended}")
        return taken

    def interrupt(self) -> None:
        """Lets a waiting ``take``, or the next one, return at once."""
        self._inbox.put([])

    def post(self, frames: Frames, wake: bool = True) -> None:
        """Sends a message without waiting, in order; without ``wake``, with what comes next.

        Drops it where the lease has ended for which it was made.
        """
        with self._gate:
            if self._muted:
                return
            self._outbox.append(frames)
        if wake:
            self._carrier.send(self._outbox)

    def kept(self, answer: Registered) -> frozenset[int] | None:
        """The requests that go on after this ``REGISTERED``; the worker drops all others. None: all
        of them, as it is the answer to a change of the registration."""
        return None if answer.worker == self._handled else self._lease.kept(answer)

    def registered(self, answer: Registered) -> None:
        """The worker has handled this ``REGISTERED``: it has dropped what does not go on.

        What it posts from now on is sent, unless another lease has begun since.
        """
        self._handled = answer.worker
        with self._gate:
            if self._lease.registered and self._lease.worker == answer.worker:
                self._muted = False

    def flush(self) -> None:
        """Sends what was posted without ``wake``."""
        if self._outbox:
            self._carrier.send(self._outbox)

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Around a step, or whatever else may hang, so that heartbeats report for how long it has
        been running. Within another one, it is a part of that."""
        outer = self._step_started
        if outer is None:
            self._step_started = time.monotonic()
        try:
            yield
        finally:
            self._step_started = outer

    def changed(self) -> None:
        """Registers again, as what the worker registered with has changed."""
        self._post_own(self._lease.changed())

    def drain(self, reason: str) -> None:
        """Stops the broker from sending further requests."""
        self._post_own(self._lease.drain(reason))

    def close(self, reason: str) -> None:
        """Leaves the bus: sends what was posted, unregisters, and ends the thread."""
        self._post_own(self._lease.leave(reason))
        self._carrier.close()

    def _post_own(self, messages: list[Frames]) -> None:
        """Sends messages of the lease, behind those that were posted."""
        self._outbox.extend(messages)
        self._carrier.send(self._outbox)

    # --- on the bus thread ----------------------------------------------------------------------

    def _mute(self) -> None:
        """Another lease begins. Called by who holds the turn to send, before its ``REGISTER``."""
        with self._gate:
            self._muted = True
            self._outbox.clear()

    def _drop(self) -> None:
        """Drops what is about requests of the registration that has ended."""
        waiting: list[FromBus] = []
        with contextlib.suppress(Empty):
            while True:
                waiting += self._inbox.get_nowait()
        self._inbox.put([message for message in waiting if _outlives_lease(message)])

    def _end(self, reason: str) -> None:
        self._ended = reason
        self._inbox.put([])

    def _current_registration(self) -> Register:
        registration = self._registration()
        registration.step_age_s = self._step_age_s(time.monotonic())
        self._serves = bool(
            registration.role != "gpu" or registration.models or registration.patterns
        )
        return registration

    def _step_age_s(self, now: float) -> float | None:
        started = self._step_started
        return round(now - started, 3) if started is not None else None

    def _beat(self, now: float) -> Heartbeat:
        requests, load = self._load()
        step_age_s = self._step_age_s(now)
        if self._health is not None:
            lease = self._lease
            ready = lease.registered and self._serves and not lease.draining
            self._health.beat(ready, step_age_s, now)
        return Heartbeat(
            requests=requests,
            step_age_s=step_age_s,
            load=load,
            metrics=self._metrics(),
            sandbox_ms=self._sandbox_ms(),
        )


class _WorkerPeer:
    """The lease, what the worker posts and what it takes, as the connection sees them."""

    def __init__(
        self,
        address: str,
        lease: Lease,
        outbox: deque[Frames],
        put: Callable[[list[FromBus]], None],
        first: Callable[[list[FromBus]], list[FromBus]] | None,
        ended: Callable[[str], None],
        drop: Callable[[], None],
        mute: Callable[[], None],
    ) -> None:
        self._address = address
        self._lease = lease
        self._outbox = outbox
        self._put = put
        self._first = first
        self._answers: deque[Frames] = deque()
        """The lease's own, which precede what the worker posts."""
        self._drop = drop
        self._mute = mute
        self.ended = ended

    def connected(self, now: float) -> None:
        """Registers; what has arrived for requests of an earlier registration is dropped, and what
        is posted for them."""
        self._mute()
        self._drop()
        self._answers.clear()
        self._answers.extend(self._lease.connected(now))

    def disconnected(self, now: float) -> None:
        """Nothing to do: the next registration replaces this one."""

    def refused(self, error: TokenbusError) -> None:
        """Nothing to do: the connection logs why, and tries again."""

    def receive(self, messages: list[Frames], now: float) -> None:
        """Lets the lease see each message, and puts the others where the worker takes them."""
        taken: list[FromBus] = []
        for frames in messages:
            try:
                if len(frames) < 3:
                    log.warning(
                        "dropped a message of %d frames from the broker; it has 3 at least",
                        len(frames),
                    )
                    continue
                was_registered = self._lease.registered
                if frames[0] == b"REREGISTER":
                    self._mute()
                consumed, answers = self._lease.on_frames(frames, now)
                if self._lease.registered and not was_registered:
                    log.info("registered with the broker at %s", self._address)
                self._answers.extend(answers)
                if frames[0] == b"REREGISTER":
                    self._hand_on(taken, registered=False)
                    taken = []
                if not consumed:
                    header = decode_header(frames[1])
                    taken.append(FromBus(frames[0], header, frames[2], frames[3:]))
            except RefusedError as error:
                log.error("the broker at %s refuses this worker: %s", self._address, error)
            except TokenbusError as error:
                log.warning("dropped an invalid message from the broker: %s", error)
        self._hand_on(taken)

    def _hand_on(self, messages: list[FromBus], registered: bool = True) -> None:
        """Puts messages where the worker takes them, after ``first`` has seen them.

        Where the registration has ended since they came, those about its requests are dropped.
        """
        if messages and self._first is not None:
            messages = self._see_first(self._first, messages)
        if not registered:
            self._drop()
            messages = [message for message in messages if _outlives_lease(message)]
        if messages:
            self._put(messages)

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

    def outgoing(self, now: float) -> Iterator[Frames]:
        """The lease's answers, what the worker has posted, and the heartbeat when it is due."""
        for queue in (self._answers, self._outbox):
            while queue:
                yield queue.popleft()
        yield from self._lease.on_time(now)

    def wait_s(self, now: float) -> float:
        """Until the next heartbeat."""
        return self._lease.wait_s(now)

    def lost(self, now: float) -> bool:
        """Whether the broker was silent for too long; what was posted for it is discarded then."""
        lost = self._lease.lost(now)
        if lost:
            log.warning("the broker at %s is silent; connecting again", self._address)
            self._outbox.clear()
        return lost
