"""Measures the broker's costs with many workers and streams, and the throughput with several GPU
workers.

``_scale_core.py`` runs the broker's core with the journal and without sockets, for up to 10,000
workers and a million live streams of a thousand clients. Times are CPU time. The times for each
message are the minimum of several runs, because other work on the machine evicts caches:

- ``us_per_token_1m_vs_1k``: ratio of the times to route a step's tokens. A system with a million
  live streams on 1,000 workers is compared with a system with a thousand live streams on 100
  workers;
- ``us_per_submit_10kw_vs_10w``: ratio of the times to admit a request and choose its worker, with
  10,000 workers and with ten workers. Both systems have 100,000 live streams;
- ``bytes_per_stream``: memory for each of a million live streams, without the request and the
  tokens in the journal;
- ``tick_ms_max``: the longest tick of all systems.

``_scale_workers.py`` runs systems with 1, 2, 4 and 8 GPU workers on one broker, with two controller
workers. The forward is a sleep of 25 ms, and half of the streams have a constraint.
``worker_scaling_8`` is the throughput with 8 workers divided by eight times the throughput with one
worker. All processes share the machine's processors. If the machine has only two processors, the
processors limit the figure.
"""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable

from _report import arguments, report
from _scale_core import World, percentile

Figures = dict[str, float]


def figures_of(num_workers: int, per_worker: int, seconds: float, messages: int) -> Figures:
    """All figures of a system with ``num_workers`` workers and ``per_worker`` streams on each."""
    world = World(num_workers, per_worker)
    token = world.token_us(messages)
    submit, end = world.churn_us(min(messages, num_workers * per_worker // 2))
    ticks = world.ticks_ms(seconds, 500)
    return {
        "streams": world.num_streams,
        "us_per_step": token,
        "us_per_submit": submit,
        "us_per_end": end,
        "us_per_beat": world.beat_us(),
        "bytes_per_stream": world.bytes_per_stream,
        "bytes_per_worker": world.memory_of_workers,
        "tick_ms_max": max(ticks),
        "tick_ms_p50": percentile(ticks, 0.5),
    }


def alone(work: Callable[..., Figures], *args: float) -> Figures:
    """Runs ``work`` in a new process, so that only the memory of ``work`` is measured."""
    with mp.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, args)


NOTES = {
    "us_per_token_1m_vs_1k": "ratio of times of a step's tokens, 1m streams to 1k; at most 1.5",
    "us_per_submit_10kw_vs_10w": "ratio of times of a request, 10,000 workers to 10; at most 2",
    "us_per_end_10kw_vs_10w": "ratio of times of a request's end, 10,000 workers to 10",
    "bytes_per_stream": "bytes per live stream without the journal; at most 2,000",
    "tick_ms_max": "ms of the longest tick; at most 5",
    "worker_scaling_8": "ratio of tokens/s, 8 workers to 8 times 1 worker; at least 0.9",
}
CELLS = {
    "100w_1k": (100, 10),
    "10w_100k": (10, 10_000),
    "10kw_100k": (10_000, 10),
    "1kw_1m": (1_000, 1_000),
}
"""The measured systems: the number of workers, and the number of live streams on each worker."""


def core_figures(quick: bool) -> Figures:
    """The figures of the broker's core. ``quick``: a tenth of the streams."""
    cells = dict(CELLS)
    if quick:
        cells |= {"10w_100k": (10, 1_000), "10kw_100k": (10_000, 1), "1kw_1m": (1_000, 100)}
    found = {name: alone(figures_of, *cell, 8, 4_000) for name, cell in cells.items()}
    few, many = found["10w_100k"], found["10kw_100k"]
    results = {
        "us_per_token_1m_vs_1k": found["1kw_1m"]["us_per_step"] / found["100w_1k"]["us_per_step"],
        "us_per_submit_10kw_vs_10w": many["us_per_submit"] / few["us_per_submit"],
        "us_per_end_10kw_vs_10w": many["us_per_end"] / few["us_per_end"],
        "bytes_per_stream": found["1kw_1m"]["bytes_per_stream"],
        "tick_ms_max": max(cell["tick_ms_max"] for cell in found.values()),
    }
    for name, cell in found.items():
        results |= {f"{name}_{figure}": value for figure, value in cell.items()}
    return results


def main() -> None:
    """Measures and reports."""
    # Imported here because the processes of ``alone`` import this file and do not need torch.
    from _scale_workers import throughputs

    args = arguments(__doc__)
    results = core_figures(args.quick)
    rates = throughputs(steps=80 if args.quick else 400, streams=8)
    results["worker_scaling_8"] = rates[8] / (8 * rates[1])
    results |= {f"tokens_per_s_{n}": rate for n, rate in rates.items()}
    report(results, NOTES, args.json)


if __name__ == "__main__":
    main()
