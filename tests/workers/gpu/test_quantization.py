"""Weights that a worker quantizes when it loads a model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers
from tokenbus.clients.cli.main import main
from tokenbus.protocol.messages import Quantized
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig
from tokenbus.workers.gpu.model import quantization
from tokenbus.workers.gpu.model.loader import LoadedModel, ModelLoadError, load_model

from ...processes import Bus
from . import shapes


@pytest.fixture(scope="module")
def plain() -> LoadedModel:
    """The embedded model."""
    return load_model("embedded", dtype="bfloat16")


@pytest.fixture(scope="module", params=["int8", "int4"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    """The embedded model with quantized weights."""
    return load_model("embedded", dtype="bfloat16", quantize=request.param)


def loss_of(loaded: LoadedModel) -> Quantized:
    """The measured loss of a quantized model."""
    assert loaded.quantized is not None
    return loaded.quantized


def log_probabilities(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    """The log-probabilities of each next token."""
    with torch.inference_mode():
        logits = loaded.model(torch.tensor([ids])).logits[0]
    return logits.double().log_softmax(-1)


def test_the_loss_is_that_of_the_logits(plain: LoadedModel, loaded: LoadedModel) -> None:
    ids = loaded.tokenizer.encode(quantization.TEXT)[: quantization.MAX_TOKENS]
    before, after = log_probabilities(plain, ids), log_probabilities(loaded, ids)
    divergence = (before.exp() * (before - after)).sum(-1).mean().item()
    loss = loss_of(loaded)
    assert loss.divergence == pytest.approx(divergence, rel=0.02)
    assert 0 < loss.divergence < 0.1
    for found, given in ((before, loss.perplexity_before), (after, loss.perplexity)):
        logprobs = [found[at, token].item() for at, token in enumerate(ids[1:])]
        assert given == pytest.approx(math.exp(-sum(logprobs) / len(logprobs)), rel=0.01)


def test_the_linear_modules_of_the_layers_take_less_memory(
    plain: LoadedModel, loaded: LoadedModel
) -> None:
    def size(of: LoadedModel) -> int:
        return sum(quantization.stored_bytes(one.data) for one in of.model.parameters())

    loss = loss_of(loaded)
    assert size(plain) - size(loaded) == loss.saved_bytes
    linear = sum(one.weight.numel() for one in plain.model.modules() if is_linear(plain, one))
    scales = {"int8": 0.05, "int4": 0.13}[loss.kind]
    bits = {"int8": 8, "int4": 4}[loss.kind]
    left = 2 * linear - loss.saved_bytes
    assert bits / 8 * linear < left < (bits / 8 + scales) * linear
    assert loaded.model.get_output_embeddings().weight.dtype == torch.bfloat16


def is_linear(loaded: LoadedModel, module: torch.nn.Module) -> bool:
    """Whether a module is a linear module of a layer."""
    head = loaded.model.get_output_embeddings()
    return type(module) is torch.nn.Linear and module is not head


def test_the_engine_generates_as_the_quantized_model_does(loaded: LoadedModel) -> None:
    engine = Engine(loaded, EngineConfig(kv_cache_bytes=8 * 2**20))
    prompts = shapes.prompts(5, 50)
    for i, prompt in enumerate(prompts):
        engine.add(i, prompt, Sampling(max_tokens=6, ignore_eos=True))
    got: dict[int, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            got.setdefault(output.request, []).append(output.token or 0)
    for i, prompt in enumerate(prompts):
        wanted = shapes.greedy(loaded.model, prompt, 6)
        assert shapes.same_tokens(loaded.model, prompt, wanted, got[i])


def test_equal_weights_have_equal_versions(plain: LoadedModel, loaded: LoadedModel) -> None:
    kind = loss_of(loaded).kind
    again = load_model("embedded", dtype="bfloat16", quantize=kind)
    assert again.weights == loaded.weights != plain.weights


def test_int4_chooses_the_data_type_of_its_kernels() -> None:
    assert load_model("embedded", quantize="int4").dtype == torch.bfloat16


def test_a_quantized_model_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(quantization.NotQuantizable, match="is quantized already"):
        quantization.quantize("x", loaded.model, loaded.tokenizer, "int8")


def test_a_model_without_linear_modules_is_refused(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=100)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="cannot be quantized: it has no linear modules"):
        load_model(str(tmp_path), quantize="int8")


def test_an_encoder_and_a_model_of_several_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="set tp to 1 for --quantize"):
        load_model("embedded", quantize="int8", parallel=True)
    config = transformers.BertConfig(
        hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="is an encoder, which --quantize does not support"):
        load_model(str(tmp_path), quantize="int8")


def test_the_loss_is_part_of_the_status(
    processes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with Bus(recover_s=0.1, quantize="int8") as own:
        own.start_worker()
        own.wait_for_models("embedded")
        with own.client() as client:
            quantized = client.model_info().path.quantized
        assert main(["status", "--front", own.front]) == 0
    assert quantized is not None
    assert (quantized.kind, quantized.divergence < 0.01) == ("int8", True)
    shown = capsys.readouterr().out
    assert "  quantized to int8: 7.0 MB less memory, a divergence of " in shown
