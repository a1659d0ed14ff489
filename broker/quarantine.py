"""Which request kills its workers: found by trials, so that it takes no other streams with it."""

from __future__ import annotations

from collections.abc import Iterable

from ..protocol.errors import RequestError
from .tables import Request

MAX_DEATHS = 2
"""A request that had no new token where so many workers in a row died is a suspect."""
TRIAL_S = 10.0
"""A suspect whose worker lives for so long, in seconds, is none."""


class Quarantine:
    """Counts the workers that died while a request had no new token there.

    One that was alone in that at ``MAX_DEATHS`` of them is guilty. Of several suspects only some
    are tried at a time, after each further death half as many, until the guilty one is alone.
    """

    def __init__(self) -> None:
        self._tried: dict[int, tuple[Request, float]] = {}
        """Suspects that are at a worker, and since when."""
        self._counted: dict[str, tuple[list[Request], float]] = {}
        """By worker: the requests that its loss was counted against, and when that was."""
        self._most = 1

    def on_loss(
        self, worker: str, idle: list[Request], others: Iterable[Request], died: bool, now: float
    ) -> list[Request]:
        """A worker is lost. ``idle``: its streams without a new token since they went there.
        Returns those that are guilty."""
        for request in others:
            self._clear(request)
        tried = [request for request in idle if self._tried.pop(request.id, None) is not None]
        if not died:
            return []
        for request in idle:
            request.deaths += 1
            request.lone_deaths = request.lone_deaths + 1 if len(idle) == 1 else 0
        if idle:
            self._counted[worker] = idle, now
        guilty = [request for request in idle if request.lone_deaths >= MAX_DEATHS]
        if len(tried) == 1 and self._most == 1:
            guilty = tried
        suspects = sum(request.deaths >= MAX_DEATHS for request in idle)
        if suspects:
            self._most = max(1, suspects // 2)
        return guilty

    def lives(self, worker: str) -> None:
        """A worker that was lost, as its connection closed, is there again: its process has not
        died."""
        requests, _ = self._counted.pop(worker, ([], 0.0))
        for request in requests:
            request.deaths = max(0, request.deaths - 1)
            request.lone_deaths = max(0, request.lone_deaths - 1)

    def may_start(self, request: Request) -> bool:
        """Whether a request that has lost its worker may go to another now."""
        return request.deaths < MAX_DEATHS or len(self._tried) < self._most

    def on_start(self, request: Request, now: float) -> None:
        """A request goes to a worker."""
        if request.deaths >= MAX_DEATHS:
            self._tried[request.id] = (request, now)

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._tried.pop(request.id, None)

    def tick(self, now: float) -> None:
        """Clears the suspects that have a new token, or whose worker has not died of them."""
        for request, since in list(self._tried.values()):
            if now - since > TRIAL_S or _has_new(request):
                self._clear(request)
        for worker, (_, at) in list(self._counted.items()):
            if now - at > TRIAL_S:
                del self._counted[worker]

    def _clear(self, request: Request) -> None:
        self._tried.pop(request.id, None)
        request.deaths = request.lone_deaths = 0


def _has_new(request: Request) -> bool:
    """Whether anything was routed for a request since it went to its worker."""
    try:
        entries = request.session.journal.entries([request.id])[request.id]
    except RequestError:
        return True  # Something was, though it cannot be read.
    return len(entries) > request.entries
