"""The fused decoder computes the logits of a model from the model's weights, with fewer
operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenbus.workers.gpu.model.fused.decoder import FusedDecoder
from tokenbus.workers.gpu.model.fused.projections import Projection, stored_by_input
from tokenbus.workers.gpu.model.loader import wrap_model
from torch.nn.functional import linear

from .test_architectures import CASES, make

NOT_FUSED = {"phi", "gpt-neox", "starcoder2 with a sliding window", "opt"}


@pytest.mark.parametrize("name", CASES)
def test_models_of_a_known_structure_are_fused(name: str) -> None:
    assert (wrap_model(name, make(name)).decoder is None) == (name in NOT_FUSED)


@pytest.fixture
def llama() -> Any:
    """A small model whose weights a test may change."""
    return make("llama")


def test_the_model_goes_on_working_and_shares_its_weights(llama: Any) -> None:
    ids = torch.arange(12).unsqueeze(0)
    with torch.inference_mode():
        before = llama(ids).logits
        loaded = wrap_model("llama", llama)
        after = llama(ids).logits
    assert torch.allclose(before, after, atol=1e-4)
    decoder = loaded.decoder
    assert isinstance(decoder, FusedDecoder)
    for layer, fused in zip(llama.model.layers, decoder.layers, strict=True):
        for linear_, projection in (
            (layer.self_attn.q_proj, fused.qkv),
            (layer.self_attn.v_proj, fused.qkv),
            (layer.mlp.up_proj, fused.mlp.gate_up),
            (layer.mlp.down_proj, fused.mlp.down),
        ):
            storage = projection.weight.untyped_storage().data_ptr()
            assert linear_.weight.untyped_storage().data_ptr() == storage


def test_a_model_that_was_fused_before_is_fused_again_without_a_copy(llama: Any) -> None:
    first, second = (wrap_model("llama", llama).decoder for _ in range(2))
    assert first is not None
    assert second is not None
    one, other = first.layers[0].qkv.weight, second.layers[0].qkv.weight
    assert one.data_ptr() == other.data_ptr()
    assert torch.equal(one, other)


def test_a_module_that_is_not_known_leaves_the_model_as_it_is(llama: Any) -> None:
    llama.model.layers[1].self_attn.gate = torch.nn.Linear(64, 64)
    assert wrap_model("llama", llama).decoder is None


def test_a_model_that_computes_something_else_with_the_same_parts_is_found_out(llama: Any) -> None:
    plain = type(llama.model.layers[1])

    class Louder(plain):  # type: ignore[misc, valid-type]
        def forward(self, *given: Any, **named: Any) -> Any:
            return super().forward(*given, **named) * 1.5

    llama.model.layers[1].__class__ = Louder
    assert wrap_model("llama", llama).decoder is None


def test_the_code_of_others_is_left_as_it_is(llama: Any) -> None:
    class Theirs(type(llama)):  # type: ignore[misc]
        pass

    llama.__class__ = Theirs
    assert wrap_model("theirs", llama).decoder is None


# --- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("out", [48, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_that_of_a_linear_layer(
    threads: int, packed: bool, rows: int, out: int, has_bias: bool
) -> None:
    torch.manual_seed(2)
    weight, x, residual = torch.randn(out, 80), torch.randn(rows, 80), torch.randn(rows, out)
    bias = torch.randn(out) if has_bias else None
    wanted = linear(x, weight, bias)
    if stored_by_input(weight):
        weight = weight.t().contiguous().t()
    projection = Projection(weight, bias)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            if packed:
                assert projection.pack(1 << 20) == weight.nbytes
            assert torch.allclose(projection(x), wanted, atol=1e-4)
            total = projection.add_to(residual.clone(), x)
    finally:
        torch.set_num_threads(before)
    assert torch.allclose(total, residual + wanted, atol=1e-4)


def test_weights_beyond_the_budget_are_not_kept_twice() -> None:
    assert Projection(torch.randn(64, 64), None).pack(1000) == 0
