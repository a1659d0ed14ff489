"""The ordered loop of ``rollouts.py``. Its losses do not depend on the timing of its processes.

A program stops each sample at a position that depends only on the number of the group. When all
live samples have reached their positions and the trainer has made its step, the weights change
and the samples continue. So every run samples a given token with the same version of the weights. A
step uses the groups of one batch, in the order of their numbers. The trainer makes this step while
the workers sample the next batch.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from dataclasses import dataclass, field

from _rollouts_system import GROUPS, NEW, PATIENCE_S, PROMPTS, SAMPLES, Killer, count_samples
from _rollouts_trainer import Compared, Group, Trainer
from _served import System
from tokenbus.clients import AsyncClient
from tokenbus.clients.operator import AsyncOperator
from tokenbus.protocol.scripts import marked_script

NAME = "ordered"
PROGRAM = f"""
async def main(ctx):
    await ctx.fork({SAMPLES})
    await ctx.gen(max_tokens=int(ctx.arg))
    await ctx.receive()
    await ctx.gen()
"""


@dataclass(slots=True)
class Curve:
    """The results of one run of the ordered loop."""

    losses: list[float] = field(default_factory=list)
    """The loss of each step of the trainer."""
    kills: int = 0
    streams: int = 0
    """The sum, over all updates of the weights, of the number of streams that were running."""


class OrderedGroup:
    """A group whose samples stop at a position and wait there for new weights."""

    def __init__(self, client: AsyncClient, trainer: Trainer, number: int) -> None:
        self._prompt = trainer.prompt(PROMPTS[number % len(PROMPTS)])
        self._stream = client.generate(
            self._prompt,
            controller=NAME,
            controller_arg=str(NEW // 8 * (1 + number % 7)),
            max_tokens=NEW,
            temperature=1.0,
            seed=number,
            # Samples do not end before their last token.
            logit_bias={trainer.eos: -100.0},
        )

    async def reach(self) -> None:
        """Waits until all samples have reached their position."""
        async for entry in self._stream:
            if entry.waiting:
                samples = self._stream.sequences
                if len(samples) == SAMPLES and all(one.waiting for one in samples):
                    return
        raise RuntimeError("a group ended before its samples reached their position")

    async def finish(self) -> Group:
        """Continues the samples, and waits for their ends."""
        for _ in range(SAMPLES):
            await self._stream.send("continue")
        samples = await self._stream.wait()
        return Group(self._prompt, sorted(samples, key=lambda one: one.seq))


async def run_ordered(
    system: System, updates: int, counts: Counter[str], compared: Compared
) -> Curve:
    """Runs the loop with a new trainer. Then compares the sampler's log-probabilities of all tokens
    with the trainer's."""
    trainer, curve = Trainer(compared), Curve()
    trained: list[Group] = []
    step: asyncio.Task[float] | None = None
    async with AsyncClient(system.front, patience_s=PATIENCE_S) as client:
        operator, killer = AsyncOperator(client), Killer(system, client)
        await killer.wait()
        await client.upload_controller(marked_script(PROGRAM.encode(), "python"), NAME)
        async with killer.killing():
            for batch in range(updates + 1):
                numbers = range(GROUPS * batch, GROUPS * (batch + 1))
                groups = [OrderedGroup(client, trainer, number) for number in numbers]
                await asyncio.gather(*(group.reach() for group in groups))
                if step is not None:
                    curve.losses.append(await step)
                    done = await operator.send_weights(trainer.file(), timeout_s=PATIENCE_S)
                    curve.streams += done.streams
                finished = await asyncio.gather(*(group.finish() for group in groups))
                for group in finished:
                    count_samples(counts, group.samples)
                    trainer.verify(group)
                trained += finished
                print(f"ordered batch {batch}: {killer.kills} kills", file=sys.stderr, flush=True)
                step = asyncio.create_task(asyncio.to_thread(trainer.step, finished))
            assert step is not None
            curve.losses.append(await step)
        curve.kills = killer.kills
    for group in trained:
        trainer.compare(group)
    return curve
