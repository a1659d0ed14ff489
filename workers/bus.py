"""A worker's connection to the bus, on a thread of its own.

So heartbeats go out while a forward runs. The worker's own thread takes what came with ``take`` and
hands out frames with ``post``; neither ever waits for the network.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import zmq

from ..protocol.errors import TokenbusError
from ..protocol.header import Header, decode_header
from ..protocol.worker_messages import Heartbeat, Register
from .lease import Frames, Lease

log = logging.getLogger(__name__)


class FromBus(NamedTuple):
    """A message that the broker passed on: its type, header, body and attachments."""

    type: bytes
    header: Header
    body: bytes
    attachments: list[bytes]


class Bus:
    """The connection of one worker.

    ``registration`` gives what to register with (called on the bus thread); ``load`` the gauges and
    the number of requests for the heartbeat. ``first`` sees what came at once, on the bus thread,
    and returns what is for ``take``: for answers that must not wait for another thread.
    """

    def __init__(
        self,
        endpoint: str,
        registration: Callable[[], Register],
        load: Callable[[], tuple[int, dict[str, float]]],
        first: Callable[[list[FromBus]], list[FromBus]] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._load = load
        self._first = first
        self._lease = Lease(registration, self._beat, time.monotonic())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._inbox: deque[FromBus] = deque()
        self._arrived = threading.Condition()
        self._interrupted = False
        self._outbox: deque[Frames] = deque()
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        self._step_started: float | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="bus", daemon=True)

    def start(self) -> None:
        """Connects and registers."""
        self._thread.start()

    def take(self, wait_s: float) -> list[FromBus]:
        """All messages that came, waiting up to ``wait_s`` seconds for the first."""
        with self._arrived:
            if not self._inbox and not self._interrupted and wait_s > 0:
                self._arrived.wait(wait_s)
            self._interrupted = False
            taken = list(self._inbox)
            self._inbox.clear()
        return taken

    def interrupt(self) -> None:
        """Lets a waiting ``take``, or the next one, return at once."""
        with self._arrived:
            self._interrupted = True
            self._arrived.notify_all()

    def post(self, frames: Frames, wake: bool = True) -> None:
        """Hands a message over for sending, in order; without ``wake``, with what comes next.

        Waking the bus thread costs this one its turn, so that messages which belong together are
        better handed over together.
        """
        self._outbox.append(frames)
        if wake:
            self._wake()

    def flush(self) -> None:
        """Sends what was handed over without a wake."""
        if self._outbox:
            self._wake()

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Around a step, so that heartbeats tell how long it has been running."""
        self._step_started = time.monotonic()
        try:
            yield
        finally:
            self._step_started = None

    def changed(self) -> None:
        """What the worker registered with has changed."""
        for frames in self._lease.changed():
            self.post(frames)

    def drain(self, reason: str) -> None:
        """Asks for no more requests."""
        for frames in self._lease.drain(reason):
            self.post(frames)

    def close(self, reason: str) -> None:
        """Leaves the bus: sends what is still to be sent, says so, and ends the thread."""
        for frames in self._lease.leave(reason):
            self.post(frames)
        self._closing = True
        self._wake()
        self._thread.join(timeout=5)

    # --- the bus thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            socket = self._connect()
            try:
                self._serve(socket)
            except zmq.ContextTerminated:
                return
            except Exception:
                log.exception("the bus connection failed; connecting again")
            finally:
                socket.close(linger=1000 if self._closing else 0)

    def _connect(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.connect(self.endpoint)
        return socket

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        """Until the worker leaves or the broker was silent for too long."""
        lease = self._lease
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_r, zmq.POLLIN)
        self._send_all(socket, lease.connected(time.monotonic()))
        while True:
            ready = dict(poller.poll(int(lease.wait_s(time.monotonic()) * 1000) + 1))
            now = time.monotonic()
            if self._wake_r in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_r, 4096)
            if socket in ready:
                self._receive(socket, now)
            while self._outbox:
                socket.send_multipart(self._outbox.popleft(), copy=True)
            if self._closing:
                return
            self._send_all(socket, lease.on_time(now))
            if lease.lost(now):
                log.warning("no word from the broker at %s; connecting again", self.endpoint)
                return

    def _receive(self, socket: zmq.Socket[bytes], now: float) -> None:
        came: list[FromBus] = []
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                if len(frames) < 3:
                    log.warning("a message of %d frames from the broker was dropped", len(frames))
                    continue
                was_registered = self._lease.registered
                consumed, answers = self._lease.on_frames(frames, now)
                if self._lease.registered and not was_registered:
                    log.info("registered with the broker at %s", self.endpoint)
                self._send_all(socket, answers)
                if not consumed:
                    came.append(FromBus(frames[0], decode_header(frames[1]), frames[2], frames[3:]))
            except TokenbusError as error:
                log.warning("a bad message from the broker was dropped: %s", error)
        if came and self._first is not None:
            came = self._first(came)
        if came:
            with self._arrived:
                self._inbox.extend(came)
                self._arrived.notify_all()

    @staticmethod
    def _send_all(socket: zmq.Socket[bytes], messages: list[Frames]) -> None:
        for frames in messages:
            socket.send_multipart(frames)

    def _beat(self, now: float) -> Heartbeat:
        started = self._step_started
        requests, load = self._load()
        return Heartbeat(
            requests=requests,
            step_age_s=round(now - started, 3) if started is not None else None,
            load=load,
        )

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"!")
