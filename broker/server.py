"""The broker's process: two ROUTER sockets around the core, on one event loop.

At each wake-up, the loop takes the messages of both sockets in batches, without an await for each
message, and passes the core's answers to the outboxes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import zmq

from ..protocol.health_file import READY, HealthFile
from ..protocol.ids import new_boot
from ..protocol.keys import KeyFolder, OwnKey
from .connections import Connections
from .core import Broker
from .key_watch import KeyWatch
from .outbox import Outbox, Sent
from .outgoing import Outgoing, Side
from .settings import BrokerSettings
from .sockets import (
    bind_router,
    delete_file,
    listen_again,
    packing_sender,
    readable,
    receive,
    receive_keyed,
    sender,
)
from .unfinished import LOOK_EVERY_S, Unfinished
from .unread import PIPE_MESSAGES
from .zap import Zap

log = logging.getLogger(__name__)

BURST = 256
"""Maximum number of messages that are taken from one socket before the other socket is served."""
PASS = 64
"""Maximum number of messages that are received and routed before the answers are sent. A batch of
answers wakes ZeroMQ's thread only once."""
MUST_FACTOR = 2
"""Errors and answers for a client that does not read are dropped when this number times
``max_pending_bytes`` bytes wait for the client."""
FLUSH_EVERY_S = 0.0003
"""Seconds between two attempts to send to full pipes while messages flow."""
QUIET_S, MAX_QUIET_S = 0.1, 1.0
"""A leaving broker closes when no client has sent a message for ``QUIET_S`` seconds, and after
``MAX_QUIET_S`` seconds at the latest."""
READ_REST_S = 0.5
"""Maximum seconds for which a leaving broker reads messages that have already arrived."""
SIGNALLED_S = 0.25
"""Seconds that a leaving broker waits after its own signal. If all processes are restarted
together, the workers receive their signals within this time, and then drain."""
DEADLINES_EVERY_S = 0.005
"""Minimum seconds between two checks of deadlines by a timer. Ticks check deadlines in addition."""
RETRY_S = (0.001, 0.05)
"""Shortest and longest pause before another attempt to send to a full pipe, in seconds."""


CLOSED_S = 0.01
"""Seconds from the end of a connection to the end of its session or lease. ZeroMQ's thread
delivers the last messages only after it has reported the end of the connection."""

M = TypeVar("M")
Take = Callable[[float], int]
"""Takes and routes a batch of a socket's messages; returns their number."""

# Globals are used on this hot path, because looking up an enum's member takes longer.
_FRONT, _OK = Side.FRONT, Sent.OK


class BrokerServer:
    """A broker with its sockets. ``run`` serves until ``stop`` is called or a signal ends it."""

    def __init__(
        self,
        front: str,
        back: str,
        settings: BrokerSettings | None = None,
        health: HealthFile | None = None,
        keys: KeyFolder | None = None,
    ) -> None:
        """Binds both sockets; raises BindError if that fails or is not allowed.

        If a folder of keys is given, a peer may connect only with a key that this folder allows,
        and all messages are encrypted. Raises KeyFault if the folder cannot be read. ZeroMQ allows
        one authenticator for each context, so each broker has its own context.
        """
        self._health = health
        self.settings = settings or BrokerSettings()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.core = Broker(self.settings, boot=new_boot(), now=time.monotonic())
        self._keys = KeyWatch(keys) if keys is not None else None
        key = None
        if keys is not None and self._keys is not None:
            key = keys.broker()
            self.core.on_keys(*self._keys.read(), time.monotonic())
        self._zap = Zap(self._context, self.core.state.keyring if keys is not None else None)
        try:
            self._clients, self._workers = self._bind(front, back, key)
        except Exception:
            self._zap.close()
            raise
        self._front, self._back = self._clients.socket, self._workers.socket
        self.front_endpoint = self._front.getsockopt_string(zmq.LAST_ENDPOINT)
        self.back_endpoint = self._back.getsockopt_string(zmq.LAST_ENDPOINT)
        self._unfinished = Unfinished(
            self._clients, keys is not None, partial(readable, self._front)
        )
        self._take_front, self._take_back = self._takers(keys is not None)
        limit = self.settings.max_pending_bytes
        self._to_front = Outbox(sender(self._front), limit, MUST_FACTOR * limit)
        self._to_back = Outbox(packing_sender(self._back), limit)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._hurry = False
        self._leaving = False
        self._for_good = False
        self._closed = False
        self._drain_due = False
        self._flush_due = False
        self._retry_s = RETRY_S[0]
        self._flushed_at = 0.0
        self._expires_at = float("inf")
        """The time for which the timer for deadlines is set, in seconds; infinite without a
        timer."""
        self._remade = 0
        """Number of attempts so far to create the file of a socket again."""

    def _bind(self, front: str, back: str, key: OwnKey | None) -> tuple[Connections, Connections]:
        """Binds both sockets, or neither of them; raises BindError."""
        clients = bind_router(
            self._context, front, pipe_messages=PIPE_MESSAGES, key=key, role="client"
        )
        try:
            return clients, bind_router(self._context, back, key=key, role="worker")
        except Exception:
            clients.close()
            clients.socket.close(0)
            delete_file(front)
            raise

    def _takers(self, has_keys: bool) -> tuple[Take, Take]:
        """Two functions: one takes messages from the front socket, the other from the back
        socket."""
        core, clients, workers = self.core, self._clients, self._workers
        if has_keys:
            return (
                partial(self._take, clients, receive_keyed, core.on_keyed_clients),
                partial(self._take, workers, receive_keyed, core.on_keyed_workers),
            )
        return (
            partial(self._take, clients, receive, core.on_clients),
            partial(self._take, workers, receive, core.on_workers),
        )

    def reserve(self) -> None:
        """Allocates the memory for recent messages now (``recent.py``)."""
        self.core.state.recent.reserve()

    async def run(self) -> None:
        """Serves until ``stop`` or ``leave``. Then waits for requests that must end first, sends an
        error for each request that would be lost, and closes."""
        self._loop = loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        for sock in (self._front, self._back):
            loop.add_reader(sock.fileno(), self._drain)
        for side, connections in self._sides():
            connections.closed = partial(loop.call_later, CLOSED_S, self._bury, side, connections)
            loop.add_reader(connections.fd, connections.look)
            connections.look()
        loop.add_reader(self._zap.fd, self._zap.answer)
        self._zap.answer()
        log.info("clients on %s, workers on %s", self.front_endpoint, self.back_endpoint)
        self._drain()
        self._tick()
        if self.front_endpoint.startswith("tcp://"):
            self._guard()
        await self._stopping.wait()
        if self._leaving:
            signalled_at = time.monotonic() + SIGNALLED_S
            await self._finish(
                "leaving",
                self.core.leave,
                lambda: self.core.can_leave and self.core.stepped_since(signalled_at),
            )
            await self._until_quiet()
        else:
            await self._finish("draining", self.core.drain, lambda: self.core.drained)
        self._closed = True
        for _, connections in self._sides():
            loop.remove_reader(connections.fd)
        for sock in (self._front, self._back):
            loop.remove_reader(sock.fileno())
        if self._leaving:
            self._read_rest()
        self._post(self.core.left() if self._leaving else self.core.stop())
        loop.remove_reader(self._zap.fd)
        self.close()

    def close(self) -> None:
        """Closes the sockets of a broker that does not run; ``run`` calls this method at its
        end."""
        self._closed = True
        for _, connections in self._sides():
            connections.close()
        self._zap.close()
        self._front.close()
        self._back.close()
        for endpoint in (self.front_endpoint, self.back_endpoint):
            delete_file(endpoint)

    def stop(self) -> None:
        """Makes ``run`` end: within ``drain_s``, or at once if ``stop`` is called again.

        From another thread, call it through ``loop.call_soon_threadsafe``.
        """
        if self._stopping is not None:
            self._hurry = self._stopping.is_set()
            self._stopping.set()

    def leave(self) -> None:
        """Makes ``run`` end without ending the streams that workers run: the next broker at these
        addresses adopts the streams that workers report.

        ``run`` ends at once, or within ``drain_s`` if requests run that cannot be adopted. After
        ``stop_for_good``, this method is the same as ``stop``.
        """
        self._leaving = not self._for_good
        self.stop()

    def stop_for_good(self) -> None:
        """Records that no other broker will replace this broker, so that ``leave`` is the same as
        ``stop``."""
        self._for_good = True

    def run_forever(self) -> None:
        """Serves in this thread, on uvloop, until a signal. SIGINT stops the broker. SIGTERM, which
        supervisord sends before a restart, makes the broker leave. After SIGUSR1, SIGTERM stops the
        broker like SIGINT."""
        import uvloop

        async def main() -> None:
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGINT, self.stop)
            loop.add_signal_handler(signal.SIGTERM, self.leave)
            loop.add_signal_handler(signal.SIGUSR1, self.stop_for_good)
            await self.run()

        uvloop.run(main())

    async def _finish(
        self, doing: str, begin: Callable[[], list[Outgoing]], over: Callable[[], bool]
    ) -> None:
        """Sends the messages of ``begin``, and waits up to ``drain_s`` until ``over`` returns True.
        ``doing``: the first word of the log line, for example ``draining``."""
        self._post(begin())
        deadline = time.monotonic() + self.settings.drain_s
        if not over():
            log.info("%s, with %d requests", doing, len(self.core.state.requests))
        while not (over() or self._hurry or time.monotonic() > deadline):
            await asyncio.sleep(0.05)

    async def _until_quiet(self) -> None:
        """Waits until no client has sent a message for ``QUIET_S``, for up to ``MAX_QUIET_S``.

        If the broker has just waited for the end of a stream, the stream's client may send its next
        request now. This broker has to read the request, because the next broker does not get it.
        """
        until = time.monotonic() + MAX_QUIET_S
        taken = -1
        while taken != self._clients.taken and time.monotonic() < until:
            taken = self._clients.taken
            await asyncio.sleep(QUIET_S)

    # --- receiving and sending ------------------------------------------------------------------

    def _drain(self) -> None:
        """Takes and routes the messages that have arrived.

        ZeroMQ's descriptor is edge-triggered: it becomes readable only once for new messages, and a
        send can clear this signal. So this method is scheduled again as long as messages may have
        arrived since the last send.
        """
        self._drain_due = False
        if self._stopped:
            return
        try:
            more = self._take_all()
        except Exception:
            # The next tick tries again. An immediate retry could become a busy loop.
            self._on_defect("taking messages from the sockets")
            return
        self._watch_deadlines()
        if more:
            self._drain_soon()

    def _take_all(self) -> bool:
        """Takes and routes messages of both sockets; returns whether there may be more.

        The workers' socket is read first. So the tokens of a step are sent to clients in this pass,
        before the clients' socket is read.
        """
        now = time.monotonic()
        from_workers = self._take_back(now)
        from_clients = self._take_front(now)
        flush = self._flush_due and now - self._flushed_at > FLUSH_EVERY_S
        if flush:
            self._flush_all(now)
        return from_clients > 0 or from_workers == BURST or flush

    def _read_rest(self) -> None:
        """Takes and routes the messages that have arrived, for up to ``READ_REST_S``."""
        until = time.monotonic() + READ_REST_S
        while self._take_all() and time.monotonic() < until:
            pass

    def _take(
        self,
        connections: Connections,
        receive: Callable[[Connections, int], list[M]],
        route: Callable[[list[M], float], list[Outgoing]],
        now: float,
    ) -> int:
        """Takes and routes up to ``BURST`` messages of a socket; returns their number."""
        taken = 0
        while taken < BURST:
            messages = receive(connections, PASS)
            taken += len(messages)
            self._post(route(messages, now))
            if len(messages) < PASS:
                break
        return taken

    def _on_defect(self, doing: str) -> None:
        self.core.state.counters.internal_errors += 1
        log.exception("a defect of the broker occurred while %s", doing)

    def _drain_soon(self) -> None:
        if not self._drain_due and self._loop is not None:
            self._drain_due = True
            self._loop.call_soon(self._drain)

    def _post(self, messages: Sequence[Outgoing]) -> None:
        """Sends messages. If a send fails, also handles the failure, and sends the messages that
        result from it.

        A failure can cause the next one, for example when a request moves from one lost worker to
        another. Failures are queued and not handled by recursion, because thousands of workers may
        be lost at once.
        """
        to_front, to_back = self._to_front, self._to_back
        failed: deque[tuple[Sent, Outgoing]] = deque()
        self._send(messages, failed)
        while failed:
            # Failures are handled after all sends, because messages that a failure causes must not
            # overtake earlier messages.
            sent, message = failed.popleft()
            if sent is Sent.GONE:
                more = self._on_gone(message.side, message.peer, message.frames)
            else:
                more = self.core.on_full(message)
            self._send(more, failed)
        if (to_front.waiting or to_back.waiting) and not self._flush_due and self._loop:
            self._flush_due = True
            self._loop.call_later(RETRY_S[0], self._flush)

    def _send(self, messages: Sequence[Outgoing], failed: deque[tuple[Sent, Outgoing]]) -> None:
        """Passes messages to the outboxes, and adds those that cannot be sent to ``failed``."""
        to_front, to_back = self._to_front, self._to_back
        for message in messages:
            outbox = to_front if message.side is _FRONT else to_back
            sent = outbox.post(message)
            if sent is not _OK:
                failed.append((sent, message))

    def _on_gone(self, side: Side, peer: bytes, unsent: Sequence[bytes] = ()) -> Sequence[Outgoing]:
        """Handles a peer that has no connection any more; returns the messages to send after this
        loss."""
        (self._to_front if side is _FRONT else self._to_back).forget(peer)
        return self.core.on_gone(side, peer, time.monotonic(), unsent)

    def _sides(self) -> tuple[tuple[Side, Connections], ...]:
        return (Side.FRONT, self._clients), (Side.BACK, self._workers)

    def _bury(self, side: Side, connections: Connections) -> None:
        """Ends sessions or leases of closed connections, after their last messages were taken."""
        if self._stopped:
            return
        self._drain()
        try:
            for peer in connections.take_closed():
                self._post(self._on_gone(side, peer))
        except Exception:
            self._on_defect("ending the connections that have closed")
        self._drain_soon()

    # --- timers ---------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self._stopped or self._loop is None:
            return
        now = time.monotonic()
        if self._health is not None:
            self._health.touch(READY, now)
        try:
            self._check_files()
            keys = self._keys.changed(now) if self._keys is not None else None
            if keys is not None:
                self._post(self.core.on_keys(*keys, now))
            self._post(self.core.tick(now))
        except Exception:
            self._on_defect("looking at keys, leases and deadlines")
        self._loop.call_later(self.core.wait_s(time.monotonic()), self._tick)
        self._drain_soon()

    def _guard(self) -> None:
        """Checks for unfinished messages of clients."""
        if self._stopped or self._loop is None:
            return
        try:
            self._unfinished.look(time.monotonic())
        except Exception:
            self._on_defect("looking for messages without an end")
        self._loop.call_later(LOOK_EVERY_S, self._guard)
        # The check may have cleared the signal of the socket's descriptor, so messages that have
        # arrived are taken now.
        self._drain_soon()

    def _watch_deadlines(self) -> None:
        """Sets a timer for the next deadline, unless an earlier timer is set."""
        due_at = self.core.due_at
        if due_at >= self._expires_at or self._loop is None:
            return
        self._expires_at = max(due_at, time.monotonic() + DEADLINES_EVERY_S)
        wait_s = self._expires_at - time.monotonic()
        self._loop.call_later(wait_s, self._expire, self._expires_at)

    def _expire(self, at: float) -> None:
        if self._stopped:
            return
        if at == self._expires_at:
            self._expires_at = float("inf")
        try:
            self._post(self.core.expire(time.monotonic()))
        except Exception:
            self._on_defect("looking at deadlines")
        self._watch_deadlines()
        self._drain_soon()

    def _check_files(self) -> None:
        """Creates the sockets' files again if they were deleted, so that other processes can
        connect."""
        for socket, endpoint in (
            (self._front, self.front_endpoint),
            (self._back, self.back_endpoint),
        ):
            if not endpoint.startswith("ipc://") or os.path.exists(endpoint[len("ipc://") :]):
                continue
            self._remade += 1
            try:
                listen_again(socket, endpoint, self._remade)
            except OSError as error:
                if self._remade & (self._remade - 1) == 0:
                    log.error("%s was deleted and cannot be created again: %s", endpoint, error)
            else:
                log.warning("%s was deleted and has been created again", endpoint)

    def _flush(self) -> None:
        self._flush_due = False
        if self._stopped or self._loop is None:
            return
        went = 0
        try:
            went = self._flush_all(time.monotonic())
        except Exception:
            self._on_defect("sending messages that wait for full pipes")
        if (self._to_front.waiting or self._to_back.waiting) and not self._flush_due:
            self._flush_due = True
            self._retry_s = RETRY_S[0] if went else min(2 * self._retry_s, RETRY_S[1])
            self._loop.call_later(self._retry_s, self._flush)
        self._drain_soon()

    def _flush_all(self, now: float) -> int:
        """Tries to send to the pipes that were full; returns how many messages were sent."""
        self._flushed_at = now
        went = 0
        for side, outbox in ((Side.FRONT, self._to_front), (Side.BACK, self._to_back)):
            before = outbox.sent
            for peer in outbox.flush():
                self._post(self._on_gone(side, peer))
            went += outbox.sent - before
        return went

    @property
    def _stopped(self) -> bool:
        return self._loop is None or self._closed
