"""The connection of a client: a socket on a thread of its own.

So the session is kept alive, and tokens are taken off the network, whatever the caller does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from .calls import Call, Event
from .session import ClientSession

log = logging.getLogger(__name__)

Delivery = list[tuple[Call, list[Event]]]
RECEIVE_AT_ONCE = 256
"""Messages taken from the socket before their events are handed on."""


class AddressError(ValueError):
    """What was given as the broker's address is none."""


class Connection:
    """Carries the calls of one client to the broker at ``front``.

    ``deliver`` gets their events, on the connection's thread, and must not block. The thread starts
    with the first call. Raises AddressError where ``front`` is no ZeroMQ address.
    """

    def __init__(
        self, front: str, deliver: Callable[[Delivery], None], patience_s: float = 30.0
    ) -> None:
        self._front = front
        self._deliver = deliver
        self._patience_s = patience_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._commands: deque[Callable[[ClientSession, float], None]] = deque()
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._connect().close()

    def submit(self, call: Call) -> None:
        """Begins a call; raises RuntimeError after ``close``."""
        with self._lock:
            if self._closing:
                raise RuntimeError("this client is closed")
            self._commands.append(lambda session, now: session.submit(call, now))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tokenbus", daemon=True)
                self._thread.start()
        self._wake()

    def cancel(self, call: Call) -> None:
        """Nobody waits for this call any more. Safe in a finalizer: it takes no lock."""
        self._commands.append(lambda session, now: session.cancel(call))
        self._wake()

    def close(self) -> None:
        """Ends the session, with every call that is not over."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def __del__(self) -> None:
        # Not in close: another thread may be about to write to it.
        for end in (self._wake_r, self._wake_w):
            os.close(end)

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        session = ClientSession(self._front, self._patience_s, time.monotonic())
        ended = False
        while not ended:
            socket = self._connect()
            try:
                session.connected(time.monotonic())
                ended = self._serve(socket, session)
            except zmq.ContextTerminated:
                return
            except Exception:
                log.exception("the connection to %s failed; connecting again", self._front)
                time.sleep(0.1)
            finally:
                socket.close(linger=500 if self._closing else 0)

    def _connect(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.RECONNECT_IVL, 50)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._front)
        except zmq.ZMQError as error:
            socket.close()
            raise AddressError(
                f"front: {self._front!r} is no address of a broker ({error.strerror}); one is "
                "tcp://127.0.0.1:5555"
            ) from None
        return socket

    def _serve(self, socket: zmq.Socket[bytes], session: ClientSession) -> bool:
        """Until the client closes (True) or the broker was silent for too long."""
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_r, zmq.POLLIN)
        while True:
            more = self._receive(socket, session)
            now = time.monotonic()
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_r, 4096)
            # Looked at before the commands: what was submitted before the close is among them.
            closing = self._closing
            while self._commands:
                self._commands.popleft()(session, now)
            session.on_time(now)
            if closing:
                session.bye()
            for frames in session.outgoing:
                socket.send_multipart(frames)
            session.outgoing.clear()
            if session.ready:
                ready, session.ready = session.ready, []
                self._deliver(ready)
            if closing or session.lost(now):
                return closing
            if not more:
                poller.poll(int(session.wait_s(now) * 1000) + 1)

    @staticmethod
    def _receive(socket: zmq.Socket[bytes], session: ClientSession) -> bool:
        """Takes what is there; whether there may be more."""
        now = time.monotonic()
        for _ in range(RECEIVE_AT_ONCE):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            session.on_frames(frames, now)
        return True

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_w, b"!")
