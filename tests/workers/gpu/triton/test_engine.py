"""Engines with the Triton kernels on a CPU give the tokens of transformers' ``generate``."""

from __future__ import annotations

import math

import pytest
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine import engine as engine_module
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig
from tokenbus.workers.gpu.model.cuda import varlen
from tokenbus.workers.gpu.model.kv_cache import FLASH_BLOCK_SIZE, KVCache, Layout
from tokenbus.workers.gpu.model.loader import wrap_model
from tokenbus.workers.gpu.model.step_tensors import StepTensors
from tokenbus.workers.gpu.model.triton.backend import TritonBackend, triton_backend

from .. import flash, shapes
from ..cuda import Cuda
from ..test_architectures import make
from . import interpreted

pytestmark = interpreted


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Replaces the streams and graphs of ``torch.cuda`` by stand-ins on a CPU. Engines get the
    layout whose blocks the Triton kernels read."""
    layout = Layout(16, "triton")
    monkeypatch.setattr(engine_module, "choose_layout", lambda loaded: layout)
    monkeypatch.setattr("tokenbus.workers.gpu.model.cuda.graphs.SIZES", (1,))
    # A capture may take any time, because the interpreter is slow.
    monkeypatch.setattr("tokenbus.workers.gpu.model.cuda.graphs.MAX_CAPTURE_S", math.inf)
    cuda = Cuda()
    cuda.patch(monkeypatch)
    return cuda


# Gemma 2 has capped scores, a sliding window, GELU, and a norm of each update before it is added to
# the residual. Qwen 3 has norms of queries and keys. GPT-NeoX runs as transformers' modules.
@pytest.mark.parametrize(
    "name", ["gemma2: soft caps, windows in every other layer", "qwen3", "gpt-neox"]
)
def test_tokens_are_those_of_generate(name: str, cuda: Cuda) -> None:
    model = make(name)
    engine = Engine(wrap_model(name, model), EngineConfig(max_num_seqs=1, kv_cache_bytes=2**20))
    assert engine.path.attention == "Triton over blocks"
    fused = name != "gpt-neox"
    if fused:
        assert not engine.path.fallbacks
    else:
        assert engine.path.fallbacks[0] == "layers: its layers run as transformers' modules"
    prompts = [[3, 5, 9] * 12]
    for number, prompt in enumerate(prompts):
        engine.add(number, prompt, Sampling(max_tokens=3, ignore_eos=True))
    got: dict[int, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            got.setdefault(output.request, []).append(output.token or 0)
    assert cuda.replays or not fused
    for number, prompt in enumerate(prompts):
        wanted = shapes.greedy(model, prompt, 3)
        assert shapes.same_tokens(model, prompt, wanted, got[number])


def test_the_layers_run_by_kernels_with_flash_attention_too(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", flash.varlen_attn)
    loaded = wrap_model("qwen3", make("qwen3"))
    assert loaded.decoder is not None
    layout = Layout(FLASH_BLOCK_SIZE, "varlen")
    cache = KVCache(loaded.layers, 2, FLASH_BLOCK_SIZE, loaded.dtype, loaded.device)
    tensors = StepTensors(cache, loaded.device)
    found = triton_backend(tensors, loaded.decoder, layout, loaded.dtype)
    # The Triton backend is only chosen if its logits equal those of plain layers.
    assert isinstance(found, TritonBackend), found.why_no_kernels
