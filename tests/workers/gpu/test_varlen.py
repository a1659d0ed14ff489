"""The arguments of FlashAttention on a GPU are checked on the CPU.

``varlen_attn`` runs on CUDA only. A plain function with the same signature and checks
(``flash.py``) replaces it, so that blocks, block tables, lengths and windows are tested. When a
model is loaded, the engine itself tests that the kernel computes the documented result.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine import engine as engine_module
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig
from tokenbus.workers.gpu.model.cuda import choice, varlen
from tokenbus.workers.gpu.model.cuda.choice import choose_layout
from tokenbus.workers.gpu.model.kv_cache import FLASH_BLOCK_SIZE, Layout
from tokenbus.workers.gpu.model.loader import load_model, wrap_model

from . import flash, shapes
from .cuda import Cuda
from .test_architectures import make


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes engines read blocks in place, as on a GPU."""
    layout = Layout(FLASH_BLOCK_SIZE, "varlen")
    monkeypatch.setattr(engine_module, "choose_layout", lambda loaded: layout)
    monkeypatch.setattr(varlen, "varlen_attn", flash.varlen_attn)
    Cuda().patch(monkeypatch)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral with a sliding window", "gpt-neox"])
def test_tokens_are_those_of_generate(name: str, in_place: None) -> None:
    model = make(name)
    prompts = shapes.prompts(11, 300)
    wanted = [shapes.greedy(model, p, 8) for p in prompts]
    loaded = wrap_model(name, model)
    engine = Engine(
        loaded, EngineConfig(max_num_seqs=16, max_num_batched_tokens=200, kv_cache_bytes=2**25)
    )
    for i, prompt in enumerate(prompts):
        engine.add(i, prompt, Sampling(max_tokens=8, ignore_eos=True))
    got: dict[int, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            got.setdefault(output.request, []).append(output.token or 0)
    for i, prompt in enumerate(prompts):
        assert shapes.same_tokens(model, prompt, wanted[i], got[i])


def test_forks_and_splices_work_on_its_blocks_too(in_place: None) -> None:
    loaded = load_model("embedded")
    engine = Engine(loaded, EngineConfig(max_num_seqs=8, kv_cache_bytes=2**25))
    prompt = shapes.prompts(12, 500, 4096)[9]
    engine.add(1, prompt, Sampling(max_tokens=20, ignore_eos=True))
    first: list[int] = [o.token or 0 for _ in range(5) for o in engine.step()]
    engine.fork(1, 0, 2)
    engine.splice(1, 1, 2, [7, 8, 9])
    got: dict[int, list[Any]] = {0: list(first), 1: first[:3], 2: list(first)}
    while engine.has_work:
        for output in engine.step():
            if output.token is not None:
                got[output.seq].append(output.token)
    assert got[0] == got[2] == shapes.greedy(loaded.model, prompt, 20)
    head = [*first[:3], 7, 8, 9]
    assert got[1] == head + shapes.greedy(loaded.model, prompt + head, 14)


def test_the_trial_calls_the_kernel_as_it_demands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", flash.varlen_attn)
    loaded = load_model("embedded")
    assert choice.why_not(loaded, "varlen") == "the weights are torch.float32"
    monkeypatch.setattr(varlen, "why_not", lambda loaded: "")
    assert choice.why_not(loaded, "varlen") == ""


def test_a_kernel_with_other_results_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_window(*args: Any, **options: Any) -> torch.Tensor:
        return flash.varlen_attn(*args, **{**options, "window_size": (-1, 0)})

    monkeypatch.setattr(varlen, "varlen_attn", without_window)
    monkeypatch.setattr(varlen, "why_not", lambda loaded: "")
    assert "differs by" in choice.why_not(load_model("embedded"), "varlen")


def test_the_stand_in_has_the_parameters_of_torch() -> None:
    given = inspect.signature(flash.varlen_attn).parameters
    real = inspect.signature(torch.nn.attention.varlen.varlen_attn).parameters
    assert [p for p in real if p != "return_aux"] == list(given)


def test_on_a_cpu_blocks_are_gathered() -> None:
    layout = choose_layout(load_model("embedded"))
    assert not layout.in_place
    assert "cpu" in layout.why
