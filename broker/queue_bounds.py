"""The bounds of the queues, which determine the requests that may wait for a worker."""

from __future__ import annotations

from collections.abc import Mapping

from ..protocol.errors import Code, UnavailableError
from ..protocol.pace import BOUNDS_S, Pace
from ..protocol.shares import fits_share
from .fair_queue import FairQueue
from .request import Request
from .session import KeyUse, Session
from .settings import BrokerSettings

MAX_WAITING = 0.5
"""A request is refused if its expected time in the queue exceeds this fraction of its remaining
time (``timeout_s``)."""

MAX_QUEUES = 256
"""Maximum number of models for which requests wait. Without this bound, a client could create any
number of queues, and the broker looks at all queues whenever a request ends."""


def room_for(priority: int, most: int) -> int:
    """Returns the bound that applies to requests of this priority. ``most`` is the bound of the
    queues for all requests.

    The last eighth is reserved for priorities above 0, and the eighth before it for priorities of
    at least 0. So a queue that is full for some requests still accepts more urgent requests, and
    never has to remove accepted requests.
    """
    eighths = 8 if priority > 0 else 7 if priority == 0 else 6
    return max(1, most * eighths // 8) if most else 0


class QueueBounds:
    """Refuses requests for which the queues do not have room, or which would wait for too long."""

    def __init__(
        self, settings: BrokerSettings, queues: Mapping[tuple[str, str], FairQueue]
    ) -> None:
        self._settings = settings
        self._queues = queues
        self.pace = Pace()
        """Rate at which requests leave the queues because a worker receives them."""

    def check(self, request: Request, number: int, now: float) -> None:
        """Raises an error if a new request cannot wait: ``queue_full``, or ``client_limit`` if the
        request would exceed the share of its key or of its session. ``number``: the number of
        requests of all models that wait for a worker."""
        settings, session = self._settings, request.session
        size = sum(queue.bytes for queue in self._queues.values())
        most = room_for(request.priority, settings.max_queued)
        max_bytes = room_for(request.priority, settings.max_queued_bytes)
        if number >= most or size + request.bytes > max_bytes:
            raise UnavailableError(
                Code.QUEUE_FULL,
                f"the queues have {number} requests, and {size + request.bytes} bytes with this "
                f"request; for a request of its priority, they may have {most} requests and "
                f"{max_bytes} bytes; try again later",
                retry_after_s=self.pace.retry_after_s(now),
            )
        self._check_queues(request)
        if session.key:
            use = session.use
            _check_share("key", use, request, (number, size), (most, max_bytes), now)
            # A key may use half of the room that other keys leave free. Likewise, a session may use
            # half of the room that the key's other sessions leave free.
            most = (most - number + use.queued) // 2
            max_bytes = (max_bytes - size + use.queued_bytes) // 2
            number, size = use.queued, use.queued_bytes
        _check_share("session", session, request, (number, size), (most, max_bytes), now)
        self._check_wait(request, now)

    def _check_queues(self, request: Request) -> None:
        """Raises ``queue_full`` or ``client_limit`` if requests wait for too many other models.
        Each key, each session of a key and each user of a session may have half of the queues that
        others leave free."""
        if request.queue in self._queues:
            return
        most, total = MAX_QUEUES, len(self._queues)
        found = [queue.has(request) for queue in self._queues.values()] if total < most else []
        of_key, of_session, of_user = (sum(one[i] for one in found) for i in range(3))
        owners = [of_key] if request.session.key else []
        owners += [of_session, of_user] if request.fields.by else [of_session]
        for own in owners:
            if not fits_share(own, total, most):
                raise UnavailableError(
                    Code.QUEUE_FULL if total >= MAX_QUEUES else Code.CLIENT_LIMIT,
                    f"requests wait for {len(self._queues)} of at most {MAX_QUEUES} models; a "
                    "client's requests may wait for at most half of the models that others leave "
                    "free; try again later, or use fewer models",
                    retry_after_s=request.session.pace.retry_after_s(request.arrived),
                )
            most, total = (most - total + own) // 2, own

    def _check_wait(self, request: Request, now: float) -> None:
        """Raises ``queue_full`` if a request would spend most of its ``timeout_s`` in the queue.

        Such a request would probably time out before its computation is complete.
        """
        queue = self._queues.get((request.role, request.model))
        rate = queue.pace.per_s(now) if queue is not None else None
        if queue is None or rate is None or request.deadline is None:
            return
        ahead, left_s = queue.ahead(request), request.deadline - now
        wait_s = (ahead + 1) / rate
        if wait_s > MAX_WAITING * left_s:
            raise UnavailableError(
                Code.QUEUE_FULL,
                f"about {ahead} requests precede this one, so it would wait about {wait_s:.1f} s; "
                f"it may wait {MAX_WAITING:.0%} of the {left_s:g} s that are left of its "
                "timeout_s; try again later, or with a longer timeout_s",
                retry_after_s=round(max(wait_s - MAX_WAITING * left_s, BOUNDS_S[0]), 3),
            )


def _check_share(
    whose: str,
    own: Session | KeyUse,
    request: Request,
    total: tuple[int, int],
    most: tuple[int, int],
    now: float,
) -> None:
    """Raises ``client_limit`` if this request would make its key or session exceed their share of
    the waiting requests or of the bytes of these requests."""
    if own.queued == 0 or (
        fits_share(own.queued, total[0], most[0])
        and fits_share(own.queued_bytes, total[1], most[1], request.bytes)
    ):
        return
    raise UnavailableError(
        Code.CLIENT_LIMIT,
        f"this {whose} has {own.queued} waiting requests with {own.queued_bytes} bytes; "
        f"{most[0]} requests and {most[1]} bytes may wait, and one {whose} may have at most half "
        "of what others leave free; wait until one of its requests ends",
        retry_after_s=request.session.pace.retry_after_s(now),
    )
