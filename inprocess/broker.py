"""The broker's core on a thread, with queues instead of its two sockets."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from ..broker.core import Broker
from ..broker.outbox import Outbox, Sent
from ..broker.outgoing import Outgoing, Side
from ..broker.settings import BrokerSettings
from ..protocol.frames import Frames
from ..protocol.ids import new_boot
from ..transport import memory
from ..transport.memory import Link

MAX_WAITING = 4096
"""Maximum number of messages that wait for the broker. At this number, senders block."""
RETRY_S = 0.002
"""If the link to a peer is full, the broker tries to deliver again after this number of seconds."""


class MemoryBroker:
    """A broker in this process. ``front``: the address for clients. ``back``: the address for
    workers. Peers can connect after ``start`` and before ``close``."""

    def __init__(self, front: str, back: str, settings: BrokerSettings) -> None:
        self._core = Broker(settings, boot=new_boot(), now=time.monotonic())
        self._links: dict[bytes, Link] = {}
        self._arrived: deque[tuple[Side, Link, Frames | None]] = deque()
        """Messages for the broker. An item with None in place of a message means that its link was
        closed."""
        self._changed = threading.Condition()
        self._closing = False
        limit = settings.max_pending_bytes
        self._outboxes = {
            Side.FRONT: Outbox(self._send, limit, 2 * limit),
            Side.BACK: Outbox(self._send, limit),
        }
        self._addresses = (front, back)
        self._listeners = (_Side(Side.FRONT, self._put), _Side(Side.BACK, self._put))
        self._thread = threading.Thread(target=self._run, name="broker", daemon=True)

    def start(self) -> None:
        """Begins to listen; raises ValueError if another broker has one of the addresses."""
        for address, listener in zip(self._addresses, self._listeners, strict=True):
            memory.listen(address, listener)
        self._thread.start()

    def close(self) -> None:
        """Ends all streams with ``shutting_down``, and closes every link."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        for address in self._addresses:
            memory.unlisten(address)
        for link in list(self._links.values()):
            link.cut()

    def _put(self, side: Side, link: Link, frames: Frames | None) -> None:
        """Queues a message for the broker, or the end of a link (None). Called on the sender's
        thread."""
        with self._changed:
            if threading.current_thread() is not self._thread:
                self._changed.wait_for(lambda: len(self._arrived) < MAX_WAITING or self._closing)
            self._arrived.append((side, link, frames))
            self._changed.notify_all()

    # --- the broker's thread --------------------------------------------------------------------

    def _run(self) -> None:
        next_tick = 0.0
        while not self._closing:
            arrived = self._take(next_tick)
            now = time.monotonic()
            for side, link, frames in arrived:
                self._route(side, link, frames, now)
            for side, outbox in self._outboxes.items():
                for peer in outbox.flush():
                    self._gone(side, peer)
            if now >= next_tick:
                self._post(self._core.tick(now))
                next_tick = now + self._core.wait_s(now)
        self._post(self._core.stop())

    def _take(self, next_tick: float) -> list[tuple[Side, Link, Frames | None]]:
        with self._changed:
            if not self._arrived and not self._closing:
                full = any(outbox.waiting for outbox in self._outboxes.values())
                wait_s = RETRY_S if full else max(0.0, next_tick - time.monotonic())
                self._changed.wait(wait_s)
            arrived = list(self._arrived)
            self._arrived.clear()
            self._changed.notify_all()
        return arrived

    def _route(self, side: Side, link: Link, frames: Frames | None, now: float) -> None:
        if frames is None:
            self._gone(side, link.peer)
            return
        self._links[link.peer] = link
        copied = [bytes(frame) for frame in frames]
        on_frames = self._core.on_client if side is Side.FRONT else self._core.on_worker
        self._post(on_frames(link.peer, copied, now))

    def _post(self, messages: Sequence[Outgoing]) -> None:
        sent = [(self._outboxes[message.side].post(message), message) for message in messages]
        # Failures are handled after all messages were posted. The core may react to a failure with
        # further messages, which must not overtake the posted messages.
        for result, message in sent:
            if result is Sent.GONE:
                self._gone(message.side, message.peer, message.frames)
            elif result is Sent.FULL:
                self._post(self._core.on_full(message))

    def _gone(self, side: Side, peer: bytes, unsent: Sequence[bytes] = ()) -> None:
        self._links.pop(peer, None)
        self._outboxes[side].forget(peer)
        self._post(self._core.on_gone(side, peer, time.monotonic(), unsent))

    def _send(self, peer: bytes, frames: Sequence[bytes]) -> Sent:
        link = self._links.get(peer)
        if link is None or link.broken:
            return Sent.GONE
        return Sent.OK if link.deliver(list(frames)) else Sent.FULL


class _Side:
    """The listener at one of the two addresses."""

    def __init__(self, side: Side, put: Callable[[Side, Link, Frames | None], None]) -> None:
        self._side = side
        self._put = put

    def arrived(self, link: Link, frames: Frames) -> None:
        """Handles a message for the broker; blocks while too many messages wait."""
        self._put(self._side, link, frames)

    def closed(self, link: Link) -> None:
        """Handles a link that its owner has closed."""
        self._put(self._side, link, None)
