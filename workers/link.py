"""A worker's link to one broker: its lease there, its posted messages, and its connection.

A worker has a link to each broker of its list. Each link has its own lease. A fault of one link
does not affect the other links.

After a lease has ended, results for its requests must not be delivered: the broker has given the
requests to other workers. So when the link sends the ``REGISTER`` of a new lease, it drops the
posted messages. It drops further messages until the worker has handled the answer ``REGISTERED``
and has called ``registered``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from ..protocol.errors import TokenbusError
from ..protocol.frames import Frames
from ..protocol.header import Header, decode_header
from ..protocol.ids import boot_of
from ..protocol.keys import OwnKey
from ..protocol.worker_messages import Heartbeat, Register, Registered
from ..transport.carrier import carrier
from .lease import Lease, RefusedError

log = logging.getLogger(__name__)

LINGER_MS = 1000
"""Maximum time for which a leaving worker continues to send posted messages, in milliseconds."""


class FromBus(NamedTuple):
    """A message that a broker has sent to this worker: its type, header, body and attachments."""

    type: bytes
    header: Header
    body: bytes
    attachments: list[bytes]
    link: int = 0
    """The link from which the message came: the number of the broker in the worker's list."""


class Worker(Protocol):
    """The functions that links call on their threads. ``registration`` is also called on the
    worker's own thread."""

    def registration(self, link: int) -> Register:
        """The registration that is sent to the broker of this link."""

    def beat(self, link: int, now: float) -> Heartbeat:
        """The heartbeat that is sent to the broker of this link."""

    def take_in(self, messages: list[FromBus]) -> None:
        """Called with messages that have arrived."""

    def lease_ended(self, link: int) -> None:
        """Called when the lease at a broker has ended. The worker must ignore messages that have
        already arrived for requests of this lease."""

    def link_ended(self, reason: str) -> None:
        """Called when the thread of a link has ended. ``reason`` is empty if the link was
        closed."""


class Link:
    """A worker's link to the broker at ``endpoint``. ``number``: the index of this broker in the
    worker's list. Raises AddressError if the address is not valid."""

    def __init__(self, number: int, endpoint: str, worker: Worker, key: OwnKey | None) -> None:
        self.number = number
        self._outbox: deque[Frames] = deque()
        self._gate = threading.Lock()
        self._muted = False
        """Whether posted messages are dropped. Only the thread that holds ``_gate`` changes this
        flag."""
        self._handled = 0
        """``Registered.worker`` of the last answer that the worker has handled. The broker assigns
        a new number to each lease."""

        def registration() -> Register:
            return worker.registration(number)

        def beat(now: float) -> Heartbeat:
            return worker.beat(number, now)

        self.lease = Lease(registration, beat, time.monotonic())
        peer = _WorkerPeer(number, endpoint, self.lease, self._outbox, worker, self._mute)
        name = f"bus-{number}" if number else "bus"
        self._carrier = carrier(endpoint, peer, name, LINGER_MS, packed=True, key=key)

    def start(self) -> None:
        """Connects and registers."""
        self._carrier.start()

    def assigned(self, worker: int) -> bool:
        """Whether the broker at this link assigned this id to a worker."""
        return boot_of(worker) == boot_of(self.lease.worker)

    def post(self, frames: Frames, wake: bool) -> None:
        """Sends a message, or drops it if the lease for which it was made has ended."""
        with self._gate:
            if self._muted:
                return
            self._outbox.append(frames)
        if wake:
            self._carrier.send(self._outbox)

    def kept(self, answer: Registered) -> frozenset[int] | None:
        """The requests that continue after this ``REGISTERED``. The result is None if
        ``REGISTERED`` confirms only an update of the registration; all requests then continue."""
        return None if answer.worker == self._handled else self.lease.kept(answer)

    def registered(self, answer: Registered) -> None:
        """Called when the worker has handled this ``REGISTERED``."""
        self._handled = answer.worker
        with self._gate:
            if self.lease.registered and self.lease.worker == answer.worker:
                self._muted = False

    def flush(self) -> None:
        """Sends the messages that were posted without ``wake``."""
        if self._outbox:
            self._carrier.send(self._outbox)

    def post_own(self, messages: list[Frames]) -> None:
        """Sends messages of the lease, after the posted messages."""
        self._outbox.extend(messages)
        self._carrier.send(self._outbox)

    def close(self) -> None:
        """Sends the posted messages, and ends the thread."""
        self._carrier.close()

    def _mute(self) -> None:
        """Begins to drop posted messages, because a new lease begins. Called on the connection's
        thread, before the lease sends ``REGISTER``."""
        with self._gate:
            self._muted = True
            self._outbox.clear()


class _WorkerPeer:
    """The ``Peer`` of a link's connection. It sends the messages of the lease and the posted
    messages, and passes received messages to the lease and to the worker."""

    def __init__(
        self,
        number: int,
        address: str,
        lease: Lease,
        outbox: deque[Frames],
        worker: Worker,
        mute: Callable[[], None],
    ) -> None:
        self._number = number
        self._address = address
        self._lease = lease
        self._outbox = outbox
        self._worker = worker
        self._answers: deque[Frames] = deque()
        """The messages of the lease. They are sent before the messages of the worker."""
        self._mute = mute
        self._refusal = ""
        """The broker's last reason to refuse this worker; empty after it has registered."""
        self.ended = worker.link_ended

    def connected(self, now: float) -> None:
        """Registers. Drops the received messages and the posted messages of the earlier lease."""
        self._mute()
        self._worker.lease_ended(self._number)
        self._answers.clear()
        self._answers.extend(self._lease.connected(now))

    def disconnected(self, now: float) -> None:
        """Does nothing, because the next registration replaces the current one."""

    def refused(self, error: TokenbusError) -> None:
        """Logs the refusal; the connection tries again."""
        log.warning("%s; trying again", error.message)

    def receive(self, messages: list[Frames], now: float) -> None:
        """Passes each message to the lease. If a message concerns more than the lease, also passes
        it to the worker."""
        taken: list[FromBus] = []
        for frames in messages:
            try:
                if len(frames) < 3:
                    log.warning(
                        "dropped a message of %d frames from the broker; it must have at least 3",
                        len(frames),
                    )
                    continue
                was_registered = self._lease.registered
                if frames[0] == b"REREGISTER":
                    self._mute()
                consumed, answers = self._lease.on_frames(frames, now)
                if self._lease.registered and not was_registered:
                    log.info("registered with the broker at %s", self._address)
                    self._refusal = ""
                self._answers.extend(answers)
                if frames[0] == b"REREGISTER":
                    # Earlier messages belong to the lease that has ended.
                    self._hand_on(taken)
                    taken = []
                    self._worker.lease_ended(self._number)
                if not consumed:
                    header = decode_header(frames[1])
                    taken.append(FromBus(frames[0], header, frames[2], frames[3:], self._number))
            except RefusedError as error:
                # The worker tries to register about once a second; each reason is logged once.
                if str(error) != self._refusal:
                    self._refusal = str(error)
                    log.error("the broker at %s refuses this worker: %s", self._address, error)
            except TokenbusError as error:
                log.warning("dropped an invalid message from the broker: %s", error)
        self._hand_on(taken)

    def _hand_on(self, messages: list[FromBus]) -> None:
        if messages:
            self._worker.take_in(messages)

    def outgoing(self, now: float) -> Iterator[Frames]:
        """The lease's messages, the worker's posted messages, and the heartbeat when it is due."""
        for queue in (self._answers, self._outbox):
            while queue:
                yield queue.popleft()
        yield from self._lease.on_time(now)

    def wait_s(self, now: float) -> float:
        """Seconds until the next heartbeat."""
        return self._lease.wait_s(now)

    def lost(self, now: float) -> bool:
        """Whether the broker was silent for too long. If so, the messages that were posted for this
        broker are discarded."""
        lost = self._lease.lost(now)
        if lost:
            log.warning("the broker at %s is silent; connecting again", self._address)
            self._outbox.clear()
        return lost
