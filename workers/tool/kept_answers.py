"""The answers of calls, which are kept until the request of the calls ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .threads import CallOwner

MAX_BYTES = 64 * 1024 * 1024
"""Maximum bytes of all kept answers."""
MAX_OF_REQUEST = 64
"""Maximum number of answers of a request that are kept. The broker does not ask for older answers,
because it stores the same number of answered calls (``MAX_ENDED`` in ``broker/tools.py``)."""
ANSWER_BYTES = 512
"""Bytes that count for a kept answer in addition to its body."""

RequestKey = tuple[int, int]
"""The link and the id of a request. Both are needed, because two brokers may have the same request
for a while."""
CallName = tuple[int, int]
"""The lineage and the count of a call, which identify the call within its request."""


@dataclass(slots=True)
class _Request:
    """The kept answers of a request, the oldest first."""

    owner: CallOwner
    bodies: dict[CallName, bytes] = field(default_factory=dict)


class KeptAnswers:
    """The kept answers of all requests.

    If they exceed ``MAX_BYTES``, the answers of one request are dropped. This is the oldest request
    of the client with the most bytes, and of the user with the most bytes of this client. So a
    client with many large answers does not drop the answers of other clients.
    """

    def __init__(self) -> None:
        self._requests: dict[RequestKey, _Request] = {}
        """The requests that have kept answers, the oldest first."""
        self._of_client: Counter[str] = Counter()
        """Bytes of the answers of each client."""
        self._of_owner: Counter[CallOwner] = Counter()
        """Bytes of the answers of each client's users."""

    @property
    def requests(self) -> list[RequestKey]:
        """The requests that have kept answers."""
        return list(self._requests)

    def get(self, request: RequestKey, name: CallName) -> bytes | None:
        """The answer of a call; None if it is not kept."""
        kept = self._requests.get(request)
        return kept.bodies.get(name) if kept is not None else None

    def add(self, request: RequestKey, name: CallName, owner: CallOwner, body: bytes) -> None:
        """Keeps an answer. Drops older answers if a bound is then exceeded."""
        kept = self._requests.get(request)
        if kept is None:
            kept = self._requests[request] = _Request(owner)
        before = kept.bodies.pop(name, None)
        if before is not None:
            self._count(kept.owner, -len(before) - ANSWER_BYTES)
        kept.bodies[name] = body
        self._count(kept.owner, len(body) + ANSWER_BYTES)
        if len(kept.bodies) > MAX_OF_REQUEST:
            oldest = kept.bodies.pop(next(iter(kept.bodies)))
            self._count(kept.owner, -len(oldest) - ANSWER_BYTES)
        while self._of_client.total() > MAX_BYTES:
            owner = max(
                self._of_owner, key=lambda one: (self._of_client[one.client], self._of_owner[one])
            )
            self.drop(next(each for each, kept in self._requests.items() if kept.owner == owner))

    def drop(self, request: RequestKey) -> None:
        """Drops the answers of a request, if any are kept."""
        kept = self._requests.pop(request, None)
        if kept is None:
            return
        size = sum(map(len, kept.bodies.values())) + ANSWER_BYTES * len(kept.bodies)
        self._count(kept.owner, -size)

    def _count(self, owner: CallOwner, size: int) -> None:
        self._of_client[owner.client] += size
        if not self._of_client[owner.client]:
            del self._of_client[owner.client]
        self._of_owner[owner] += size
        if not self._of_owner[owner]:
            del self._of_owner[owner]
