"""Finds the stream of a running program by the ``x-request-id`` of its HTTP request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from ... import AsyncStream
from ..errors import ApiError
from .turns import current_tenant, current_user


@dataclass(slots=True, eq=False)
class _Running:
    """An HTTP request and its streams that have a controller. ``id``: the ``x-request-id``."""

    id: str
    user: str = ""
    tenant: str = ""
    streams: list[AsyncStream] = field(default_factory=list)
    ended: bool = False


class OpenPrograms:
    """The streams of running requests that have a controller."""

    def __init__(self) -> None:
        self._running: dict[str, list[_Running]] = {}
        self._current: ContextVar[_Running | None] = ContextVar("running", default=None)

    @contextmanager
    def request(self, id: str) -> Iterator[None]:
        """Wraps an HTTP request with this ``x-request-id``. Until the end of the block, ``stream``
        finds the streams of the request."""
        running = _Running(id)
        token = self._current.set(running)
        try:
            yield
        finally:
            self._current.reset(token)
            running.ended = True
            same = self._running.get(id, [])
            if running in same:
                same.remove(running)
                if not same:
                    del self._running[id]

    def add(self, stream: AsyncStream) -> None:
        """Adds a stream that has a controller to the streams of the current task's request. Has no
        effect after the end of the request, whose task may continue in the background."""
        running = self._current.get()
        if running is None or running.ended:
            return
        if not running.streams:
            running.user, running.tenant = current_user.get(), _tenant()
            self._running.setdefault(running.id, []).append(running)
        running.streams.append(stream)

    def stream(self, id: str) -> AsyncStream:
        """Finds the stream of the current user's request ``id`` that has a controller. Raises
        ApiError: 404 if the request has no such stream, and 409 if it has several."""
        who = current_user.get(), _tenant()
        own = [one for one in self._running.get(id, ()) if (one.user, one.tenant) == who]
        streams = [stream for one in own for stream in one.streams]
        if not streams:
            raise ApiError(
                404,
                f"you run no program under the id {id!r} in this gateway process; the id is the "
                "x-request-id of the answer",
                code="unknown_stream",
            )
        if len(streams) > 1:
            raise ApiError(
                409,
                f"{len(streams)} streams have the id {id!r}; give each request its own "
                "x-request-id, and one prompt",
                code="conflict",
            )
        return streams[0]


def _tenant() -> str:
    key = current_tenant.get()
    return key.public if key is not None else ""
