"""Finds the requests for whose tokens the last bits of a logit decide.

``python -m tests.chaos --close-calls`` runs all requests once on GPU workers that are this module:
each choice is repeated with logits that differ as little as those of another batch may, and where
another token is chosen, the seed of the request is logged. Such requests get a number in
``workloads.VARIANTS``.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

CLOSE_CALL = "close call of seed"
NOISE = 1e-5
"""Standard deviation of what is added to logits; batches of other shapes differ by some 1e-6."""
TRIES = 4
ROOT = Path(__file__).parents[2]


def close_calls(log: str) -> Counter[int]:
    """How often each seed is in the log of a worker that was this module."""
    lines = log.splitlines()
    return Counter(int(s.rpartition(" ")[2]) for s in lines if s.startswith(CLOSE_CALL))


def main() -> int:
    """A GPU worker that looks for close calls."""
    import torch
    from tokenbus.workers.gpu.__main__ import main as serve
    from tokenbus.workers.gpu.sampling import sampler

    choose = sampler._choose

    def choose_and_look(
        own: torch.Tensor, rows: sampler.Rows, best: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        chosen, allowed = choose(own, rows, best)
        kept = chosen.clone()
        for _ in range(TRIES):
            noisy = own + NOISE * torch.randn_like(own)
            other, _ = choose(noisy, rows)
            for i in (other != kept).nonzero().flatten().tolist():
                print(CLOSE_CALL, rows.parameters.seeds[i], flush=True)
        return kept, allowed

    sampler._choose = choose_and_look
    return serve()


if __name__ == "__main__":
    # A process of this name runs in the folder of its system.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
