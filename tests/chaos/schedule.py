"""Which process is killed or stopped next: drawn from a seed, so that a run can be repeated."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

KINDS = ("broker", "gpu", "controller", "python", "state", "gateway", "door")
"""The kinds of processes. ``door`` is the gateway that has streams: it is only stopped."""
MAX_STOP_S = 8.0
"""Longer than a lease; shorter than a session waits for its client."""


@dataclass(frozen=True)
class Blow:
    """A signal to one process."""

    number: int
    kind: str
    which: int
    """Which of that kind: any number, taken modulo how many there are."""
    stop_s: float | None
    """For how long it is stopped; None: it is killed."""


def blows(seed: int, kinds: Sequence[str] = KINDS, only_kills: bool = False) -> Iterator[Blow]:
    """The blows of a seed, without end. ``only_kills``: none is stopped."""
    chance = random.Random(seed)
    number = 0
    while True:
        kind = chance.choice(kinds)
        stops = chance.random() < 0.5 or kind == "door"
        stop_s = round(chance.uniform(0.5, MAX_STOP_S), 1)
        stop = stop_s if stops and not only_kills else None
        yield Blow(number, kind, chance.randrange(12), stop)
        number += 1
