"""Orders workers to drop requests, and records when they have dropped them.

A worker that reports a request may run it, while the broker is about to give it to this worker
anew. The worker handles messages in their order. So the broker sends a CLAIM with ``NO_SESSION``
after the REGISTERED that revokes the earlier attempt, and before the request. Each message about
the request that arrives before the CLAIMED belongs to the earlier attempt.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..protocol.worker_messages import Claim, Registered
from .outgoing import Outgoings
from .settings import BrokerSettings
from .tables import Request, Revocation, Worker

NO_SESSION = 0
"""The session of a CLAIM that asks for no streams, and of its CLAIMED."""


def registered(
    worker: Worker,
    settings: BrokerSettings,
    unknown: Sequence[int] = (),
    wanted: Sequence[int] = (),
) -> Registered:
    """The answer to a worker that registers."""
    return Registered(
        worker=worker.id,
        heartbeat_s=settings.heartbeat_s,
        expiry_s=settings.expiry_s,
        unknown=list(unknown),
        wanted=list(wanted),
        registration=worker.registration,
    )


def drop(out: Outgoings, worker: Worker, settings: BrokerSettings, requests: Sequence[int]) -> None:
    """Orders a worker to drop requests that it has reported."""
    out.to_worker(worker, b"REGISTERED", registered(worker, settings, unknown=requests))


def revoke(
    out: Outgoings, worker: Worker, settings: BrokerSettings, request: Request, now: float
) -> None:
    """Orders a worker to drop the earlier attempt of a request that it is about to receive again,
    and to confirm that."""
    drop(out, worker, settings, [request.id])
    out.to_worker(worker, b"CLAIM", Claim(session=NO_SESSION))
    worker.revoked.append(Revocation(request, now))


def overdue(worker: Worker, settings: BrokerSettings, now: float) -> str:
    """The reason why a worker is lost, if it has not confirmed a revocation in time; otherwise
    ``""``.

    A worker confirms between two steps, so it has as long as a step may take.
    """
    if not worker.revoked or now - worker.revoked[0].at <= settings.hung_step_s:
        return ""
    return f"it has not confirmed a revoked attempt for {now - worker.revoked[0].at:.0f} s"
