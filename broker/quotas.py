"""Enforces quotas. A quota bounds a resource that a tenant (a client's key) uses in all of its
sessions together.

Usage is known only after the work is done: the broker counts tokens when it routes them, and CPU
time when a controller worker reports it. So a quota per minute works as a leaky bucket: usage
raises the tenant's level, and the level sinks at the rate of the quota. While the level is above
the quota, further requests of the tenant are refused. Running requests are finished.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from ..protocol.bodies import decode_as
from ..protocol.errors import Code, TokenbusError, UnavailableError
from ..protocol.header import decode_manifest
from ..protocol.keys import Allowed
from ..protocol.tenants import Tenant
from .request import Request
from .session import Session
from .worker import Worker

if TYPE_CHECKING:
    from .state import BrokerState

TOKEN_BYTES = 4
"""Bytes of a token id in a TOKEN body in columns."""
MAX_PROCESSES = 4_096
"""Maximum number of controller workers whose last report is stored. The oldest reports are
dropped."""


class _Entry(Struct):
    """The counted fields of an entry of TOKEN."""

    token: int | None = None


class _Columns(Struct, rename={"tokens": "t", "entries": "e"}):
    """The counted fields of a body of TOKEN in columns."""

    tokens: bytes = b""
    entries: list[_Entry] = []


_Counted = list[_Entry] | _Columns


class _Used:
    """A tenant's level of usage of a resource whose quota is per minute."""

    __slots__ = ("_amount", "_at")

    def __init__(self) -> None:
        self._amount = 0.0
        self._at = 0.0

    def level(self, per_minute: int, now: float) -> float:
        """The level now: the usage, less the amount that has leaked since."""
        drained = (now - self._at) * per_minute / 60
        self._amount, self._at = max(0.0, self._amount - drained), now
        return self._amount

    def add(self, amount: float, per_minute: int, now: float) -> None:
        """Adds usage to the level."""
        self._amount = self.level(per_minute, now) + amount

    def full_s(self, per_minute: int, now: float) -> float:
        """Seconds until the tenant may use the resource again; 0 if it may now."""
        over = self.level(per_minute, now) - per_minute
        return 0.0 if over < 0 else (over + 1) * 60 / per_minute


class Quotas:
    """Checks requests of tenants with quotas, and counts their usage."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._keyring = state.keyring
        self._sessions = state.sessions
        self._tokens: dict[str, _Used] = {}
        self._sandbox: dict[str, _Used] = {}
        self._reported: dict[tuple[str, int], Mapping[str, int]] = {}
        """For each controller worker, by name and pid: the CPU time of each tenant in milliseconds,
        as the worker last reported it. A report is kept after the worker's lease has ended, because
        the next report of this process includes the same time."""

    def check(self, session: Session, controller: bool, now: float) -> None:
        """Raises UnavailableError if the tenant of a session may not begin another request.

        ``controller``: whether the request has a controller.
        """
        allowed = self._keyring.client(session.key)
        if allowed is None:
            return
        quota = allowed.streams
        if quota is not None:
            live = self._num_live(session.key)
            if live >= quota:
                sessions = self._sessions.of_key(session.key)
                waits = [s.pace.retry_after_s(now) for s in sessions if s.num_live]
                raise _used_up("streams", f"{live} streams are live", quota, min(waits))
        self._check_minute("tokens_per_minute", "tokens", self._tokens, session.key, allowed, now)
        if controller:
            what = "ms of CPU time of controllers"
            self._check_minute(
                "sandbox_ms_per_minute", what, self._sandbox, session.key, allowed, now
            )

    def may_adopt(self, session: Session, brokers: int) -> bool:
        """Whether a session may have another stream that a worker has reported. Each of the
        ``brokers`` counts live streams by itself, so all of them together allow this number of
        times the bound of one broker. The factor is at least 2: a worker of an earlier release does
        not report its brokers, and a bound that was lowered must not end streams after a
        restart."""
        factor = max(2, brokers)
        if session.num_live >= factor * self._state.settings.max_streams:
            return False
        allowed = self._keyring.client(session.key)
        if allowed is None or allowed.streams is None:
            return True
        return self._num_live(session.key) < factor * allowed.streams

    def _num_live(self, key: str) -> int:
        """Number of live streams of all sessions of a key."""
        return sum(session.num_live for session in self._sessions.of_key(key))

    def max_priority(self, key: str) -> int | None:
        """The highest priority that a client with this key may use. None if the broker has no keys;
        then the setting ``max_priority`` applies."""
        if not key:
            return None
        allowed = self._keyring.client(key)
        if allowed is None:
            return 0
        return allowed.max_priority or (100 if allowed.operator else 0)

    def tenant(self, key: str) -> Tenant:
        """The tenant with this key, and the tenant's quota of uploaded bytes. The broker adds both
        to requests that concern modules."""
        allowed = self._keyring.client(key)
        return Tenant(key, allowed.upload_bytes if allowed is not None else None)

    def variables(self, request: Request | None) -> Tenant | None:
        """The tenant of a request, and the tenant's quota of bytes of variables, which the state
        worker enforces. None if the request's client has no key."""
        key = request.session.key if request is not None else ""
        if not key:
            return None
        allowed = self._keyring.client(key)
        return Tenant(key, allowed.variable_bytes if allowed is not None else None)

    def _check_minute(
        self,
        name: str,
        what: str,
        table: dict[str, _Used],
        key: str,
        allowed: Allowed,
        now: float,
    ) -> None:
        quota: int | None = getattr(allowed, name)
        used = table.get(key)
        if quota is None or used is None:
            return
        wait_s = used.full_s(quota, now)
        if wait_s:
            level = math.floor(used.level(quota, now))
            raise _used_up(name, f"{level} {what} count as used", quota, wait_s)

    # --- counts ---------------------------------------------------------------------------------

    @property
    def counts_tokens(self) -> bool:
        """Whether any tenant has a quota of tokens."""
        return self._keyring.counts_tokens

    def on_tokens(self, frames: Sequence[bytes], now: float) -> None:
        """Counts the tokens of a worker's TOKEN for tenants with a quota of tokens."""
        try:
            sessions = decode_manifest(frames[1]).sessions
        except (TokenbusError, IndexError):
            return
        for number, body in zip(sessions, frames[2:], strict=False):
            session = self._sessions.by_id.get(number)
            allowed = self._keyring.client(session.key) if session is not None else None
            if session is None or allowed is None or allowed.tokens_per_minute is None:
                continue
            used = self._tokens.setdefault(session.key, _Used())
            used.add(_tokens_in(body), allowed.tokens_per_minute, now)

    def on_sandbox(self, worker: Worker, cpu_ms: Mapping[str, int], now: float) -> None:
        """Handles a controller worker's report: by key, the CPU time of controllers since the
        worker started, in milliseconds."""
        process = worker.name, worker.pid
        before = self._reported.pop(process, {})
        self._reported[process] = cpu_ms
        if len(self._reported) > MAX_PROCESSES:
            del self._reported[next(iter(self._reported))]
        for key, total in cpu_ms.items():
            allowed = self._keyring.client(key)
            if allowed is not None and allowed.sandbox_ms_per_minute is not None:
                used = self._sandbox.setdefault(key, _Used())
                used.add(max(0, total - before.get(key, 0)), allowed.sandbox_ms_per_minute, now)


def _used_up(name: str, state: str, quota: int, retry_after_s: float) -> UnavailableError:
    return UnavailableError(
        Code.CLIENT_LIMIT,
        f"the quota {name} of this key is used up: {state}; the quota is {quota}; try again later",
        retry_after_s=round(max(retry_after_s, 0.1), 3),
    )


def _tokens_in(body: bytes) -> int:
    """The number of tokens in a body of TOKEN; 0 if the body is malformed. The broker routes bodies
    without checking them."""
    try:
        counted: _Counted = decode_as(_Counted, body)
    except TokenbusError:
        return 0
    columns = 0
    entries = counted
    if isinstance(counted, _Columns):
        columns, entries = len(counted.tokens) // TOKEN_BYTES, counted.entries
    assert isinstance(entries, list)
    return columns + sum(entry.token is not None for entry in entries)
