"""For every supported architecture, the greedy tokens equal those of ``generate``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig
from tokenbus.workers.gpu.model.loader import ModelLoadError, load_model, wrap_model
from torchao.quantization import Int8WeightOnlyConfig

from ...counts import rounds
from . import shapes

NEW = rounds(8, 16)

COMMON: dict[str, Any] = {
    "vocab_size": shapes.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED: dict[str, Any] = COMMON | {"num_key_value_heads": 2}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "llama: one key head for all": (
        "Llama",
        COMMON | {"num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 40},
    ),
    "llama: a key head for each": ("Llama", COMMON | {"num_key_value_heads": 8, "head_dim": 24}),
    "mistral with a sliding window": ("Mistral", GROUPED | {"sliding_window": 40}),
    "qwen2": ("Qwen2", GROUPED),
    "qwen2 with a sliding window": (
        "Qwen2",
        GROUPED | {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 16}),
    "gemma": ("Gemma", GROUPED | {"head_dim": 16}),
    "gemma2: soft caps, windows in every other layer": (
        "Gemma2",
        GROUPED | {"head_dim": 16, "sliding_window": 40, "query_pre_attn_scalar": 16},
    ),
    "gemma3": ("Gemma3ForCausalLM", GROUPED | {"head_dim": 16, "sliding_window": 40}),
    "phi": ("Phi", COMMON),
    "phi3": ("Phi3", GROUPED),
    "gpt-neox": ("GPTNeoX", COMMON),
    "olmo2": ("Olmo2", GROUPED),
    "smollm3": ("SmolLM3", GROUPED),
    "granite": ("Granite", GROUPED),
    "starcoder2 with a sliding window": ("Starcoder2", GROUPED | {"sliding_window": 40}),
    "opt": (
        "OPT",
        {
            "vocab_size": shapes.VOCAB,
            "hidden_size": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "max_position_embeddings": 1024,
            "word_embed_proj_dim": 64,
            "init_std": 0.3,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        },
    ),
}


def make(name: str) -> Any:
    """A random model of this architecture."""
    kind, fields = CASES[name]
    torch.manual_seed(1)
    if kind.endswith("ForCausalLM"):
        config = getattr(transformers, "Gemma3TextConfig")(**fields)  # noqa: B009
        model = getattr(transformers, kind)(config)
    else:
        config = getattr(transformers, f"{kind}Config")(**fields)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = None
    return model.eval()


def some_prompts() -> list[list[int]]:
    """Prompts whose lengths are around a block, beyond a window, and far beyond it. In ``make
    test-long``, prompts of all lengths."""
    prompts = shapes.prompts(14, 200)
    return prompts if rounds(0, 1) else [prompts[i] for i in (0, 3, 4, 8, 9)]


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_those_of_generate(name: str) -> None:
    model = make(name)
    prompts = some_prompts()
    wanted = [shapes.greedy(model, p, NEW) for p in prompts]
    engine = Engine(
        wrap_model(name, model), EngineConfig(max_num_batched_tokens=100, kv_cache_bytes=32 * 2**20)
    )
    for i, prompt in enumerate(prompts):
        engine.add(i, prompt, Sampling(max_tokens=NEW, ignore_eos=True))
    got: dict[int, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            got.setdefault(output.request, []).append(output.token or 0)
    wrong = [
        i
        for i, (prompt, tokens) in enumerate(zip(prompts, wanted, strict=True))
        if not shapes.same_tokens(model, prompt, tokens, got[i])
    ]
    assert wrong == []


def test_a_quantized_checkpoint_loads_as_transformers_loads_it(tmp_path: Any) -> None:
    shapes.make("llama").save_pretrained(tmp_path / "plain")
    quantized = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain",
        quantization_config=transformers.TorchAoConfig(Int8WeightOnlyConfig()),
        device_map={"": "cpu"},
    )
    quantized.save_pretrained(tmp_path / "int8")
    loaded = load_model(str(tmp_path / "int8"))
    assert "Int8" in type(loaded.model.model.layers[0].mlp.up_proj.weight).__name__
    engine = Engine(loaded, EngineConfig(kv_cache_bytes=8 * 2**20))
    for i, prompt in enumerate(shapes.prompts(5, 50)):
        engine.add(i, prompt, Sampling(max_tokens=8, ignore_eos=True))
    got: dict[int, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            got.setdefault(output.request, []).append(output.token or 0)
    for i, prompt in enumerate(shapes.prompts(5, 50)):
        wanted = shapes.greedy(loaded.model, prompt, 8)
        assert shapes.same_tokens(loaded.model, prompt, wanted, got[i])


def test_a_model_that_hides_its_attention_is_refused_by_name() -> None:
    model = transformers.StableLmForCausalLM(transformers.StableLmConfig(**GROUPED))
    with pytest.raises(ModelLoadError, match="StableLmForCausalLM does not pass keyword arguments"):
        wrap_model("stablelm", model.eval())


def test_a_model_without_attention_is_refused_by_name(tmp_path: Any) -> None:
    config = transformers.MambaConfig(
        vocab_size=50, hidden_size=16, state_size=4, num_hidden_layers=1
    )
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="MambaForCausalLM"):
        load_model(str(tmp_path))
