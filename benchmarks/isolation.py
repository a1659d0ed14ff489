"""Measures how attacks affect another tenant's streams. Also measures the time to import the
client.

The attacks are those of ``tests/hostile``: hostile modules, hostile arguments, and guest processes
that an attacker controls. The *calm streams* are another tenant's streams, which run all the time
in the same workers. A *calm token* is a token of these streams. An attack is compared with the
period before it. In this period, the attacker's client uploads a harmless module, and uses it in as
many requests as the attack sends. So the comparison excludes the load that each tenant is allowed
to cause. The speed of the machine changes while the benchmark runs. So the throughput during an
attack is compared with the throughput in the periods before and after it.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import NamedTuple

from _report import arguments, report

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.hostile.attack import Attack, Expected
from tests.hostile.attacks import ATTACKS
from tests.hostile.world import HostileWorld, hostile_world
from tests.workers.controller.wasm.hostile.guests import guest

SETTLED_S = 0.2
"""Seconds after the end of an attack that still belong to the attack's period."""
MIN_PERIOD_S, MAX_PERIOD_S = 0.5, 3.0
"""Minimum and maximum planned duration of a period without an attack, in seconds."""
ALONE_S = 10.0
"""Seconds in which the attacker's client does not send requests. There is one such period before
all attacks, and one after them."""
ORDINARY = Attack("ordinary", "", Expected(), guest)
NOTES = {
    "calm_gap_ms": "ms by which an attack lengthens the longest gap between calm tokens; worst "
    "attack; at most 50",
    "calm_throughput": "calm tokens during attacks, divided by the calm tokens that ordinary "
    "requests would have allowed in this time; at least 0.97",
    "calm_throughput_vs_alone": "calm tokens/s during attacks, divided by calm tokens/s while "
    "the attacker's client does nothing",
    "nothing_else_dies": "1 if all other processes and streams survive all attacks; must be 1",
    "wrong_outcomes": "number of attacks with an unexpected outcome; must be 0",
    "hostile_step_ratio": "longest gap between calm tokens during an attack, divided by the "
    "longest gap before it; worst attack",
    "client_import_ratio": "time to import tokenbus.clients, divided by the time to import zmq "
    "and msgspec",
}


class Period(NamedTuple):
    """The calm tokens of a period."""

    seconds: float
    tokens: int
    largest_gap_s: float


class Measured(NamedTuple):
    """An attack, the period before it, and the period after it, if there is one."""

    usual: Period
    attacked: Period
    after: Period | None
    right: bool
    """Whether the ordinary requests and the attack had their expected outcomes, and
    ``HostileWorld.problems`` found nothing."""

    @property
    def gap_ms(self) -> float:
        """Milliseconds by which the longest gap in the attack's period exceeds the longest gap in
        the period before it; at least 0."""
        return max(0.0, self.attacked.largest_gap_s - self.usual.largest_gap_s) * 1000

    @property
    def expected(self) -> float:
        """The calm tokens that the attack's period would have at the rate of the periods before and
        after it."""
        return self.attacked.seconds * rate(list(filter(None, (self.usual, self.after))))


def throughput(measured: list[Measured]) -> float:
    """Calm tokens during the attacks, divided by the expected number."""
    return sum(each.attacked.tokens for each in measured) / sum(each.expected for each in measured)


def rate(periods: list[Period]) -> float:
    """Calm tokens per second in all ``periods`` together."""
    return sum(each.tokens for each in periods) / sum(each.seconds for each in periods)


def period(world: HostileWorld, begin_s: float, end_s: float) -> Period:
    """Counts the calm tokens between two times. A gap counts if a part of it is between these
    times."""
    arrivals = world.calm.arrivals
    gaps = [later - each for each, later in pairwise(arrivals) if later > begin_s and each < end_s]
    tokens = sum(begin_s < each <= end_s for each in arrivals)
    return Period(end_s - begin_s, tokens, max(gaps, default=end_s - begin_s))


def measure(world: HostileWorld, attack: Attack, wait_s: float) -> Measured:
    """Sends ordinary requests, and then runs the attack. ``wait_s`` is the expected duration of the
    attack in seconds; the period before the attack has about the same duration."""
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
    return Measured(period(world, begin_s, middle_s), period(world, middle_s, end_s), None, right)


def new_module() -> bytes:
    """A harmless module that has not been compiled before, because it has a random custom
    section."""
    section = b"\0" + random.randbytes(8)
    return guest() + bytes([0, len(section)]) + section


def alone(world: HostileWorld) -> Period:
    """Waits for ``ALONE_S``, without requests of the attacker's client. Counts the calm tokens of
    this period."""
    begin_s = time.monotonic()
    time.sleep(ALONE_S)
    return period(world, begin_s, time.monotonic())


def attacks(world: HostileWorld, runs: int) -> dict[str, float]:
    """Runs all attacks. Returns the figures by name."""
    results: dict[str, float] = {}
    throughputs: dict[str, float] = {}
    every: list[Measured] = []
    ratios = []
    undisturbed = [alone(world)]
    for attack in ATTACKS:
        wait_s = MIN_PERIOD_S
        for _ in range(runs):
            every.append(measure(world, attack, wait_s))
            wait_s = every[-1].attacked.seconds
    every = [
        each._replace(after=following.usual if following else None)
        for each, following in zip_longest(every, every[1:])
    ]
    for number, attack in enumerate(ATTACKS):
        made = every[number * runs : (number + 1) * runs]
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
    """Seconds in which a new interpreter imports ``modules``; the minimum of ``runs`` runs."""
    code = f"import time; t = time.perf_counter(); import {modules}; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", code]
    return min(float(subprocess.check_output(command)) for _ in range(runs))


def main() -> None:
    """Runs all measurements and reports the figures."""
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
