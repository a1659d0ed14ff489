"""Finds the requests whose tokens depend on the last bits of logits.

``python -m tests.chaos --close-calls`` runs all requests once, with this module as the GPU worker.
The worker repeats each choice after it has added small random noise to the logits. If the chosen
token differs, it logs the seed of the request. Such a request receives a number in
``workloads.VARIANTS``.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

CLOSE_CALL = "close call of seed"
NOISE = 1e-5
"""Standard deviation of the noise that is added to logits. Batches of different shapes differ by
about 1e-6."""
TRIES = 4
ROOT = Path(__file__).parents[2]


def close_calls(log: str) -> Counter[int]:
    """The number of close calls of each seed, from the log of a worker that ``main`` ran. In a
    close call, the noise has changed the chosen token."""
    lines = log.splitlines()
    return Counter(int(s.rpartition(" ")[2]) for s in lines if s.startswith(CLOSE_CALL))


def main() -> int:
    """Runs a GPU worker that finds close calls."""
    import torch
    from tokenbus.workers.gpu.__main__ import main as serve
    from tokenbus.workers.gpu.sampling import sampler

    choose = sampler._choose

    def choose_and_look(
        logits: torch.Tensor, rows: sampler.Rows, best: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        chosen, allowed = choose(logits, rows, best)
        kept = chosen.clone()
        for _ in range(TRIES):
            noisy = logits + NOISE * torch.randn_like(logits)
            other, _ = choose(noisy, rows)
            for i in (other != kept).nonzero().flatten().tolist():
                print(CLOSE_CALL, rows.parameters.seeds[i], flush=True)
        return kept, allowed

    sampler._choose = choose_and_look
    return serve()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
