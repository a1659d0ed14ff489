"""After a sequence has dropped tokens, it draws with other random numbers, which are the same in
every run and at every worker."""

from __future__ import annotations

import pytest
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.engine import Continued, Engine, EngineConfig
from tokenbus.workers.gpu.model.loader import LoadedModel

PROMPT = list(range(300, 320))
SAMPLING = Sampling(max_tokens=100, temperature=100.0, seed=7, ignore_eos=True)
"""At this temperature, all tokens are about equally likely, and the last bits of the logits do not
matter."""
LENGTH = 4


def drawn(engine: Engine, attempts: int, continued: Continued | None = None) -> list[list[int]]:
    """The texts of ``LENGTH`` tokens that a sequence draws if each text is dropped before the next
    one is drawn."""
    engine.add(1, PROMPT, SAMPLING, continued=continued)
    found: list[list[int]] = [[]]
    while len(found) <= attempts:
        step = engine.begin()
        if step.ready and len(found[-1]) == LENGTH:
            engine.splice(1, 0, LENGTH, [])
            found.append([])
        for output in engine.finish(step):
            if output.token is not None:
                found[-1].append(output.token)
    engine.abort(1)
    return found[:attempts]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_sequence_that_goes_back_draws_other_tokens(embedded: LoadedModel, overlap: bool) -> None:
    def engine() -> Engine:
        return Engine(embedded, EngineConfig(kv_cache_bytes=2**22, overlap=overlap))

    texts = drawn(engine(), 6)
    assert len({tuple(text) for text in texts}) > 3
    assert drawn(engine(), 6) == texts
    moved = Continued({0: []}, 1, {0: 2})
    assert drawn(engine(), 4, moved) == texts[2:]
