"""A GPU worker with a simulated device: the forward is a sleep. The CPU is free during the forward,
as with a GPU.

``python benchmarks/_standin_gpu.py SECONDS FILE`` runs the normal worker with a simulated device.
The device works in order, like a CUDA stream. A forward begins when the previous forward has ended,
and takes SECONDS. This time includes the sampling of the step's tokens. If the device's queue is
not empty, the host's work does not delay the device. Steps overlap unless ``TOKENBUS_OVERLAP`` is
``off``.

At its end, the worker writes a JSON list to FILE, ``[[sequences, seconds], …]``. There is a pair
for each step: the number of sequences, and the time that the step waited for decisions after its
logits were ready.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from tokenbus.protocol.settings import load
from tokenbus.workers.gpu.engine import engine as engine_module
from tokenbus.workers.gpu.engine import step as step_module
from tokenbus.workers.gpu.engine.engine import Engine, PendingStep
from tokenbus.workers.gpu.engine.packing import Packed
from tokenbus.workers.gpu.model.device_queue import Work
from tokenbus.workers.gpu.model.runner import Runner
from tokenbus.workers.gpu.sampling.row_parameters import Rows
from tokenbus.workers.gpu.sampling.sampler import Drawn, Numbers
from tokenbus.workers.gpu.serving.steering import Steering
from tokenbus.workers.gpu.worker import GpuWorker

T = TypeVar("T")


class TimedWork(Work[T]):
    """Work that ends at a given time. The result is computed earlier, but is returned only at that
    time."""

    over_at = 0.0

    @property
    def done(self) -> bool:
        """Whether the end time has passed."""
        return time.monotonic() >= self.over_at

    def wait(self) -> None:
        """Sleeps until the end time."""
        left = self.over_at - time.monotonic()
        if left > 0:
            time.sleep(left)


class SleepingDevice:
    """A device queue in which a forward takes ``seconds``, and other work takes no time."""

    overlaps = True

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._busy_until = 0.0

    def submit(self, run: Callable[[], T]) -> Work[T]:
        """Adds work to the queue."""
        work = TimedWork(run)
        work.do()
        work.over_at = self._busy_until
        return work

    def compute(self) -> None:
        """Adds a forward, which begins when the previous forward has ended."""
        self._busy_until = max(time.monotonic(), self._busy_until) + self._seconds


def draw(logits: torch.Tensor, indices: Sequence[int] | None, rows: Rows) -> Drawn:
    """Chooses an arbitrary token for each row. If the row has a mask, chooses an allowed token."""
    count, vocab = len(rows.parameters), logits.shape[-1]
    tokens = (np.arange(count) * 7919 + 101) % vocab
    allowed = np.ones(count)
    if rows.masks:
        masked = list(rows.masks)
        words = np.stack(list(rows.masks.values()))
        # The first tokens of the vocabulary end a text. They are chosen only if the mask allows no
        # other token.
        first = 8 + int(rows.positions[0]) * 37 % (words.shape[1] // 2)
        at = first + (words[:, first:] != 0).argmax(1)
        found = words[np.arange(len(masked)), at].astype(np.int64)
        for i in np.flatnonzero(found == 0):
            at[i] = (words[i] != 0).argmax()
            found[i] = words[i, at[i]]
        tokens[masked] = at * 32 + np.log2(np.maximum(found & -found, 1)).astype(np.int64)
        allowed[masked] = found != 0
    dense = [bias.values for bias in rows.biases.values() if bias.tokens is None]
    if dense:
        # The host's work for a dense bias: one copy to the buffer that the device reads.
        np.stack(dense)
    fixed = np.full(count, -1.0)
    numbers = Numbers(np.stack([tokens.astype(np.float64), fixed, allowed]))
    return Drawn(rows, vocab, torch.from_numpy(tokens), numbers)


def main() -> None:
    """Serves until SIGTERM."""
    seconds, out = float(sys.argv[1]), Path(sys.argv[2])
    settings = load()
    if settings.overlap == "auto":
        settings = msgspec.structs.replace(settings, overlap="on")
    logging.basicConfig(level=settings.log_level.upper())
    worker = GpuWorker(settings)
    waits: list[tuple[int, float]] = []
    decide = Steering.decide
    device = SleepingDevice(seconds)

    def forward(self: Runner, packed: Packed, drawn: torch.Tensor | None = None) -> torch.Tensor:
        device.compute()
        vocab = next(iter(worker._models.engines.values())).loaded.vocab_size
        return torch.zeros(1, 1).expand(len(packed.rows), vocab)

    def timed(
        self: Steering, engine: Engine, step: PendingStep, receive: Callable[..., Any]
    ) -> None:
        ready = len(step.ready)
        began = time.monotonic()
        decide(self, engine, step, receive)
        work = step.forward.work if step.forward is not None else None
        if isinstance(work, TimedWork):
            began = max(began, work.over_at)
        waits.append((ready, max(0.0, time.monotonic() - began)))

    def logits(self: PendingStep) -> torch.Tensor:
        vocab = next(iter(worker._models.engines.values())).loaded.vocab_size
        return torch.zeros(1, 1).expand(self.num_forward_rows + len(self.kept), vocab)

    def keep_rows(self: PendingStep, logits: torch.Tensor) -> None:
        for _, kept in self.keeping:
            kept.logits = logits[0]

    PendingStep.device_logits = logits  # type: ignore[method-assign]
    PendingStep.keep_rows = keep_rows  # type: ignore[method-assign]
    engine_module.device_queue = lambda *_: device  # type: ignore[assignment]
    step_module.draw = draw
    Runner.forward = forward  # type: ignore[method-assign]
    Steering.decide = timed  # type: ignore[method-assign]
    signal.signal(signal.SIGTERM, lambda *_: worker.stop("the benchmark has ended"))
    worker.run()
    out.write_text(json.dumps(waits))


if __name__ == "__main__":
    main()
