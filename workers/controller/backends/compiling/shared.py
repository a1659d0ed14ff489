"""Compiles a grammar once if several requests need it at the same time, and caches refusals."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from .....protocol.errors import Code, RequestError, TokenbusError, UnavailableError
from ...pool import tenant_of_thread, waiting
from .bounds import RefusedGrammar
from .kept import Kept

T = TypeVar("T")

KEPT_REFUSALS = 256
"""Maximum number of refusals that are cached."""
REFUSED_S = 60.0
"""Time for which a refusal is cached, in seconds. After this time the grammar is compiled again,
because the machine may have been busy during the first compilation."""


class _Flight(Generic[T]):
    """A compilation in progress."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None


class Shared(Generic[T]):
    """Runs at most one compilation for each key and tenant at a time. The tenant's other requests
    with this key wait for the result. Tenants do not share a compilation, because a compilation may
    wait for its tenant's turn (``turns.py``). The requests of other tenants must not wait for this
    turn.

    Thread-safe. Results are not cached. A refusal is cached for ``REFUSED_S``: during this time,
    the same grammar of the same tenant is refused without compiling it again.
    """

    def __init__(self, wall_s: float) -> None:
        """``wall_s``: maximum time that a request waits for another request's compilation, in
        seconds."""
        self._wall_s = wall_s
        self._lock = threading.Lock()
        self._flights: dict[tuple[str, object], _Flight[T]] = {}
        self._refused: Kept[tuple[str, object], tuple[float, BaseException]]
        self._refused = Kept(KEPT_REFUSALS, KEPT_REFUSALS)
        """By tenant and key: the time until which the refusal is cached, and the refusal."""

    def get(self, key: object, make: Callable[[], T]) -> T:
        """The result of ``make``. If another request with the same tenant and key is already
        running its ``make``, waits for the result of that call and returns it.

        Raises the errors of ``make``. Raises UnavailableError if the other request's compilation
        takes too long.
        """
        own = tenant_of_thread(), key
        with self._lock:
            refused = self._refused.get(own)
            if refused is not None and time.monotonic() < refused[0]:
                raise _again(refused[1])
            flight = self._flights.get(own)
            mine = flight is None
            if flight is None:
                flight = self._flights[own] = _Flight()
        return self._run(own, flight, make) if mine else self._await(flight)

    def _run(self, own: tuple[str, object], flight: _Flight[T], make: Callable[[], T]) -> T:
        try:
            flight.result = make()
            return flight.result
        except BaseException as error:
            flight.error = error
            if isinstance(error, RefusedGrammar | RequestError):
                # A copy is cached, because the traceback of the error refers to the grammar and to
                # all objects of the compilation.
                self._refused.add(own[0], own, (time.monotonic() + REFUSED_S, _again(error)))
            raise
        finally:
            with self._lock:
                del self._flights[own]
            flight.done.set()

    def _await(self, flight: _Flight[T]) -> T:
        with waiting():
            done = flight.done.wait(self._wall_s)
        if not done:
            raise UnavailableError(
                Code.QUEUE_FULL,
                f"this grammar has been compiling for {self._wall_s:g} s for another request; "
                "try again",
                retry_after_s=5.0,
            )
        if flight.error is not None:
            raise _again(flight.error)
        assert flight.result is not None
        return flight.result


def _again(error: BaseException) -> BaseException:
    """A copy of an error for another thread, because the traceback of an error belongs to one
    thread."""
    match error:
        case RefusedGrammar():
            return RefusedGrammar(*error.args)
        case RequestError():
            return RequestError(error.code, error.message, path=error.path)
        case UnavailableError():
            return UnavailableError(error.code, error.message, retry_after_s=error.retry_after_s)
        case TokenbusError():
            return TokenbusError(error.code, error.message)
    return TokenbusError(Code.INTERNAL, f"compiling the grammar failed: {error!r}")
