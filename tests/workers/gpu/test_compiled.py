"""Every stream is the same with torch.compile and without: with overlapping steps, with drafts,
under controllers, and after a move to another worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenbus.protocol.header import Flag
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu import worker as worker_module
from tokenbus.workers.gpu.engine.engine import EngineConfig
from tokenbus.workers.gpu.model.loader import LoadedModel, load_model, wrap_model
from tokenbus.workers.gpu.model.transformers.backend import compiled_model
from torch import _dynamo as dynamo

from ...worlds.steered_engine import one_thread
from . import shapes
from .moved import Moving
from .test_overlap import loaded_with_everything, run, steered
from .test_speculation import (
    REQUESTS,
    accepted,
    check_same,
    drained_outputs,
    eager,
    prompts,
    sampling_of,
)
from .ties import RecordingEngine

pytestmark = pytest.mark.process
"""Each process that runs one of these tests starts a C++ compiler."""


@pytest.fixture(scope="module")
def embedded() -> Iterator[LoadedModel]:
    """The embedded model with two of its six layers, because the compiler repeats its work for each
    layer."""
    whole = load_model("embedded")
    whole.model.model.layers = whole.model.model.layers[:2]
    whole.model.config.num_hidden_layers = 2
    loaded = wrap_model("embedded", whole.model, whole.tokenizer)
    # Without this setting, a function that was compiled too often would run uncompiled.
    with one_thread(), dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield loaded


def make(embedded: LoadedModel, compiled: bool, **config: Any) -> RecordingEngine:
    config = {"kv_cache_bytes": 32 * 2**20} | config
    return RecordingEngine(embedded, EngineConfig(compiled=compiled, **config))


def test_greedy_tokens_are_those_of_the_model_itself(embedded: LoadedModel) -> None:
    given = shapes.prompts(4, 60, 4096)
    engine = make(embedded, compiled=True)
    for number, prompt in enumerate(given):
        engine.add(number, prompt, Sampling(max_tokens=10, ignore_eos=True))
    outputs = run(engine)
    assert dynamo.utils.counters["stats"]["calls_captured"] > 0
    for number, prompt in enumerate(given):
        got = [o.token for o in outputs if o.request == number and o.token is not None]
        wanted = shapes.greedy(embedded.model, prompt, 10)
        assert shapes.same_tokens(embedded.model, prompt, wanted, got)


def test_stored_code_is_for_vectors_of_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch's own key for stored code does not contain the width of vectors. A process that loaded
    code for another width crashed, or computed wrong values."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    x = torch.randn(5, 192)
    wanted = norm(x)
    for capability in ("avx2", ""):
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
        dynamo.reset()
        assert torch.allclose(compiled_model(norm)(x), wanted, atol=1e-5)
    dynamo.reset()


def test_everything_at_once_gives_the_same(embedded: LoadedModel, overlap: bool) -> None:
    sizes: dict[str, Any] = {
        "max_num_seqs": 9,
        "max_num_batched_tokens": 40,
        "kv_cache_bytes": 2**18,
    }
    plain = loaded_with_everything(make(embedded, compiled=False, **sizes))
    engine = make(embedded, compiled=True, overlap=overlap, **sizes)
    plain.check(loaded_with_everything(engine))
    assert engine.stats()["preemptions"] > 0


def test_steered_sequences_give_the_same(embedded: LoadedModel, overlap: bool) -> None:
    plain = steered(make(embedded, compiled=False))
    plain.check(steered(make(embedded, compiled=True, overlap=overlap)))


def test_drafts_change_nothing(embedded: LoadedModel, overlap: bool) -> None:
    found = []
    for compiled in (False, True):
        engine = make(embedded, compiled, speculation=compiled, overlap=compiled and overlap)
        eager(engine)
        for i, prompt in enumerate(prompts(embedded)):
            for j, name in enumerate(REQUESTS):
                sampling = sampling_of(embedded, **REQUESTS[name])
                engine.add(100 * i + j, prompt, sampling, text=True)
        found.append(drained_outputs(engine))
    check_same(*found)
    assert accepted(engine) > 0


@pytest.mark.parametrize("cut", [0, 1, 7])
def test_a_stream_moves_to_a_worker_that_compiles(
    tmp_path: Path, embedded: LoadedModel, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "IDLE_S", 0.0)
    body = {"prompt": "def add(a, b):\n", "max_tokens": 12, "n": 2, "seed": 3, "temperature": 1.0}
    moving = Moving(
        tmp_path, embedded, b"GENERATE", {**body, "text": True}, Flag.COLUMNS | Flag.TEXTS
    )
    moving.check(cut, compiled=True)


def test_a_model_whose_compiled_logits_differ_is_served_without(
    embedded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compiled(model: Callable[..., Any], **_: object) -> Callable[..., Any]:
        def forward(**inputs: Any) -> Any:
            output = model(**inputs)
            output.logits = output.logits * float("nan")
            return output

        return forward

    monkeypatch.setattr(torch, "compile", compiled)
    engine = make(embedded, compiled=True)
    assert "embedded runs without torch.compile: its logits would differ by nan" in caplog.text
    [prompt] = shapes.prompts(1, 60, 4096)
    engine.add(1, prompt, Sampling(max_tokens=10, ignore_eos=True))
    got = [o.token for o in run(engine) if o.token is not None]
    wanted = shapes.greedy(embedded.model, prompt, 10)
    assert shapes.same_tokens(embedded.model, prompt, wanted, got)
