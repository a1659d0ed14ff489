"""A worker's standing with the broker, without its socket: frames and times in, frames out."""

from __future__ import annotations

from collections.abc import Callable

from ..protocol.bodies import decode_as, encode_body
from ..protocol.frames import Frames
from ..protocol.header import encode_header
from ..protocol.worker_messages import Drain, Heartbeat, Register, Registered, Unregister

DEFAULT_HEARTBEAT_S = 1.0
DEFAULT_EXPIRY_S = 5.0


class Lease:
    """Registers, renews, and registers again whenever the broker asks or was silent.

    ``registration`` gives what to register with at that moment: models change, and so do the live
    requests that a new broker must hear of. ``beat`` gives the heartbeat. Times are seconds of any
    clock that does not go back.
    """

    def __init__(
        self, registration: Callable[[], Register], beat: Callable[[float], Heartbeat], now: float
    ) -> None:
        self._registration = registration
        self._beat = beat
        self.registered = False
        self.worker = 0
        self._heartbeat_s = DEFAULT_HEARTBEAT_S
        self._expiry_s = DEFAULT_EXPIRY_S
        self._heard = now
        self._next_beat = now
        self._draining: Drain | None = None

    def connected(self, now: float) -> list[Frames]:
        """A new connection is there: the first thing to say on it."""
        self.registered = False
        self._heard = now
        self._next_beat = now + self._heartbeat_s
        return [self._frames(b"REGISTER", self._registration())]

    def on_frames(self, frames: Frames, now: float) -> tuple[bool, list[Frames]]:
        """A message of the broker: whether it was for the lease alone, and what to answer.

        Only called with messages of at least three frames. A ``REGISTERED`` that names live
        requests which nobody waits for any more is for the worker too.
        """
        self._heard = now
        match frames[0]:
            case b"HEARTBEAT":
                return True, []
            case b"REREGISTER":
                return True, self.connected(now)
            case b"REGISTERED":
                answer: Registered = decode_as(Registered, frames[2], "msgpack")
                self.registered = True
                self.worker = answer.worker
                self._heartbeat_s, self._expiry_s = answer.heartbeat_s, answer.expiry_s
                drain = [self._frames(b"DRAIN", self._draining)] if self._draining else []
                return not answer.unknown, drain
            case _:
                return False, []

    def on_time(self, now: float) -> list[Frames]:
        """The heartbeat, when it is due."""
        if now < self._next_beat:
            return []
        self._next_beat = now + self._heartbeat_s
        return [self._frames(b"HEARTBEAT", self._beat(now))]

    def lost(self, now: float) -> bool:
        """Whether the broker was silent for so long that a new connection should be tried."""
        return now - self._heard > self._expiry_s

    def wait_s(self, now: float) -> float:
        """How long until ``on_time`` has something to do."""
        return max(0.0, self._next_beat - now)

    def changed(self) -> list[Frames]:
        """The registration has changed: say so."""
        return [self._frames(b"REGISTER", self._registration())]

    def drain(self, reason: str) -> list[Frames]:
        """No more requests from now on, over reconnections too."""
        self._draining = Drain(reason=reason)
        return [self._frames(b"DRAIN", self._draining)]

    def leave(self, reason: str) -> list[Frames]:
        """The last thing to say."""
        return [self._frames(b"UNREGISTER", Unregister(reason=reason))]

    @staticmethod
    def _frames(word: bytes, body: object) -> Frames:
        return [word, encode_header(), encode_body(body, "msgpack")]
