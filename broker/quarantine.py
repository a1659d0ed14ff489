"""Finds a request that kills its workers. A suspected request runs *on trial*. Only a few requests
are on trial at a time, so that they kill few workers."""

from __future__ import annotations

from collections.abc import Iterable

from ..protocol.errors import RequestError
from .request import Request

SUSPECT_DEATHS = 2
"""A request is a suspect if this number of consecutive workers died before they sent a new token
of the request."""
TRIAL_S = 10.0
"""If the worker is still alive this number of seconds after the start of a trial, the suspect is
cleared."""


class Quarantine:
    """Counts, for each request, the workers in a row that died before they sent a new token of it.

    After two such deaths, which may be a coincidence, the request is a suspect. A suspect that runs
    at another worker is on trial. The number of suspects on trial is limited. If a worker dies
    before it sent a new token of some suspects, the limit becomes half the number of these
    suspects, but at least one. Requests that become suspects with this death are included. The
    death of a worker without such suspects does not change the limit. If the limit was one already,
    the suspect that was on trial at this worker is guilty.
    """

    def __init__(self) -> None:
        self._tried: dict[int, tuple[Request, float]] = {}
        """Suspects that run at a worker, with the start times of their trials, in seconds."""
        self._counted: dict[str, tuple[list[Request], float]] = {}
        """For each lost worker, by name: the requests for which the loss was counted, and the time
        of the loss in seconds."""
        self._max_tried = 1
        """Maximum number of suspects on trial at a time."""

    def on_loss(
        self, worker: str, idle: list[Request], others: Iterable[Request], died: bool, now: float
    ) -> list[Request]:
        """Handles the loss of a worker. Returns a list with the guilty request, or an empty list.

        ``idle``: the streams that got no new token from the worker. ``others``: the worker's other
        streams. ``died``: as in ``Loss``.
        """
        for request in others:
            self._clear(request)
        tried = [request for request in idle if self._tried.pop(request.id, None) is not None]
        if not died:
            return []
        for request in idle:
            request.deaths += 1
        if idle:
            self._counted[worker] = idle, now
        guilty = tried if len(tried) == 1 and self._max_tried == 1 else []
        suspects = sum(request.deaths >= SUSPECT_DEATHS for request in idle)
        if suspects:
            self._max_tried = max(1, suspects // 2)
        return guilty

    def lives(self, worker: str) -> None:
        """Handles the return of a worker whose connection had closed, or that was silent. The
        worker's process did not die, so the loss does not count."""
        requests, _ = self._counted.pop(worker, ([], 0.0))
        for request in requests:
            request.deaths = max(0, request.deaths - 1)

    def may_start(self, request: Request) -> bool:
        """Whether a request that has lost its worker may go to another worker now."""
        return request.deaths < SUSPECT_DEATHS or len(self._tried) < self._max_tried

    def on_start(self, request: Request, now: float) -> None:
        """Handles the start of a request at a worker."""
        if request.deaths >= SUSPECT_DEATHS:
            self._tried[request.id] = (request, now)

    def forget(self, request: Request) -> None:
        """Forgets a request that has ended."""
        self._tried.pop(request.id, None)

    def tick(self, now: float) -> None:
        """Clears the suspects that have a new token, or whose worker stayed alive."""
        for request, since in list(self._tried.values()):
            if now - since > TRIAL_S or _has_new(request):
                self._clear(request)
        for worker, (_, at) in list(self._counted.items()):
            if now - at > TRIAL_S:
                del self._counted[worker]

    def _clear(self, request: Request) -> None:
        self._tried.pop(request.id, None)
        request.deaths = 0


def _has_new(request: Request) -> bool:
    """Whether an entry was routed for a request since it was sent to its worker."""
    try:
        entries = request.session.log.entries([request.id])[request.id]
    except RequestError:
        return True  # An entry was routed, but cannot be read.
    return len(entries) > request.entries
