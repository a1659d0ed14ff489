"""Claims the sessions of clients that come from another broker. The broker sends CLAIM to each GPU
worker, and each worker reports its streams of the session.

A client can invent a session's token, and each token makes the broker send a CLAIM to each GPU
worker. So a connection has at most one active claim, and all connections together have at most
``MAX_CLAIMS``. Further claims wait, and connections take turns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import islice

from .fences import send_claim
from .state import BrokerState
from .worker import Worker

MAX_CLAIMS = 512
"""Maximum number of active claims of all connections together."""
MAX_TURN_S = 0.5
"""Seconds after which an unanswered claim stops counting as active, so that another claim can
begin."""


@dataclass(slots=True)
class _Claim:
    """The claim of one session."""

    peer: bytes
    """The connection whose HELLO caused the claim."""
    asked: set[int] = field(default_factory=set)
    """The ids of the workers that have not answered the CLAIM."""


class Claims:
    """The sessions that are being claimed, including those that wait."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._pools = state.pools
        self._by_session: dict[int, _Claim] = {}
        self._waiting: OrderedDict[bytes, dict[int, None]] = OrderedDict()
        """By connection: the sessions whose claim waits to begin. If a session's claim is already
        active, another claim of it begins afterwards. The connections are in the order of their
        turns."""
        self._turns: dict[bytes, tuple[int, float]] = {}
        """By connection, oldest first: the session of its active claim, and the time at which the
        claim began, in seconds."""

    def __contains__(self, session: int) -> bool:
        return session in self._by_session

    @property
    def sessions(self) -> Collection[int]:
        """The sessions that are being claimed."""
        return self._by_session.keys()

    def add(self, session: int, peer: bytes) -> None:
        """Adds a claim of a session. The claim waits for its turn. ``peer``: the connection of the
        session's client."""
        claim = self._by_session.setdefault(session, _Claim(peer))
        self._stop_waiting(session, claim)
        claim.peer = peer
        self._waiting.setdefault(peer, {})[session] = None

    def begin(self, now: float) -> list[int]:
        """Sends the CLAIMs that are next in turn; returns their sessions."""
        while self._turns:
            peer, (_, since) = next(iter(self._turns.items()))
            if now - since < MAX_TURN_S:
                break
            del self._turns[peer]
        begun = []
        for peer in list(islice(self._waiting, 2 * MAX_CLAIMS)):
            if len(self._turns) >= MAX_CLAIMS:
                break
            self._waiting.move_to_end(peer)
            session = next((s for s in self._waiting[peer] if not self._by_session[s].asked), None)
            if session is None or peer in self._turns:
                continue
            self._ask(session, peer, now)
            begun.append(session)
        return begun

    def _ask(self, session: int, peer: bytes, now: float) -> None:
        """Begins the claim of a session: sends CLAIM to all GPU workers."""
        claim = self._by_session[session]
        self._stop_waiting(session, claim)
        self._turns[peer] = session, now
        for worker in self._pools.of_role("gpu").values():
            self._ask_worker(worker, session, claim)

    def _ask_worker(self, worker: Worker, session: int, asked: _Claim) -> None:
        asked.asked.add(worker.id)
        send_claim(self._state, worker, worker.fences.unasked(session), session)

    def _waits(self, session: int, claim: _Claim) -> bool:
        """Whether a claim of a session waits to begin, or to begin again."""
        return session in self._waiting.get(claim.peer, {})

    def _stop_waiting(self, session: int, claim: _Claim) -> None:
        """Removes a claim from the waiting claims of its connection."""
        sessions = self._waiting.get(claim.peer)
        if sessions is None:
            return
        sessions.pop(session, None)
        if not sessions:
            del self._waiting[claim.peer]

    def on_registered(self, worker: Worker, sessions: Collection[int]) -> None:
        """Handles the registration of a GPU worker: sends it a CLAIM for each of ``sessions`` whose
        claim has begun. A claim that waits will include this worker when it begins."""
        for session, claim in self._by_session.items():
            if session in sessions and not self._waits(session, claim):
                self._ask_worker(worker, session, claim)

    def on_claimed(self, worker: Worker, session: int) -> None:
        """Records a worker's answer to the CLAIM of a session."""
        claim = self._by_session.get(session)
        if claim is not None:
            claim.asked.discard(worker.id)

    def on_lost(self, worker: Worker) -> list[int]:
        """Handles the loss of a worker; returns the sessions whose CLAIM the worker had not
        answered."""
        found = []
        for session, claim in self._by_session.items():
            if worker.id in claim.asked:
                claim.asked.remove(worker.id)
                found.append(session)
        return found

    def on_ended(self, session: int) -> None:
        """Handles the end of a session. Drops the session's claim if all its CLAIMs have been
        answered, and no fence needs another CLAIM (``fences.py``)."""
        claim = self._by_session.get(session)
        if claim is None or claim.asked:
            return
        workers = self._pools.of_role("gpu").values()
        if not any(worker.fences.unasked(session) for worker in workers):
            del self._by_session[session]
            self._stop_waiting(session, claim)

    def finish(self, session: int, *, forget: bool) -> bool:
        """Ends the turn of a session's claim if every worker has answered the claim. Then removes
        the claim, unless it waits for another turn or ``forget`` is False. Returns whether the
        claim was removed.

        ``forget``: whether all workers that may have streams of the session have registered.
        """
        claim = self._by_session.get(session)
        if claim is None or claim.asked:
            return False
        turn = self._turns.get(claim.peer)
        if turn is not None and turn[0] == session:
            del self._turns[claim.peer]
        if self._waits(session, claim) or not forget:
            return False
        del self._by_session[session]
        return True

    def answered(self) -> list[int]:
        """The sessions whose CLAIM every worker has answered."""
        return [session for session, claim in self._by_session.items() if not claim.asked]
