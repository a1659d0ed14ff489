"""Orders workers to drop requests, and records when they have dropped them.

A worker may run a request that the broker is about to send to the same worker again. The worker
handles messages in their order, so the broker sends a CLAIM with ``NO_SESSION`` after the
REGISTERED that revokes the earlier attempt, and before the request. Each message about the request
that arrives before the CLAIMED belongs to the earlier attempt.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..protocol.worker_messages import Claim, Registered
from .request import Request
from .state import BrokerState
from .worker import Revocation, Worker

NO_SESSION = 0
"""The session of a CLAIM that asks for no streams, and of its CLAIMED."""


def registered(
    state: BrokerState,
    worker: Worker,
    unknown: Sequence[int] = (),
    wanted: Sequence[int] = (),
) -> Registered:
    """The answer to a worker that registers."""
    return Registered(
        worker=worker.id,
        heartbeat_s=state.settings.heartbeat_s,
        expiry_s=state.settings.expiry_s,
        unknown=list(unknown),
        wanted=list(wanted),
        registration=worker.registration,
    )


def drop(state: BrokerState, worker: Worker, requests: Sequence[int]) -> None:
    """Orders a worker to drop requests that it has reported."""
    state.out.to_worker(worker, b"REGISTERED", registered(state, worker, unknown=requests))


def revoke(state: BrokerState, worker: Worker, request: Request) -> None:
    """Orders a worker to drop the earlier attempt of a request that it is about to receive again,
    and to confirm that."""
    drop(state, worker, [request.id])
    state.out.to_worker(worker, b"CLAIM", Claim(session=NO_SESSION))
    worker.revoked.append(Revocation(request, state.now))


def overdue(state: BrokerState, worker: Worker) -> str:
    """The reason why a worker is lost, if it has not confirmed a revocation in time; otherwise
    ``""``.

    A worker confirms between two steps, so it has as long as a step may take.
    """
    if not worker.revoked:
        return ""
    waited_s = state.now - worker.revoked[0].at
    if waited_s <= state.settings.hung_step_s:
        return ""
    return f"it has not confirmed a revoked attempt for {waited_s:.0f} s"
