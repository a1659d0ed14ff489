"""A GPU worker whose forward is a sleep, which leaves the CPU free as a GPU does.

``python benchmarks/_standin_gpu.py SECONDS FILE``: everything else is the worker as it is. At its
end it writes to FILE how long each step waited for decisions after its logits were ready, as JSON:
``[[sequences, seconds], …]``.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenbus.protocol.settings import load
from tokenbus.workers.gpu.engine import Engine, PendingStep
from tokenbus.workers.gpu.runner import Runner
from tokenbus.workers.gpu.scheduler import Batch, Chunk
from tokenbus.workers.gpu.steering import Steering
from tokenbus.workers.gpu.worker import GpuWorker


def main() -> None:
    """Serves until SIGTERM."""
    seconds, out = float(sys.argv[1]), Path(sys.argv[2])
    settings = load()
    logging.basicConfig(level=settings.log_level.upper())
    worker = GpuWorker(settings)
    waits: list[tuple[int, float]] = []
    decide = Steering.decide
    logits: dict[str, torch.Tensor] = {}

    def run(self: Runner, batch: Batch) -> tuple[list[Chunk], torch.Tensor]:
        rows = sum(chunk.end - chunk.first_row for chunk in batch.chunks)
        vocab = next(iter(worker._models.engines.values())).loaded.vocab_size
        if not logits:
            logits["all"] = torch.randn(256, vocab, generator=torch.Generator().manual_seed(0))
        time.sleep(seconds)
        return batch.chunks, logits["all"][:rows]

    def timed(
        self: Steering,
        engine: Engine,
        step: PendingStep,
        forward_s: float,
        receive: Callable[..., Any],
    ) -> None:
        ready = len(step.ready)
        began = time.perf_counter()
        decide(self, engine, step, forward_s, receive)
        waits.append((ready, time.perf_counter() - began))

    Runner.run = run  # type: ignore[method-assign]
    Steering.decide = timed  # type: ignore[method-assign]
    signal.signal(signal.SIGTERM, lambda *_: worker.stop("the benchmark is over"))
    worker.run()
    out.write_text(json.dumps(waits))


if __name__ == "__main__":
    main()
