"""The size of the KV cache on a GPU, whose memory is simulated on the CPU (``meter.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenbus.protocol.sampling import Sampling
from tokenbus.protocol.settings import Settings
from tokenbus.workers.gpu.engine import engine as engine_module
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig
from tokenbus.workers.gpu.model.cuda import varlen
from tokenbus.workers.gpu.model.kv_cache import FLASH_BLOCK_SIZE, Layout, token_bytes
from tokenbus.workers.gpu.model.loader import LoadedModel, ModelLoadError, wrap_model
from tokenbus.workers.gpu.model.lora.adapters import Adapters
from tokenbus.workers.gpu.model.lora.peft_layout import read_adapter
from tokenbus.workers.gpu.model.memory import cache_bytes, largest_step_bytes
from tokenbus.workers.gpu.model.models import memory_part
from tokenbus.workers.gpu.sampling import races, sampler

from ...worlds.steered_engine import one_thread
from . import flash, shapes
from .cuda import Cuda
from .meter import Meter
from .peft import write_adapter

LAYOUT = Layout(FLASH_BLOCK_SIZE, "varlen")
GATHERED = Layout(16, "gather", "for a test")
ROWS, TOKENS = 8, 256
CACHE = 2**24


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    with one_thread():
        yield wrap_model("llama", shapes.make("llama"))


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meter]:
    """Makes engines read blocks in place, on a device whose memory is counted."""
    monkeypatch.setattr(engine_module, "choose_layout", lambda loaded: LAYOUT)
    monkeypatch.setattr(varlen, "varlen_attn", flash.varlen_attn)
    Cuda().patch(monkeypatch)
    meter = Meter(total=2**30)
    meter.patch(monkeypatch)
    with meter:
        yield meter


def weights(loaded: LoadedModel) -> int:
    return sum(p.nbytes for p in (*loaded.model.parameters(), *loaded.model.buffers()))


def test_no_step_takes_more_than_the_largest_one_that_was_measured(
    loaded: LoadedModel, meter: Meter
) -> None:
    measured = largest_step_bytes(loaded, LAYOUT, ROWS, TOKENS)
    config = EngineConfig(ROWS, TOKENS, kv_cache_bytes=CACHE)
    for scored in (False, True):
        before = meter.live
        engine = Engine(loaded, config)
        for number, prompt in enumerate(shapes.prompts(ROWS, TOKENS // ROWS)):
            if scored:
                engine.score(number, prompt, [1] * TOKENS)
            else:
                engine.add(number, prompt, Sampling(temperature=1.0, top_p=0.9, max_tokens=3))
        meter.peak = meter.live
        while engine.has_work:
            engine.step()
        assert meter.peak - before <= measured + CACHE + FLASH_BLOCK_SIZE * token_size(loaded)
        del engine


def test_a_score_of_which_only_a_part_has_an_adapter_is_measured(
    loaded: LoadedModel, meter: Meter, tmp_path: Path
) -> None:
    adapted = wrap_model("llama", shapes.make("llama"))
    adapter = read_adapter("one", write_adapter(tmp_path, adapted.model))
    adapted.adapters = Adapters(adapted.model, [adapter])
    found = []
    for model in (loaded, adapted):
        largest_step_bytes(model, LAYOUT, ROWS, 8 * TOKENS)
        found.append(largest_step_bytes(model, LAYOUT, ROWS, 8 * TOKENS))
    # The logits of the two forwards are copied into one tensor.
    assert found[1] > found[0]


@pytest.fixture
def by_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the sampler compute the random numbers of many steps ahead, as on a GPU, where launches
    are expensive."""
    for module in (races, sampler):
        monkeypatch.setattr(module, "costs_launches", lambda tensor: True)


def test_the_random_numbers_of_later_steps_are_measured(
    loaded: LoadedModel, meter: Meter, by_launches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for steps in (1, 32):
        monkeypatch.setattr(races, "MAX_AHEAD", steps)
        largest_step_bytes(loaded, LAYOUT, ROWS, ROWS)
        found[steps] = largest_step_bytes(loaded, LAYOUT, ROWS, ROWS)
    _, candidates = races._competitors(loaded.vocab_size, loaded.device)
    of_step = 8 * ROWS * len(candidates)
    # Two batches overlap, and each stores the random numbers of the later steps.
    assert found[32] - found[1] >= 2 * 31 * of_step


def test_no_step_with_numbers_ahead_takes_more_than_was_measured(
    loaded: LoadedModel, meter: Meter, by_launches: None
) -> None:
    measured = largest_step_bytes(loaded, LAYOUT, ROWS, ROWS)
    before = meter.live
    engine = Engine(loaded, EngineConfig(ROWS, ROWS, kv_cache_bytes=CACHE))
    for number in range(ROWS):
        sampling = Sampling(temperature=1.0, top_p=0.9, max_tokens=70, ignore_eos=True)
        engine.add(number, [1], sampling)
    meter.peak = meter.live
    while engine.has_work:
        engine.step()
    assert meter.peak - before <= measured + CACHE + FLASH_BLOCK_SIZE * token_size(loaded)


def token_size(loaded: LoadedModel) -> int:
    return token_bytes(loaded.layers, loaded.dtype)


def test_a_measurement_includes_the_rows_of_all_kinds_and_leaves_nothing(
    loaded: LoadedModel, meter: Meter
) -> None:
    largest_step_bytes(loaded, LAYOUT, ROWS, TOKENS)
    before = meter.live
    measured = largest_step_bytes(loaded, LAYOUT, ROWS, TOKENS)
    assert meter.live == before
    # A score has a row of logits for each token, and a row of log-probabilities.
    assert measured > 2 * TOKENS * loaded.vocab_size * 4


def test_weights_step_and_cache_fit_in_the_part_of_the_model(
    loaded: LoadedModel, meter: Meter
) -> None:
    step = 100 * 2**20
    for part in (1.0, 0.5):
        found = cache_bytes(loaded, LAYOUT, step, part, [])
        assert found + step + weights(loaded) <= 0.9 * part * meter.total
        assert found + step + weights(loaded) > 0.89 * part * meter.total


def test_the_cache_leaves_what_other_processes_have(loaded: LoadedModel, meter: Meter) -> None:
    meter.used = 2**29
    found = cache_bytes(loaded, LAYOUT, 0, 1.0, [])
    assert found <= meter.total - meter.used - 0.1 * meter.total + 1


def test_the_weights_of_a_draft_model_count(loaded: LoadedModel, meter: Meter) -> None:
    alone = cache_bytes(loaded, LAYOUT, 0, 1.0, [])
    assert cache_bytes(loaded, LAYOUT, 0, 1.0, [loaded]) == alone - weights(loaded)


def test_a_gathering_attention_leaves_room_for_a_copy_of_two_layers(
    loaded: LoadedModel, meter: Meter
) -> None:
    layers = len(loaded.layers)
    in_place = cache_bytes(loaded, LAYOUT, 0, 1.0, [])
    gathered = cache_bytes(loaded, GATHERED, 0, 1.0, [])
    assert gathered + 2 * gathered // layers <= in_place


def test_a_device_without_room_is_named_with_its_sizes(loaded: LoadedModel, meter: Meter) -> None:
    with pytest.raises(ModelLoadError, match=r"llama leaves .* for its KV cache.*max_running"):
        cache_bytes(loaded, LAYOUT, 2**30, 1.0, [])


def test_models_that_may_be_loaded_together_have_equal_parts() -> None:
    assert memory_part(Settings(model="m", max_models=2)) == 1.0
    assert memory_part(Settings(model="m", allow=["x"], max_models=2)) == 0.5
    assert memory_part(Settings(model="auto", max_models=4)) == 0.25
