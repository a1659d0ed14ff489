"""Chooses the processes that are killed or stopped, from a seed, so that a run can be repeated."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

KINDS = (
    *("broker", "gpu", "controller", "python", "state", "tool"),
    *("gateway", "door", "guest", "zygote"),
)
"""The kinds of processes. ``python`` is a controller worker that serves Python controllers.
``door`` is the gateway that has streams; it is stopped, not killed. ``guest`` is a guest process of
a controller worker, and ``zygote`` is the parent of these processes."""
MAX_STOP_S = 8.0
"""Maximum number of seconds for which a process is stopped. It is longer than a lease, and shorter
than the silence after which the broker cancels the requests of a client."""


@dataclass(frozen=True)
class Blow:
    """A signal that kills or stops one process."""

    number: int
    kind: str
    which: int
    """A number that chooses the process: its index is this number modulo the number of processes of
    the kind."""
    stop_s: float | None
    """Seconds for which the process is stopped; None if the process is killed."""


def blows(seed: int, kinds: Sequence[str] = KINDS, only_kills: bool = False) -> Iterator[Blow]:
    """Yields the blows of a seed, without end. ``only_kills``: processes are killed but not
    stopped."""
    chance = random.Random(seed)
    number = 0
    while True:
        kind = chance.choice(kinds)
        stops = chance.random() < 0.5 or kind == "door"
        stop_s = round(chance.uniform(0.5, MAX_STOP_S), 1)
        stop = stop_s if stops and not only_kills else None
        yield Blow(number, kind, chance.randrange(12), stop)
        number += 1
