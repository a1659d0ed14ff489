"""Measures the effect of attacks on another tenant's streams, and the time to import the client.

The attacks are those of ``tests/hostile``: hostile modules, hostile arguments, and guest processes
that an attacker controls. Another tenant's streams, the *calm streams*, run all the time in the
same workers. An attack is compared with the period before it. In this period, the attacker's client
uploads a harmless module, and sends as many requests with it as the attack sends. So the comparison
excludes the load that each tenant is allowed to cause. ``calm_gap_ms`` compares the largest times
between two calm tokens, and ``calm_throughput`` compares the numbers of calm tokens per second.
``calm_throughput_vs_alone`` compares with periods in which the attacker's client does nothing.
``client_import_ratio`` is the ratio of the client's import time to the import time of its two
required libraries.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from _report import arguments, report

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.hostile.attack import Attack, Expected
from tests.hostile.attacks import ATTACKS
from tests.hostile.world import HostileWorld, hostile_world
from tests.workers.controller.wasm.hostile.guests import guest

SETTLED_S = 0.2
"""The time after an attack, up to this number of seconds, counts as part of the attack."""
MIN_PERIOD_S, MAX_PERIOD_S = 0.5, 3.0
"""Bounds of the planned duration of a period without an attack, in seconds."""
ALONE_S = 10.0
"""Seconds without any request of the attacker's client, before and after all attacks."""
ORDINARY = Attack("ordinary", "", Expected(), guest)
NOTES = {
    "calm_gap_ms": "ms by which an attack lengthens the longest gap of calm tokens; at most 50",
    "calm_throughput": "ratio of calm tokens/s, attacks to ordinary requests; at least 0.97",
    "calm_throughput_vs_alone": "ratio of calm tokens/s, attacks to no other requests",
    "nothing_else_dies": "1 if all other processes and streams survive all attacks; must be 1",
    "wrong_outcomes": "number of attacks with an unexpected outcome; must be 0",
    "hostile_step_ratio": "ratio of the longest gaps between calm tokens, with and without attack",
    "client_import_ratio": "ratio of import times, tokenbus.clients to zmq and msgspec",
}


class Period(NamedTuple):
    """The calm tokens of a period."""

    seconds: float
    tokens: int
    largest_gap_s: float


class Measured(NamedTuple):
    """An attack, and the period before it."""

    usual: Period
    attacked: Period
    right: bool
    """Whether the ordinary requests and the attack had their expected outcomes, and
    ``HostileWorld.problems`` found nothing."""

    @property
    def gap_ms(self) -> float:
        """The longest gap with the attack minus the longest gap without it; at least 0."""
        return max(0.0, self.attacked.largest_gap_s - self.usual.largest_gap_s) * 1000


def throughput(measured: list[Measured]) -> float:
    """The ratio of calm tokens per second with and without the attacks."""
    attacked, usual = [each.attacked for each in measured], [each.usual for each in measured]
    return rate(attacked) / rate(usual)


def rate(periods: list[Period]) -> float:
    """Calm tokens per second in all ``periods`` together."""
    return sum(each.tokens for each in periods) / sum(each.seconds for each in periods)


def period(world: HostileWorld, begin_s: float, end_s: float) -> Period:
    """The calm tokens between two times. A gap counts if it overlaps the period."""
    arrivals = world.calm.arrivals
    gaps = [later - each for each, later in pairwise(arrivals) if later > begin_s and each < end_s]
    tokens = sum(begin_s < each <= end_s for each in arrivals)
    return Period(end_s - begin_s, tokens, max(gaps, default=end_s - begin_s))


def measure(world: HostileWorld, attack: Attack, wait_s: float) -> Measured:
    """Makes ordinary requests, then the attack. ``wait_s``: expected duration of the attack, in
    seconds."""
    module = None if isinstance(attack.source, str) else attack.source()
    ordinary = replace(ORDINARY, options=attack.options, requests=attack.requests)
    harmless = new_module()
    del world.calm.arrivals[:]
    world.calm.wait_for_streams()
    begin_s = time.monotonic()
    until_s = begin_s + min(MAX_PERIOD_S, max(MIN_PERIOD_S, wait_s))
    problem = ordinary.expected.problem(world.run(ordinary, harmless))
    time.sleep(max(0.0, until_s - time.monotonic()))
    middle_s = time.monotonic()
    outcome = world.run(attack, module)
    time.sleep(SETTLED_S)
    end_s = time.monotonic()
    world.calm.wait_for_streams()
    right = not problem and not attack.expected.problem(outcome) and not world.problems()
    return Measured(period(world, begin_s, middle_s), period(world, middle_s, end_s), right)


def new_module() -> bytes:
    """A harmless module that has not been compiled before: it has a random custom section."""
    section = b"\0" + random.randbytes(8)
    return guest() + bytes([0, len(section)]) + section


def alone(world: HostileWorld) -> Period:
    """The calm tokens of a period without requests of the attacker's client."""
    begin_s = time.monotonic()
    time.sleep(ALONE_S)
    return period(world, begin_s, time.monotonic())


def attacks(world: HostileWorld, runs: int) -> dict[str, float]:
    """The results of all attacks."""
    results: dict[str, float] = {}
    throughputs: dict[str, float] = {}
    every: list[Measured] = []
    ratios = []
    undisturbed = [alone(world)]
    for attack in ATTACKS:
        made = [measure(world, attack, MIN_PERIOD_S)]
        while len(made) < runs:
            made.append(measure(world, attack, made[-1].attacked.seconds))
        every += made
        results[f"calm_gap_ms {attack.name}"] = statistics.median(each.gap_ms for each in made)
        throughputs[f"calm_throughput {attack.name}"] = throughput(made)
        ratios.append(
            statistics.median(
                each.attacked.largest_gap_s / each.usual.largest_gap_s for each in made
            )
        )
    undisturbed.append(alone(world))
    return {
        "calm_gap_ms": max(results.values()),
        "calm_throughput": throughput(every),
        "calm_throughput_vs_alone": rate([each.attacked for each in every]) / rate(undisturbed),
        "nothing_else_dies": float(not world.problems()),
        "wrong_outcomes": float(sum(not each.right for each in every)),
        "hostile_step_ratio": max(ratios),
        **results,
        **throughputs,
    }


def import_s(modules: str, runs: int) -> float:
    """Seconds to import ``modules`` in a new interpreter: the minimum of ``runs`` runs."""
    code = f"import time; t = time.perf_counter(); import {modules}; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", code]
    return min(float(subprocess.check_output(command)) for _ in range(runs))


def main() -> None:
    """Measures and reports."""
    options = arguments(__doc__)
    # A thread of this process reads the calm streams. Other threads of this process can lengthen
    # the measured gaps. With a short switch interval, they lengthen the gaps less.
    sys.setswitchinterval(0.0005)
    with hostile_world(short=False) as world:
        results = attacks(world, 1 if options.quick else 3)
    results["client_import_ratio"] = import_s("tokenbus.clients", 5) / import_s("zmq, msgspec", 5)
    report(results, NOTES, options.json)


if __name__ == "__main__":
    main()
