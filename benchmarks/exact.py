"""Checks the setting ``exact``. With it, the log-probabilities of streams in batches must have the
same bits as those of each stream alone. Also compares the throughput with and without ``exact``.

The model is the embedded model. Each request of a batch of 1 to 64 requests first runs alone. Then
the batch runs on several engines, with shared prefixes, forks, drafts, chunks of several sizes, one
or two threads, and a small KV cache. Some requests continue streams that another engine has begun.
The batch also runs on two worker processes, one of which is killed. At the end, the tokens of all
its streams are scored together. The tokens of all runs of a batch count towards
``compared_tokens``.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from _exact_kills import KilledWorkers
from _report import arguments, report
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.engine import Continued, Engine, EngineConfig
from tokenbus.workers.gpu.model.cpu_native.functions import exact_functions
from tokenbus.workers.gpu.model.loader import LoadedModel, load_model
from tokenbus.workers.gpu.sampling.sampler import score

ZERO = ("differing_bits", "streams_that_are_not_exact", "exact_vs_transformers")
"""Names of the results whose target is 0."""
NEW = 48
"""Number of tokens of each stream."""
SIZES = (1, 2, 8, 24, 64)
"""Numbers of requests of the batches."""
CHUNKS = (17, 100, 2048)
"""``max_num_batched_tokens`` of three engines that run the batches."""
Job = tuple[list[int], Sampling]
Streams = dict[tuple[int, int], list[tuple[int, float]]]
"""For each pair (index of the request, ``seq`` of a sequence): the sequence's tokens, each with its
log-probability."""


def engine_of(loaded: LoadedModel, exact: bool, **options: Any) -> Engine:
    """An engine with a fixed number of threads. So compared engines use the same number of
    threads."""
    given = {"kv_cache_bytes": 2**26, "fixed_threads": True, **options}
    return Engine(loaded, EngineConfig(exact="on" if exact else "off", **given))


def jobs_of(rng: random.Random, count: int, vocab: int) -> list[Job]:
    """Makes ``count`` requests. Every second prompt begins with the same 100 tokens. Each prompt
    ends with tokens that occur twice in a row, so that the engine finds drafts."""
    shared = [rng.randrange(vocab) for _ in range(100)]
    found = []
    for i in range(count):
        own = [rng.randrange(vocab) for _ in range(rng.randrange(5, 60))] * 2
        sampling = Sampling(
            max_tokens=NEW, ignore_eos=True, seed=i, n=rng.choice([1, 1, 3]),
            temperature=rng.choice([0.0, 0.8]), top_p=rng.choice([1.0, 0.9]),
        )  # fmt: skip
        found.append((shared + own if i % 2 else own, sampling))
    return found


def moves_after(number: int, sampling: Sampling) -> int:
    """The number of tokens after which a request moves to another engine; 0 if it does not move."""
    return 1 + number % (NEW - 1) if number % 3 == 0 and sampling.n == 1 else 0


def run(engine: Engine, jobs: Sequence[Job], moved: Streams | None = None) -> Streams:
    """Runs requests together. ``moved``: the streams of an earlier run of the same requests. If it
    is not None, some requests continue after the first tokens of these streams
    (``moves_after``)."""
    found: Streams = {}
    for number, (prompt, sampling) in enumerate(jobs):
        continued = None
        if moved is not None and (count := moves_after(number, sampling)):
            found[number, 0] = begun = moved[number, 0][:count]
            continued = Continued({0: [token for token, _ in begun]}, 1)
        engine.add(number, prompt, sampling, continued=continued)
    while engine.has_work:
        for output in engine.step():
            if output.token is not None:
                assert output.logprob is not None
                stream = found.setdefault((output.request, output.seq), [])
                stream.append((output.token, output.logprob))
    return found


def score_together(engine: Engine, jobs: Sequence[Job], streams: Streams) -> Streams:
    """Scores the tokens of all streams of an earlier run in one batch."""
    found: Streams = {key: [] for key in streams}
    keys = list(streams)
    for number, key in enumerate(keys):
        engine.score(number, jobs[key[0]][0], [token for token, _ in streams[key]])
    while engine.has_work:
        for output in engine.step():
            if output.token is not None:
                assert output.logprob is not None
                found[keys[output.request]].append((output.token, output.logprob))
    return found


class Comparison:
    """Compares the log-probabilities of requests in batches with those of the same requests alone.
    Counts the compared tokens of each kind of batch.

    Each run of a batch uses either one or two threads; the number is chosen at random.
    """

    def __init__(self, loaded: LoadedModel, killed: KilledWorkers) -> None:
        self._loaded = loaded
        self._killed = killed
        self._rng = random.Random(1)
        self._alone = engine_of(loaded, True, max_num_batched_tokens=64)
        self._sides = [
            engine_of(loaded, True, max_num_batched_tokens=n, speculation=n > 50) for n in CHUNKS
        ]
        self._sides.append(engine_of(loaded, True, speculation=True, kv_cache_bytes=2**22))
        self.counts: Counter[str] = Counter(differing_bits=0, compared_tokens=0)

    def compare(self, tokens: int, seconds: float) -> None:
        """Compares batches until ``tokens`` tokens are compared or ``seconds`` have passed."""
        rng, began = self._rng, time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            while self.counts["compared_tokens"] < tokens and time.monotonic() - began < seconds:
                size = rng.choice(SIZES)
                before = self.counts["compared_tokens"]
                self._compare_batch(jobs_of(rng, size, self._loaded.vocab_size), pool)
                count = self.counts["compared_tokens"] - before
                self.counts[f"tokens_in_batches_of_{size}"] += count
                print(dict(self.counts), self._killed.kills, file=sys.stderr, flush=True)

    def _compare_batch(self, jobs: list[Job], pool: ThreadPoolExecutor) -> None:
        """Runs one batch in all ways, and compares its tokens with those of each request alone."""
        rng, kills = self._rng, self._killed.kills
        # The worker processes run the batch while this process runs each request alone.
        killed = pool.submit(self._killed.run, jobs)
        wanted: Streams = {}
        torch.set_num_threads(1)
        for number, job in enumerate(jobs):
            own = run(self._alone, [job])
            wanted |= {(number, seq): stream for (_, seq), stream in own.items()}
        count = self._check(killed.result(), wanted)
        self.counts["tokens_with_a_kill"] += count * (self._killed.kills > kills)
        known = sum(moves_after(number, sampling) for number, (_, sampling) in enumerate(jobs))
        for engine in self._sides:
            threads = rng.choice([1, 2])
            torch.set_num_threads(threads)
            count = self._check(run(engine, jobs, wanted), wanted, known)
            self.counts[f"tokens_with_{threads}_threads"] += count
        scores = score_together(rng.choice(self._sides), jobs, wanted)
        self.counts["scored_tokens"] += self._check(scores, wanted)

    def _check(self, found: Streams, wanted: Streams, known: int = 0) -> int:
        """Counts the compared tokens of a run, and the tokens that differ. Returns the number of
        compared tokens. ``known`` tokens do not count, because moved streams began with them."""
        assert found.keys() == wanted.keys()
        for key, stream in wanted.items():
            self.counts["differing_bits"] += sum(
                a != b for a, b in zip(stream, found[key], strict=True)
            )
        count = sum(map(len, wanted.values())) - known
        self.counts["compared_tokens"] += count
        self.counts["fork_tokens"] += sum(len(s) for (_, seq), s in wanted.items() if seq)
        return count

    def results(self) -> dict[str, float]:
        """All counts, by name."""
        every: Any = [(engine.metrics(), engine.stats()) for engine in self._sides]
        return {
            **self.counts,
            "preemptions": sum(stats["preemptions"] for _, stats in every),
            "prefix_hit_tokens": sum(stats["prefix_hit_tokens"] for _, stats in every),
            "draft_tokens": sum(m["spec_decode_num_draft_tokens"] for m, _ in every),
            "accepted_drafts": sum(m["spec_decode_num_accepted_tokens"] for m, _ in every),
            "kills": self._killed.kills,
            "moves": self._killed.moves,
            "streams_that_are_not_exact": self._killed.not_exact,
        }


def against_transformers(loaded: LoadedModel, texts: int) -> dict[str, float]:
    """Compares the log-probabilities of streams in batches with those of transformers. The model of
    transformers computes as the engine's native code does (``exact_functions``), in one forward
    over the whole text. Returns the number of log-probabilities that differ, and the number of
    compared log-probabilities."""
    rng, differing, compared = random.Random(2), 0, 0
    jobs = jobs_of(rng, texts, loaded.vocab_size)
    found = run(engine_of(loaded, True, speculation=True, max_num_batched_tokens=100), jobs)
    for (number, _), stream in found.items():
        prompt, tokens = jobs[number][0], [token for token, _ in stream]
        with exact_functions(loaded.model):
            logits = loaded.model(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
        values, _ = score(logits[len(prompt) - 1 : -1].contiguous(), tokens).fetch()
        compared += len(values)
        differing += sum(a != b for a, (_, b) in zip(values, stream, strict=True))
    return {"exact_vs_transformers": differing, "tokens_vs_transformers": compared}


def throughput(loaded: LoadedModel, streams: int, rounds: int) -> float:
    """Tokens per second with ``exact`` on, divided by tokens per second with ``exact`` off. The two
    engines run in turn."""
    rng = random.Random(streams)
    times: tuple[list[float], list[float]] = ([], [])
    engines = [engine_of(loaded, exact) for exact in (False, True)]
    sampling = Sampling(max_tokens=NEW, ignore_eos=True)
    for _ in range(rounds + 1):
        prompts = [[rng.randrange(loaded.vocab_size) for _ in range(32)] for _ in range(streams)]
        for engine, column in zip(engines, times, strict=True):
            started = time.perf_counter()
            run(engine, [(prompt, sampling) for prompt in prompts])
            column.append(time.perf_counter() - started)
    return min(times[0][1:]) / min(times[1][1:])


def main() -> None:
    """Runs all measurements and reports the figures."""
    threads = torch.get_num_threads()
    given = arguments(__doc__, tokens=0, minutes=600)
    loaded = load_model("embedded")
    with tempfile.TemporaryDirectory() as folder:
        killed = KilledWorkers(Path(folder) / "run")
        try:
            comparison = Comparison(loaded, killed)
            tokens = given.tokens or (20_000 if given.quick else 1_000_000)
            comparison.compare(tokens, 60 * given.minutes)
        finally:
            killed.close()
    torch.set_num_threads(threads)
    results = comparison.results()
    results |= against_transformers(loaded, 20 if given.quick else 200)
    for streams in (1, 32, 64):
        ratio = throughput(loaded, streams, 2 if given.quick else 6)
        results[f"exact_throughput_{streams}"] = ratio
    notes = dict.fromkeys(ZERO, "must be 0") | {
        f"exact_throughput_{n}": "tokens/s with exact on, divided by tokens/s with exact off; "
        f"{n} streams; at least 0.95"
        for n in (1, 32, 64)
    }
    report(results, notes, given.json)


if __name__ == "__main__":
    main()
