"""Overlapping steps give the same outputs as separate steps, whatever happens to the sequences."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig, TokenOutput
from tokenbus.workers.gpu.model.device_queue import ThreadQueue, Work
from tokenbus.workers.gpu.model.loader import LoadedModel, load_model

from ...worlds.steered_engine import one_thread
from .ties import Outputs, RecordingEngine

WORDS = 4096 // 32
PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def embedded() -> Iterator[LoadedModel]:
    with one_thread():
        yield load_model("embedded")


def make(
    embedded: LoadedModel, overlap: bool, kv_cache_bytes: int = 2**21, **config: Any
) -> RecordingEngine:
    return RecordingEngine(
        embedded, EngineConfig(kv_cache_bytes=kv_cache_bytes, overlap=overlap, **config)
    )


def run(engine: Engine) -> list[TokenOutput]:
    """Runs steps until the engine has no work."""
    outputs: list[TokenOutput] = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


class Found:
    """The outputs of each sequence."""

    def __init__(self, engine: RecordingEngine, outputs: list[TokenOutput]) -> None:
        self.outputs = Outputs.of(engine, outputs)

    def check(self, other: Found) -> None:
        """Fails if ``other`` differs. A tie is a choice of a token that rounding decides. Unless
        both engines are exact in the same way, outputs from a sequence's first tie on are not
        compared."""
        streams, tolerance = other.outputs.streams, self.outputs.tolerance(other.outputs)
        assert streams.keys() == self.outputs.streams.keys()
        for key, own in self.outputs.streams.items():
            first, second = own, streams[key]
            if tolerance:
                count = self.outputs.compared(key, second)
                first, second = first[:count], second[:count]
            assert [_plain(o) for o in second] == [_plain(o) for o in first], key
            logprobs = [o.logprob or 0.0 for o in first]
            assert [o.logprob or 0.0 for o in second] == pytest.approx(
                logprobs, rel=0, abs=tolerance
            )


def _plain(o: TokenOutput) -> tuple[Any, ...]:
    return (o.token, o.pos, o.finish_reason, o.text, o.backtrack, o.parent, o.error)


def kinds(rng: random.Random) -> Iterator[Sampling]:
    """The sampling parameters of requests of all kinds."""
    yield Sampling(max_tokens=20, ignore_eos=True)
    yield Sampling(max_tokens=1, ignore_eos=True)
    yield Sampling(max_tokens=17, temperature=1.0, seed=1)
    yield Sampling(max_tokens=17, temperature=0.7, top_p=0.9, seed=2, n=3, ignore_eos=True)
    yield Sampling(max_tokens=17, repetition_penalty=1.3, frequency_penalty=0.4, ignore_eos=True)
    yield Sampling(max_tokens=30, temperature=1.0, seed=5, stop=list(range(100, 3000)))
    yield Sampling(max_tokens=9, top_logprobs=2, ignore_eos=True)
    yield Sampling(max_tokens=40, temperature=1.5, seed=rng.randrange(99), stop=["e", "a"])


def loaded_with_everything(engine: RecordingEngine) -> Found:
    """The outputs of requests of all kinds, which arrive in different steps and need more blocks
    than there are."""
    rng = random.Random(3)
    outputs: list[TokenOutput] = []
    number = 0
    for turn in range(3):
        for sampling in kinds(rng):
            number += 1
            prompt = [rng.randrange(300, 4000) for _ in range(rng.choice([1, 15, 16, 17, 90]))]
            engine.add(number, prompt, sampling, text=number % 3 == 0)
            outputs += engine.step()
        engine.score(100 + turn, prompt, prompt[::-1])
    outputs += engine.abort(4)
    return Found(engine, [o for o in [*outputs, *run(engine)] if o.request != 4])


def test_everything_at_once_gives_the_same(embedded: LoadedModel) -> None:
    sizes: dict[str, Any] = {
        "max_num_seqs": 9,
        "max_num_batched_tokens": 40,
        "kv_cache_bytes": 2**20,
    }
    plain, overlapping = (make(embedded, overlap, **sizes) for overlap in (False, True))
    loaded_with_everything(plain).check(loaded_with_everything(overlapping))
    assert overlapping.stats()["preemptions"] > 0
    for engine in (plain, overlapping):
        assert not engine.has_requests
        assert engine.stats()["kv_blocks_used"] == 0


def steered(engine: RecordingEngine) -> Found:
    """The outputs of sequences to which operations are applied. The operations depend only on the
    sequence and its number of sampled tokens."""
    outputs: list[TokenOutput] = []
    for request in range(1, 7):
        sampling = Sampling(max_tokens=24, temperature=1.0, seed=request, ignore_eos=True)
        engine.add(request, PROMPT[request:], sampling)
    held: set[tuple[int, int]] = set()
    lengths: dict[tuple[int, int], int] = {}
    while engine.has_requests:
        for key in list(held):
            held.discard(key)
            if engine.alive(*key):
                engine.resume(*key)
                engine.reschedule(*key)
        step = engine.begin()
        for key in step.ready:
            request, seq = key
            length = lengths.get(key, 0)
            if request == 1 and length == 5 and seq == 0:
                lengths[key] = 7
                engine.splice(*key, 2, [7, 8, 9, 10])
            elif request == 2 and length == 4 and seq == 0:
                lengths[key] = -100
                for child in engine.fork(*key, 2):
                    lengths[request, child] = -100
            elif request == 3:
                mask = np.zeros(WORDS, dtype=np.uint32)
                mask[length % 60 + 20] = 0xF0
                engine.set_mask(*key, mask)
            elif request == 4 and length % 3 == 1 and key not in held:
                lengths[key] += 1
                held.add(key)
                engine.defer(*key)
            elif request == 5 and length == 6:
                lengths[key] += 1
                held.add(key)
                engine.suspend(*key)
            elif request == 6 and length == 9:
                engine.end(*key)
        for output in engine.finish(step):
            outputs.append(output)
            key = output.request, output.seq
            if output.token is not None and output.logprob is not None:
                lengths[key] = lengths.get(key, 0) + 1
    return Found(engine, outputs)


def test_steered_sequences_give_the_same(embedded: LoadedModel) -> None:
    plain, overlapping = (steered(make(embedded, overlap)) for overlap in (False, True))
    plain.check(overlapping)
    assert {o.token for o in plain.outputs.streams[3, 0]} <= {
        w * 32 + b for w in range(20, 80) for b in range(4, 8)
    }


def test_a_step_that_fails_is_computed_again_and_gives_the_same(
    embedded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def requests(engine: RecordingEngine) -> Found:
        for number in range(1, 6):
            sampling = Sampling(max_tokens=20, temperature=1.0, seed=number, n=number % 2 + 1)
            engine.add(number, PROMPT[number:], sampling)
        engine.score(9, PROMPT[:9], PROMPT[9:30])
        return Found(engine, run(engine))

    wanted = requests(make(embedded, overlap=False))
    engine = make(embedded, overlap=True)
    forward, count = engine._runner.forward, 0

    def failing(*arguments: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        if count in (1, 9, 20):
            raise RuntimeError("out of memory")
        return forward(*arguments)

    monkeypatch.setattr(engine._runner, "forward", failing)
    wanted.check(requests(engine))
    assert engine.stats()["kv_blocks_used"] == 0


def test_the_next_forward_is_launched_before_the_tokens_are_taken(
    embedded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(embedded, overlap=True)
    order: list[str] = []
    launch, take = engine._runner.launch, engine._stepper._take

    def launched(*arguments: Any) -> Any:
        order.append("launch")
        return launch(*arguments)

    def taken(*arguments: Any) -> Any:
        order.append("take")
        return take(*arguments)

    monkeypatch.setattr(engine._runner, "launch", launched)
    monkeypatch.setattr(engine._stepper, "_take", taken)
    engine.add(1, PROMPT, Sampling(max_tokens=3, ignore_eos=True))
    run(engine)
    # The third token is the last by ``max_tokens``, so no fourth forward is launched.
    assert order == ["launch", "launch", "take", "launch", "take", "take"]


def test_work_is_done_in_order_and_its_errors_are_its_own() -> None:
    queue = ThreadQueue()
    done: list[int] = []

    def failing() -> None:
        done.append(1)
        raise ValueError("no")

    works: list[Work[Any]] = [
        queue.submit(lambda: done.append(0)),
        queue.submit(failing),
        queue.submit(lambda: len(done)),
    ]
    assert works[2].result() == 2
    with pytest.raises(ValueError, match="no"):
        works[1].result()
    assert works[1].done
