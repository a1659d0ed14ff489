"""Every stream is the same with a draft model and without."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from tokenbus.protocol.sampling import Sampling
from tokenbus.protocol.settings import Settings
from tokenbus.workers.gpu.engine.engine import Continued, Engine, EngineConfig
from tokenbus.workers.gpu.model.loader import LoadedModel, ModelLoadError, load_model, wrap_model
from tokenbus.workers.gpu.model.models import Failed, Models, Progress, Ready
from tokenbus.workers.gpu.speculation import drafts

from ...counts import rounds
from ...worlds.engine_client import ClientView, run
from . import shapes
from .test_speculation import FEW, REQUESTS, ROOM, check_same, drained, drained_outputs, eager
from .ties import Outputs, RecordingEngine

pytestmark = pytest.mark.long

NEW = rounds(30, 60)
WAYS = ((False, False), (True, False), (True, True))
"""Whether the engine has a draft model, and whether its steps overlap."""


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return wrap_model("llama", shapes.make("llama"))


@pytest.fixture(scope="module", params=["the same", "similar", "another"])
def draft(request: pytest.FixtureRequest, llama: LoadedModel) -> LoadedModel:
    """A draft model whose tokens always, often or seldom equal those of the large model."""
    model: Any = copy.deepcopy(llama.model)
    if request.param != "the same":
        torch.manual_seed(1)
        noise = 0.02 if request.param == "similar" else 3.0
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += noise * torch.randn_like(parameter) * parameter.std()
    return wrap_model("small", model)


def engine_of(
    loaded: LoadedModel, draft: LoadedModel, way: tuple[bool, bool], **options: Any
) -> RecordingEngine:
    """An engine whose drafts all come from the draft model. Its forwards are assumed to cost almost
    nothing, so it drafts whenever it can."""
    speculation, overlap = way
    options = {"kv_cache_bytes": ROOM, "speculation": speculation, "overlap": overlap} | options
    engine = eager(RecordingEngine(loaded, EngineConfig(**options), draft if speculation else None))
    model = engine._speculation._model
    if model is not None:
        model.forward_cost = 0.01
        engine._speculation._worthwhile = lambda sequences, rows: []  # type: ignore[method-assign]
    return engine


def check_done(engine: Engine) -> None:
    """Fails if the draft model still has blocks or texts."""
    model = engine._speculation._model
    assert model is not None
    assert model.num_used_blocks == 0
    assert not model._texts
    assert engine.metrics()["spec_decode_num_draft_tokens"]


def sampling(**options: Any) -> Any:
    """Sampling with a bias that leaves three tokens. With random weights, more tokens would often
    be so close that rounding decides between them."""
    common: dict[str, Any] = {"max_tokens": NEW, "ignore_eos": True, "logit_bias": FEW}
    return Sampling(**common | options)


def test_a_stream_is_the_same_with_a_draft_model(llama: LoadedModel, draft: LoadedModel) -> None:
    found = []
    prompts = shapes.prompts(2, 60, llama.vocab_size)
    for way in WAYS:
        engine = engine_of(llama, draft, way)
        for i, prompt in enumerate(prompts):
            for j, options in enumerate(REQUESTS.values()):
                engine.add(100 * i + j, prompt, sampling(**options))
        found.append(drained_outputs(engine))
    check_same(*found)
    check_done(engine)


def test_a_text_that_is_foreseen_takes_fewer_steps(llama: LoadedModel) -> None:
    for temperature in (0.0, 0.8):
        engine = engine_of(llama, llama, (True, False))
        engine.add(1, [5, 9, 300, 17], sampling(temperature=temperature, seed=4, max_tokens=40))
        steps = 0
        while engine.has_work:
            engine.step()
            steps += 1
        assert steps <= 2 + 40 / 8
        check_done(engine)


def test_splices_forks_and_moves_with_a_draft_model(llama: LoadedModel, draft: LoadedModel) -> None:
    """A sequence drops tokens, gets others and is forked. Another worker then continues its
    sequences."""
    prompt = shapes.prompts(1, 40, llama.vocab_size)[0]
    options = sampling(max_tokens=60, temperature=0.4, seed=9)
    found = []
    for way in WAYS:
        engine = engine_of(llama, draft, way)
        engine.add(1, prompt, options)
        client = ClientView()
        while len(client.tokens[0]) < 12:
            client.take(engine.step())
        engine.splice(1, 0, len(client.tokens[0]) - 10, [3, 4, 5])
        engine.fork(1, 0, 2)
        found.append(run(engine, client).tokens)
        moved = engine_of(llama, draft, way)
        begun = {seq: found[0][seq][: 20 + seq] for seq in (0, 2)}
        moved.add(1, prompt, options, continued=Continued(begun, 3, {0: 1}))
        other = ClientView()
        other.tokens = {seq: list(tokens) for seq, tokens in begun.items()}
        other.texts = {seq: [""] * len(tokens) for seq, tokens in begun.items()}
        found.append(run(moved, other).tokens)
    assert found[0] == found[2] == found[4]
    del found[0][1]
    assert found[1] == found[3] == found[5] == found[0]
    check_done(engine)


@pytest.mark.parametrize("blocks", [9, 40])
def test_streams_are_the_same_where_blocks_run_out(llama: LoadedModel, blocks: int) -> None:
    """Either only the draft model's blocks run out, or the blocks of both models."""
    found = []
    size = 16 * 2 * 2 * 8 * 4 * 3
    for way in WAYS:
        room = 8 * blocks * size if way[0] else 2000 * size
        options = {"kv_cache_bytes": room, "max_num_batched_tokens": 64}
        engine = engine_of(llama, llama, way, **options)
        for i, prompt in enumerate(shapes.prompts(8, 90, llama.vocab_size)):
            engine.add(i, prompt, sampling(temperature=0.3 * (i % 2), seed=i))
        found.append(drained_outputs(engine))
    check_same(*found)
    check_done(engine)


def test_a_draft_model_that_fails_changes_nothing(llama: LoadedModel) -> None:
    found = []
    for way in WAYS[:2]:
        engine = engine_of(llama, llama, way)
        model = engine._speculation._model
        engine.add(1, [5, 9, 300, 17], sampling())
        outputs = [o for _ in range(3) for o in engine.step()]
        if model is not None:
            forward = model._runner.forward
            model._runner.forward = None  # type: ignore[assignment, method-assign]
            outputs += engine.step()
            assert not model._texts
            model._runner.forward = forward  # type: ignore[method-assign]
        found.append(Outputs.of(engine, [*outputs, *drained(engine)]))
    check_same(*found)
    check_done(engine)


def test_what_is_not_foreseen_is_no_longer_written_and_tried_again(llama: LoadedModel) -> None:
    torch.manual_seed(5)
    model: Any = copy.deepcopy(llama.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * parameter.std())
    engine = engine_of(llama, wrap_model("another", model), (True, False))
    engine.add(1, [5, 9, 300, 17], sampling(max_tokens=150, temperature=1.0, seed=3, logit_bias={}))
    counts = []
    while engine.has_work:
        engine.step()
        counts.append(engine._speculation.draft_tokens)
    # At first there are some draft tokens, and then a few in each ``RETRY_STEPS`` steps.
    assert 0 < counts[30] < 60
    rate = (counts[-1] - counts[30]) / (len(counts) - 31)
    assert 0 < rate <= 2 * drafts.RETRY_TOKENS / drafts.RETRY_STEPS


def test_a_draft_model_of_another_vocabulary_is_refused(llama: LoadedModel) -> None:
    other = dataclasses.replace(llama, name="other", vocab_size=llama.vocab_size + 1)
    for small in (other, load_model("embedded")):
        with pytest.raises(ModelLoadError, match="the same"):
            Engine(llama, EngineConfig(kv_cache_bytes=ROOM, speculation=True), small)


@pytest.mark.parametrize("draft_model", ["embedded", "/nowhere"])
def test_the_setting_loads_a_draft_model(draft_model: str) -> None:
    settings = Settings(draft_model=draft_model, device="cpu", kv_cache_bytes=ROOM)
    models = Models(settings, lambda: None)
    try:
        models.want("embedded")
        event = models.events.get(timeout=120)
        while isinstance(event, Progress):
            event = models.events.get(timeout=120)
    finally:
        models.close()
    if draft_model == "embedded":
        assert isinstance(event, Ready)
        assert event.engine._speculation._model is not None
    else:
        assert isinstance(event, Failed)
        assert "/nowhere" in str(event.error)
