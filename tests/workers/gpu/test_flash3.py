"""FlashAttention 3 on the CPU, with a stand-in that has its signature and its checks
(``flash3.py``)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine import engine as engine_module
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig
from tokenbus.workers.gpu.model.cuda import choice, flash3
from tokenbus.workers.gpu.model.kv_cache import FLASH3_BLOCK_SIZE, Layout
from tokenbus.workers.gpu.model.loader import load_model, wrap_model

from . import flash3 as stand_in
from . import shapes
from .cuda import Cuda
from .test_architectures import make

NAME = "flash_attn_interface"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Installs the stand-in as the module of FlashAttention 3."""
    monkeypatch.setitem(sys.modules, NAME, stand_in)
    flash3.function.cache_clear()
    yield monkeypatch
    flash3.function.cache_clear()


# Gemma 2 has capped scores, and a sliding window in every other layer. GPT-NeoX runs as
# transformers' modules.
@pytest.mark.parametrize(
    "name", ["llama", "gemma2: soft caps, windows in every other layer", "gpt-neox"]
)
def test_tokens_are_those_of_generate(name: str, installed: pytest.MonkeyPatch) -> None:
    layout = Layout(FLASH3_BLOCK_SIZE, "fa3")
    installed.setattr(engine_module, "choose_layout", lambda loaded: layout)
    cuda = Cuda()
    cuda.patch(installed)
    model = make(name)
    prompts = shapes.prompts(6, 200)
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=150, kv_cache_bytes=2**24)
    engine = Engine(wrap_model(name, model), config)
    assert engine.path.attention == "FlashAttention 3 over blocks"
    for i, prompt in enumerate(prompts):
        engine.add(i, prompt, Sampling(max_tokens=5, ignore_eos=True))
    got: dict[int, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            got.setdefault(output.request, []).append(output.token or 0)
    assert cuda.replays or name == "gpt-neox"
    for i, prompt in enumerate(prompts):
        wanted = shapes.greedy(model, prompt, 5)
        assert shapes.same_tokens(model, prompt, wanted, got[i])


def test_a_trial_compares_it_with_plain_attention(installed: pytest.MonkeyPatch) -> None:
    loaded = load_model("embedded")
    assert choice.why_not(loaded, "fa3") == "the weights are torch.float32"
    installed.setattr(flash3, "why_not", lambda loaded: "")
    assert choice.why_not(loaded, "fa3") == ""

    def splitting(*args: Any, **options: Any) -> torch.Tensor:
        return stand_in.flash_attn_with_kvcache(*args, **{**options, "num_splits": 0})

    other = SimpleNamespace(
        flash_attn_with_kvcache=wraps(stand_in.flash_attn_with_kvcache)(splitting)
    )
    installed.setitem(sys.modules, NAME, other)
    flash3.function.cache_clear()
    assert "num_splits" in choice.why_not(loaded, "fa3")


def test_a_package_that_is_missing_broken_or_old_is_named(
    installed: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def reason() -> str:
        flash3.function.cache_clear()
        with pytest.raises(ImportError) as raised:
            flash3.function()
        return str(raised.value)

    installed.delitem(sys.modules, NAME)
    assert reason() == "it is not installed"

    def older(q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, page_table: Any) -> None: ...

    installed.setitem(sys.modules, NAME, SimpleNamespace(flash_attn_with_kvcache=older))
    assert reason() == "its version does not have cu_seqlens_q, max_seqlen_q, num_splits"

    installed.delitem(sys.modules, NAME)
    (tmp_path / f"{NAME}.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    installed.syspath_prepend(tmp_path)
    assert reason() == "its import fails: undefined symbol: _ZN3c10"
