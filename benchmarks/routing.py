"""Compares routing by cached prefixes with routing by load, on eight simulated workers.

The broker's core and the block managers are real (``_routing_world.py``). The forward is simulated:
it takes 12 ms for a step, and 1/16,000 s for each prompt token that is not cached. The two runs of
a workload differ only in the setting ``route_by_prefix``.

- ``shared``: 96 system prompts of 2,048 tokens; each request adds 128 tokens;
- ``turns``: conversations of six turns; each turn adds 256 tokens to the conversation so far;
- ``unique``: prompts of 1,024 tokens without common prefixes.

``prefill_saved`` and ``p90_ttft_vs_least_load`` are measured in the first two workloads, and the
worse result is reported. ``throughput_vs_least_load`` is measured in the third workload, which
overloads the workers.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from functools import partial

from _report import arguments, report
from _routing_world import RoutingWorld, Stream

Load = Callable[[RoutingWorld, list[Stream], int], None]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 50_000) for _ in range(count)]


def shared(world: RoutingWorld, streams: list[Stream], count: int) -> None:
    """Adds requests with one of 96 system prompts, 36 per second."""
    rng = random.Random(1)
    systems = [_tokens(rng, 2_048) for _ in range(96)]
    when = 0.0
    for _ in range(count):
        when += rng.expovariate(36)
        stream = Stream(rng.choice(systems) + _tokens(rng, 128), rng.randrange(32, 160))
        streams.append(stream)
        world.at(when, partial(world.submit, stream, lambda stream, tokens: None))


def turns(world: RoutingWorld, streams: list[Stream], count: int) -> None:
    """Adds conversations of six turns. Six conversations begin per second. On average, a turn
    begins 3 s after the end of the previous turn."""
    rng = random.Random(2)

    def ended(left: int, pause: random.Random, stream: Stream, tokens: list[int]) -> None:
        if left:
            begin(tokens + _tokens(pause, 256), left - 1, pause, pause.expovariate(1 / 3))

    def begin(prompt: list[int], left: int, own: random.Random, after: float) -> None:
        stream = Stream(prompt, own.randrange(64, 192))
        streams.append(stream)
        then = partial(ended, left, own)
        world.at(world.now + after, partial(world.submit, stream, then))

    when = 0.0
    for number in range(count // 6):
        when += rng.expovariate(6)
        own = random.Random(number)
        begin(_tokens(own, 1_024), 5, own, when)


def unique(world: RoutingWorld, streams: list[Stream], count: int) -> None:
    """Adds prompts without common prefixes, 500 per second."""
    rng = random.Random(3)
    for number in range(count):
        stream = Stream(_tokens(rng, 1_024), rng.randrange(32, 160))
        streams.append(stream)
        world.at(number * 0.002, partial(world.submit, stream, lambda stream, tokens: None))


class Run:
    """The results of a workload on a system."""

    def __init__(self, load: Load, count: int, route_by_prefix: bool) -> None:
        world, streams = RoutingWorld(route_by_prefix), list[Stream]()
        load(world, streams, count)
        world.run()
        ttft = sorted(stream.first_token - stream.arrived for stream in streams)
        self.p90_ttft_s = statistics.quantiles(ttft, n=10)[-1]
        self.p50_ttft_s = statistics.median(ttft)
        self.prefilled = world.prefilled
        self.prompted = sum(len(stream.prompt) for stream in streams)
        self.tokens_per_s = sum(stream.num_output for stream in streams) / world.ended_at


NOTES = {
    "prefill_saved": "ratio of computed prompt tokens, least load to prefix; at least 2",
    "p90_ttft_vs_least_load": "ratio of p90 first-token times, prefix to least load; at most 0.5",
    "throughput_vs_least_load": "tokens/s ratio, prefix to least load, unique texts; at least 0.98",
}


def main() -> None:
    """Measures and reports."""
    args = arguments(__doc__)
    count = 600 if args.quick else 3_000
    results: dict[str, float] = {}
    for load in (shared, turns, unique):
        ours, least = Run(load, count, True), Run(load, count, False)
        results |= {
            f"{load.__name__}_prefill_saved": least.prefilled / ours.prefilled,
            f"{load.__name__}_p90_ttft_vs_least_load": ours.p90_ttft_s / least.p90_ttft_s,
            f"{load.__name__}_throughput_vs_least_load": ours.tokens_per_s / least.tokens_per_s,
            f"{load.__name__}_p90_ttft_s": ours.p90_ttft_s,
            f"{load.__name__}_least_load_p90_ttft_s": least.p90_ttft_s,
            f"{load.__name__}_computed": ours.prefilled / ours.prompted,
        }
    saved = [results[f"{name}_prefill_saved"] for name in ("shared", "turns")]
    ttft = [results[f"{name}_p90_ttft_vs_least_load"] for name in ("shared", "turns")]
    headline = {
        "prefill_saved": min(saved),
        "p90_ttft_vs_least_load": max(ttft),
        "throughput_vs_least_load": results["unique_throughput_vs_least_load"],
    }
    report(headline | results, NOTES, args.json)


if __name__ == "__main__":
    main()
