"""The lease of a worker at the broker, without a socket: frames and times in, frames out."""

from __future__ import annotations

from collections.abc import Callable

from ..protocol.bodies import decode_as, encode_body
from ..protocol.frames import Frames
from ..protocol.header import encode_header
from ..protocol.messages import Error
from ..protocol.worker_messages import Drain, Heartbeat, Register, Registered, Unregister

DEFAULT_HEARTBEAT_S = 1.0
DEFAULT_EXPIRY_S = 5.0


class RefusedError(Exception):
    """The broker does not accept this worker; the message has the reason."""


class Lease:
    """Registers the worker and makes its heartbeats. Registers the worker again when the connection
    is new or the broker requests it.

    ``registration`` returns the current registration. Its models and live requests may differ at
    each call. ``beat`` returns the heartbeat. Times are seconds of a monotonic clock.
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
        self._received_at = now
        self._next_beat = now
        self._drain: Drain | None = None
        self._outdated = False
        """Whether the registration has changed and the broker has not received the change.
        ``changed`` sets this flag, and clears it when it returns an update. ``connected`` also
        clears the flag."""
        self._reported: frozenset[int] = frozenset()
        """The live requests that the last REGISTER for a new lease has reported."""
        self._registrations = 0
        """Number of leases that were requested. The REGISTER for the last lease has this number,
        and so does the broker's REGISTERED."""

    def connected(self, now: float) -> list[Frames]:
        """Handles a new connection; returns the first message for the broker, REGISTER."""
        self.registered = self._outdated = False
        self._received_at = now
        self._next_beat = now + self._heartbeat_s
        self._registrations += 1
        registration = self._registration()
        registration.registration = self._registrations
        self._reported = frozenset(live.request for live in registration.live)
        return [self._frames(b"REGISTER", registration)]

    def kept(self, answer: Registered) -> frozenset[int]:
        """The requests that continue under the new lease: the requests that REGISTER reported,
        without the requests that the broker's answer lists as ``unknown``."""
        return self._reported - frozenset(answer.unknown)

    def on_frames(self, frames: Frames, now: float) -> tuple[bool, list[Frames]]:
        """Handles a message from the broker. Returns two values: whether the message concerns only
        the lease, and the messages to send in answer.

        The message must have at least three frames. A ``REGISTERED`` that answers the last REGISTER
        does not concern only the lease, because the worker must also handle it. Raises RefusedError
        if the broker refuses the worker.
        """
        self._received_at = now
        match frames[0]:
            case b"HEARTBEAT":
                return True, []
            case b"REREGISTER":
                return True, self.connected(now)
            case b"REGISTERED":
                answer: Registered = decode_as(Registered, frames[2], "msgpack")
                if answer.registration not in (0, self._registrations):
                    # The granted lease has ended, because another REGISTER was sent later.
                    return True, []
                self.registered = True
                self.worker = answer.worker
                self._heartbeat_s, self._expiry_s = answer.heartbeat_s, answer.expiry_s
                drain = [self._frames(b"DRAIN", self._drain)] if self._drain else []
                return False, [*(self.changed() if self._outdated else []), *drain]
            case b"ERROR":
                refused: Error = decode_as(Error, frames[2], "msgpack")
                raise RefusedError(refused.message)
            case _:
                return False, []

    def on_time(self, now: float) -> list[Frames]:
        """The heartbeat, if it is due."""
        if now < self._next_beat:
            return []
        self._next_beat = now + self._heartbeat_s
        return [self._frames(b"HEARTBEAT", self._beat(now))]

    def lost(self, now: float) -> bool:
        """Whether the broker was silent for longer than the lease lasts."""
        return now - self._received_at > self._expiry_s

    def wait_s(self, now: float) -> float:
        """Seconds until the next heartbeat."""
        return max(0.0, self._next_beat - now)

    def changed(self) -> list[Frames]:
        """The messages that report a changed registration. If REGISTERED has not arrived yet, the
        result is empty, because the broker accepts updates only from registered workers.
        ``on_frames`` then returns the update when REGISTERED arrives."""
        # The flag is set before ``registered`` is checked, because another thread may set
        # ``registered`` in between.
        self._outdated = True
        if not self.registered:
            return []
        self._outdated = False
        registration = self._registration()
        registration.registration, registration.update = self._registrations, True
        return [self._frames(b"REGISTER", registration)]

    def drain(self, reason: str, successor: bool | None = False) -> list[Frames]:
        """The messages that ask the broker to send no further requests. ``on_frames`` repeats them
        after each new registration. ``successor``: see ``Bus.drain``."""
        ends = successor is None
        self._drain = Drain(reason=reason, successor=bool(successor), system_ends=ends)
        return [self._frames(b"DRAIN", self._drain)]

    @property
    def draining(self) -> bool:
        """Whether the worker has stopped accepting requests."""
        return self._drain is not None

    def leave(self, reason: str) -> list[Frames]:
        """The last message, which unregisters the worker."""
        return [self._frames(b"UNREGISTER", Unregister(reason=reason))]

    @staticmethod
    def _frames(kind: bytes, body: object) -> Frames:
        return [kind, encode_header(), encode_body(body, "msgpack")]
