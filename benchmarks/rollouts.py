"""Trains the embedded model by GRPO with rollouts from three GPU workers. Every ten seconds, one of
the workers is killed.

A group forks one prompt into eight samples. Eight groups, with 64 rollouts, are always live. The
benchmark has two parts:

- After eight finished groups, the trainer makes a step and sends its weights over the bus while the
  other rollouts run. Restarted workers receive the weights from another worker.
- The ordered loop (``_rollouts_ordered.py``) runs twice with equal seeds. ``loss_curves_differ`` is
  the number of steps whose losses differ in any bit.

In both parts, the log-probability of each token is compared with a plain forward of the trainer.
The forward uses the version of the weights that sampled the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import time
from collections import Counter

import torch
from _report import arguments, report
from _rollouts_ordered import run_ordered
from _rollouts_system import (
    GROUPS,
    NEW,
    PATIENCE_S,
    PROMPTS,
    SAMPLES,
    Killer,
    count_samples,
    started,
)
from _rollouts_trainer import Compared, Group, Trainer
from _served import System
from tokenbus.clients import AsyncClient, TokenbusError
from tokenbus.clients.operator import AsyncOperator

ZERO = (
    "lost",
    "doubled",
    "not_exact",
    "kl_sampler_trainer",
    "differing_tokens",
    "loss_curves_differ",
)
"""The results whose target is 0."""


class Rollouts:
    """The live groups. When a group ends, it is put into ``finished``, and another group begins."""

    def __init__(self, client: AsyncClient, trainer: Trainer, counts: Counter[str]) -> None:
        self._client = client
        self._trainer = trainer
        self._counts = counts
        self._seed = 0
        self.finished: asyncio.Queue[Group] = asyncio.Queue()
        self.intervals_s: list[float] = []
        """Times between two tokens of the first sample of a group."""

    async def run(self) -> None:
        """Runs groups one after the other, until the task is cancelled."""
        while True:
            self._seed += 1
            prompt = self._trainer.prompt(PROMPTS[self._seed % len(PROMPTS)])
            group = await self.sample(prompt, self._seed)
            if group is not None:
                self.finished.put_nowait(group)

    async def newest(self) -> list[Group]:
        """The groups of the next step. If the trainer is slower than the sampler, older groups are
        not used."""
        while self.finished.qsize() > GROUPS:
            self.finished.get_nowait()
        return [await self.finished.get() for _ in range(GROUPS)]

    async def sample(self, prompt: list[int], seed: int) -> Group | None:
        """Draws the samples of a prompt. If the stream fails, counts the samples as lost, and
        returns None."""
        last = 0.0
        stream = self._client.generate(
            prompt, n=SAMPLES, max_tokens=NEW, temperature=1.0, ignore_eos=True, seed=seed
        )
        try:
            async for entry in stream:
                if entry.seq == 0:
                    now = time.perf_counter()
                    if last:
                        self.intervals_s.append(now - last)
                    last = now
        except TokenbusError as error:
            print(error, file=sys.stderr, flush=True)
            self._counts["lost"] += SAMPLES
            return None
        count_samples(self._counts, stream.sequences)
        return Group(prompt, stream.sequences)


async def computed_tokens(client: AsyncClient) -> float:
    """Number of tokens that the workers have computed, prefill and decode together."""
    status = await client.status(timeout_s=PATIENCE_S, metrics=True)
    series = [one for worker in status.workers for one in worker.metrics]
    return sum(
        one.histogram.total
        for one in series
        if one.histogram and one.name == "iteration_tokens_total"
    )


async def prefill_saved(client: AsyncClient, rollouts: Rollouts, prompt: list[int]) -> float:
    """The share of the prefill that a group saves, compared with one prefill of the prompt for each
    sample."""
    before = await computed_tokens(client)
    await rollouts.sample(prompt, 0)
    wanted = before + SAMPLES * (NEW - 1) + len(prompt)
    while (after := await computed_tokens(client)) < wanted:
        await asyncio.sleep(0.2)  # The workers report with their next heartbeat.
    prefill = after - before - SAMPLES * (NEW - 1)
    return 1 - prefill / (SAMPLES * len(prompt))


async def run_live(
    system: System, updates: int, counts: Counter[str], compared: Compared
) -> dict[str, float]:
    """Runs the loop in which rollouts continue while the trainer makes its steps; returns the
    results."""
    trainer = Trainer(compared)
    rewards, pauses_ms, moved = [], [], 0
    trained: list[Group] = []
    async with AsyncClient(system.front, patience_s=PATIENCE_S) as client:
        operator, killer = AsyncOperator(client), Killer(system, client)
        rollouts = Rollouts(client, trainer, counts)
        await killer.wait()
        saved = await prefill_saved(client, rollouts, trainer.prompt("def measured(first, second"))
        rollouts.intervals_s.clear()
        began = time.monotonic()
        tasks = [asyncio.create_task(rollouts.run()) for _ in range(GROUPS)]
        async with killer.killing():
            for number in range(updates + 1):
                groups = await rollouts.newest()
                for group in groups:
                    trainer.verify(group)
                trained += groups
                rewards.append(statistics.fmean(r for group in groups for r in group.rewards))
                print(f"update {number}: reward {rewards[-1]:.3f}, {killer.kills} kills",
                      file=sys.stderr, flush=True)  # fmt: skip
                if number < updates:
                    await asyncio.to_thread(trainer.step, groups)
                    done = await operator.send_weights(trainer.file(), timeout_s=PATIENCE_S)
                    assert done.version == number + 1
                    pauses_ms.append(done.update_pause_ms)
                    moved += done.streams
        seconds = time.monotonic() - began
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    for group in trained:
        trainer.compare(group)
    step_ms = 1000 * statistics.median(rollouts.intervals_s)
    return {
        "updates": updates,
        "kills": killer.kills,
        "live_streams_per_update": moved / updates,
        "reward_first": rewards[0],
        "reward_last": rewards[-1],
        "update_pause_ms": statistics.median(pauses_ms),
        "update_pause_steps": statistics.median(pauses_ms) / step_ms,
        "step_ms": step_ms,
        "group_prefill_saved": saved,
        "seconds": seconds,
    }


def measure(updates: int) -> dict[str, float]:
    """Runs the loop with live rollouts once and the ordered loop twice; returns the results."""
    counts, compared = Counter(lost=0, doubled=0, not_exact=0), Compared()
    with started() as system:
        live = asyncio.run(run_live(system, updates, counts, compared))
    curves = []
    for _ in range(2):
        with started() as system:
            curves.append(asyncio.run(run_ordered(system, updates, counts, compared)))
    pairs = list(zip(*(curve.losses for curve in curves), strict=True))
    return {
        **counts,
        "kl_sampler_trainer": compared.kl / compared.tokens,
        "differing_tokens": compared.differing,
        "compared_tokens": compared.tokens,
        "loss_curves_differ": sum(first != second for first, second in pairs),
        "losses_of_a_curve": len(pairs),
        "kills_first_curve": curves[0].kills,
        "kills_second_curve": curves[1].kills,
        "live_streams_per_ordered_update": curves[0].streams / updates,
        **live,
    }


def main() -> None:
    """Measures and reports."""
    given = arguments(__doc__, updates=8)
    torch.manual_seed(1)
    torch.set_num_threads(1)
    results = measure(2 if given.quick else given.updates)
    notes = dict.fromkeys(ZERO, "0") | {
        "reward_last": "above reward_first",
        "update_pause_steps": "p50 at most 3",
        "group_prefill_saved": "at least 0.8",
    }
    report(results, notes, given.json)
    failed = any(results[name] for name in ZERO)
    sys.exit(failed or results["reward_last"] <= results["reward_first"])


if __name__ == "__main__":
    main()
