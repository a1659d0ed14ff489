"""CUDA graphs of decode steps, captured and replayed by a stand-in on the CPU (``cuda.py``)."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tokenbus.protocol.sampling import Sampling
from tokenbus.protocol.settings import Settings
from tokenbus.workers.gpu.engine import engine as engine_module
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig
from tokenbus.workers.gpu.engine.scheduler import Batch, Chunk
from tokenbus.workers.gpu.engine.sequence import Sequence
from tokenbus.workers.gpu.model.cuda import graphs, varlen
from tokenbus.workers.gpu.model.kv_cache import FLASH_BLOCK_SIZE, Layout
from tokenbus.workers.gpu.model.loader import LoadedModel, wrap_model
from tokenbus.workers.gpu.model.models import Models, Ready

from ...worlds.steered_engine import one_thread
from . import flash, shapes
from .cuda import Cuda

SIZES = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    with one_thread():
        yield wrap_model("llama", shapes.make("llama"))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Engines read blocks in place and capture graphs, as on a GPU."""
    layout = Layout(FLASH_BLOCK_SIZE, "varlen")
    monkeypatch.setattr(engine_module, "choose_layout", lambda loaded: layout)
    monkeypatch.setattr(varlen, "varlen_attn", flash.varlen_attn)
    found = Cuda()
    found.patch(monkeypatch)
    return found


def make(loaded: LoadedModel, **config: Any) -> Engine:
    given = {"max_num_seqs": 8, "kv_cache_bytes": 2**24, **config}
    return Engine(loaded, EngineConfig(**given))


def run(engine: Engine) -> dict[tuple[int, int], list[int]]:
    """Runs steps until the engine has no work; returns the tokens by request and sequence. Fails if
    a sequence ends with an error."""
    got: dict[tuple[int, int], list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            if output.token is not None:
                got.setdefault((output.request, output.seq), []).append(output.token)
    return got


def fail(times: int, do: Callable[[], None]) -> Callable[[], None]:
    """A function for ``Cuda.on_capture`` that calls ``do`` in the first ``times`` captures."""
    left = iter(range(times))

    def act() -> None:
        if next(left, None) is not None:
            do()

    return act


def test_all_sizes_are_captured_at_start_with_one_pool_and_thread_local_errors(
    loaded: LoadedModel, cuda: Cuda
) -> None:
    stages: list[tuple[float, str]] = []
    engine = Engine(
        loaded,
        EngineConfig(max_num_seqs=7, kv_cache_bytes=2**24),
        on_progress=lambda part, stage: stages.append((part, stage)),
    )
    assert engine.path.graphs == len(SIZES) == len(cuda.captures)
    assert {c.mode for c in cuda.captures} == {"thread_local"}
    assert len({id(c.pool) for c in cuda.captures}) == 1
    assert cuda.captures[0].pool is not None
    assert [part for part, _ in stages] == [0, 0.25, 0.5, 0.75]
    assert all("CUDA graphs" in stage for _, stage in stages)
    engine.add(1, [1, 2, 3], Sampling(max_tokens=4, ignore_eos=True))
    run(engine)
    assert len(cuda.captures) == len(SIZES)


def test_replayed_steps_give_the_tokens_of_generate(loaded: LoadedModel, cuda: Cuda) -> None:
    # The longest prompts take more than one block.
    prompts = shapes.prompts(6, 300)
    engine = make(loaded)
    for i, prompt in enumerate(prompts):
        engine.add(i, prompt, Sampling(max_tokens=4 + i, ignore_eos=True))
    before = cuda.replays
    got = run(engine)
    assert cuda.replays - before >= 4
    for i, prompt in enumerate(prompts):
        wanted = shapes.greedy(loaded.model, prompt, 4 + i)
        assert shapes.same_tokens(loaded.model, prompt, wanted, got[i, 0])


def test_an_allocation_on_another_thread_does_not_break_a_capture(
    loaded: LoadedModel, cuda: Cuda
) -> None:
    def load_elsewhere() -> None:
        loader = threading.Thread(target=cuda.malloc)
        loader.start()
        loader.join()

    cuda.on_capture = load_elsewhere
    engine = make(loaded)
    assert engine.path.graphs == len(SIZES)
    assert not engine.path.fallbacks


def test_a_failed_capture_leaves_no_stream_current_and_is_tried_once_more(
    loaded: LoadedModel, cuda: Cuda
) -> None:
    cuda.on_capture = fail(1, cuda.malloc)
    engine = make(loaded)
    assert cuda.current is cuda.default
    assert engine.path.graphs == len(SIZES)
    assert not engine.path.fallbacks
    broken, again, *_ = cuda.captures
    assert broken.stream is not again.stream
    assert broken.pool is not again.pool


def test_steps_run_without_graphs_after_two_failures_and_the_path_says_why(
    loaded: LoadedModel, cuda: Cuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.on_capture = cuda.malloc
    engine = make(loaded)
    assert len(cuda.captures) == 2
    assert cuda.current is cuda.default
    assert engine.path.graphs == 0
    [why] = engine.path.fallbacks
    assert "CUDA graphs" in why
    assert "would make the capture unsafe" in why
    assert why in caplog.text
    engine.add(1, [1, 2, 3], Sampling(max_tokens=4, ignore_eos=True))
    assert run(engine)[1, 0] == shapes.greedy(loaded.model, [1, 2, 3], 4)


def test_captures_end_when_their_time_is_over_and_small_batches_use_larger_graphs(
    loaded: LoadedModel, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 0.0, 1.0, graphs.MAX_CAPTURE_S + 1])
    capture = graphs.DecodeGraphs.capture

    def timed(self: graphs.DecodeGraphs, forward: Any, on_progress: Any) -> None:
        capture(self, forward, on_progress, lambda: next(times))

    monkeypatch.setattr(graphs.DecodeGraphs, "capture", timed)
    engine = make(loaded)
    assert engine.path.graphs == 2
    assert "2 of 4" in engine.path.fallbacks[0]
    before = cuda.replays
    engine.add(1, [1, 2, 3], Sampling(max_tokens=4, ignore_eos=True))
    assert run(engine)[1, 0] == shapes.greedy(loaded.model, [1, 2, 3], 4)
    assert cuda.replays - before == 3


def test_a_chunk_of_one_token_within_a_prompt_is_not_taken_for_a_decode(
    loaded: LoadedModel, cuda: Cuda
) -> None:
    runner = make(loaded)._runner
    prompts = [Sequence(i, 0, [1, 2, 3], 3, Sampling(), 3) for i in range(2)]
    for block, sequence in enumerate(prompts):
        sequence.block_table.blocks.append(block)
    runner.launch(runner.pack(Batch([Chunk(prompts[1], 0, 2)]))[1])
    batch = Batch([Chunk(prompts[0], 0, 1), Chunk(prompts[1], 2, 3)])
    before = cuda.replays
    forward = runner.launch(runner.pack(batch)[1])
    assert len(forward.work.result()) == forward.num_rows == 1
    assert cuda.replays == before


def test_a_deferred_row_of_logits_is_not_overwritten_by_the_next_replay(
    loaded: LoadedModel, cuda: Cuda
) -> None:
    engine = make(loaded)
    prompts = {1: [1, 2, 3], 2: [4, 5, 6]}
    for request, prompt in prompts.items():
        engine.add(request, prompt, Sampling(max_tokens=6, ignore_eos=True))
    got: dict[int, list[int]] = {1: [], 2: []}
    for number in range(100):
        if not engine.has_work:
            break
        step = engine.begin()
        if number == 2:
            engine.defer(1, 0)
        if number == 4:
            engine.reschedule(1, 0)
        for output in engine.finish(step).as_outputs():
            assert output.token is not None
            got[output.request].append(output.token)
    for request, prompt in prompts.items():
        assert got[request] == shapes.greedy(loaded.model, prompt, 6)


def test_nothing_of_an_engine_lives_after_it_is_deleted(loaded: LoadedModel, cuda: Cuda) -> None:
    engine = make(loaded)
    engine.add(1, [1, 2, 3], Sampling(max_tokens=4, ignore_eos=True))
    run(engine)
    runner = engine._runner
    keys, values = runner._cache.layers[0]
    living = [weakref.ref(one) for one in (engine, runner, runner._cache, keys, values)]
    gc.collect()
    gc.disable()
    try:
        del engine, runner, keys, values
        cuda.captures.clear()
        assert [ref() for ref in living] == [None] * len(living)
    finally:
        gc.enable()


def test_an_evicted_model_is_freed_before_its_memory_is_returned_to_the_device(
    loaded: LoadedModel, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = Models(Settings(max_models=1), lambda: None)
    models.close()
    for name in ("first", "second"):
        models.loaded(Ready(name, make(loaded)))
    cuda.captures.clear()
    cache = weakref.ref(models.engines["first"]._runner._cache)
    living: list[object] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: living.append(cache()))
    gc.collect()
    gc.disable()
    try:
        assert models.evict(()) == ["first"]
    finally:
        gc.enable()
    assert living == [None]
