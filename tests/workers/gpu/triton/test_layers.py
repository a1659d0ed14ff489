"""The Triton kernels of a layer's small operations equal torch's operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenbus.workers.gpu.model.fused.decoder import rotate_
from tokenbus.workers.gpu.model.triton.ops import GATED, NORM, ROTARY_STORE
from torch.nn.functional import gelu, rms_norm, silu

from ....counts import examples
from . import interpreted

pytestmark = interpreted


@settings(max_examples=examples(8))
@given(st.integers(1, 5), st.sampled_from([64, 96, 1000]), st.booleans(), st.booleans())
def test_the_norm_adds_the_update_to_the_residual(
    rows: int, width: int, has_update: bool, has_post: bool
) -> None:
    generator = torch.Generator().manual_seed(rows)
    hidden, update = (torch.randn(rows, width, generator=generator) for _ in range(2))
    gain, post = (torch.randn(width, generator=generator) for _ in range(2))
    added = rms_norm(update, (width,), post, 1e-3) if has_post else update
    wanted = hidden + 0.5 * added if has_update else hidden.clone()
    normed = torch.full_like(hidden, float("nan"))
    NORM(
        normed,
        hidden,
        update if has_update else None,
        gain,
        1e-5,
        0.5,
        post if has_post else None,
        1e-3,
    )
    assert torch.allclose(hidden, wanted, atol=1e-5)
    assert torch.allclose(normed, rms_norm(wanted, (width,), gain, 1e-5), atol=1e-5)


@settings(max_examples=examples(8))
@given(st.integers(1, 5), st.sampled_from([8, 96, 1000]), st.booleans())
def test_the_gate_is_silu_or_gelu(rows: int, width: int, is_gelu: bool) -> None:
    gate_up = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(rows)) * 5
    found = torch.full((rows, width), float("nan"))
    GATED(found, gate_up, is_gelu)
    gate, up = gate_up.chunk(2, -1)
    wanted = (gelu(gate, approximate="tanh") if is_gelu else silu(gate)) * up
    assert torch.allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("dim", "rotated"), [(64, 64), (96, 96), (64, 32), (128, 0)])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_rotated_keys_are_stored_and_queries_rotated_in_place(
    dim: int, rotated: int, has_norms: bool, kv_heads: int
) -> None:
    generator = torch.Generator().manual_seed(dim)
    num_tokens, num_heads = 3, 3
    heads = torch.randn(num_tokens, num_heads + 2 * kv_heads, dim, generator=generator)
    gains = [torch.randn(dim, generator=generator) for _ in range(2)] if has_norms else []
    eps = [1e-5, 1e-3] if has_norms else []
    turns = [torch.randn(num_tokens, 1, rotated, generator=generator) for _ in range(2)]
    slots = torch.tensor([9, 2, 30])
    keys, values = (torch.full((2, 16, kv_heads, dim), float("nan")) for _ in range(2))

    wanted = heads.clone()
    if has_norms:
        for gain, e, part in zip(gains, eps, _parts(wanted, num_heads, kv_heads), strict=True):
            part.copy_(rms_norm(part, (dim,), gain, e))
    if rotated:
        rotate_(wanted[:, : num_heads + kv_heads], (turns[0], turns[1]))
    ROTARY_STORE(heads, turns if rotated else [], slots, [keys, values], gains, eps)

    assert torch.allclose(heads[:, :num_heads], wanted[:, :num_heads], atol=1e-5)
    stored, key = keys.flatten(0, 1), _parts(wanted, num_heads, kv_heads)[1]
    assert torch.allclose(stored[slots], key, atol=1e-5)
    assert torch.equal(values.flatten(0, 1)[slots], wanted[:, num_heads + kv_heads :])
    others = torch.ones(32, dtype=torch.bool)
    others[slots] = False
    assert stored[others].isnan().all()


def test_bfloat16_is_computed_in_float32_and_rounded_once() -> None:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    hidden, update, gain, post = normal(3, 96), normal(3, 96), normal(96), normal(96)
    added = 0.5 * rms_norm(update.float(), (96,), post.float(), 1e-3)
    summed = (hidden.float() + added).to(torch.bfloat16)
    wanted = rms_norm(summed.float(), (96,), gain.float(), 1e-5)
    normed = torch.full_like(hidden, float("nan"))
    NORM(normed, hidden, update, gain, 1e-5, 0.5, post, 1e-3)
    _close(hidden, summed.float())
    _close(normed, wanted)

    gate_up, found = normal(3, 192), torch.empty(3, 96, dtype=torch.bfloat16)
    gate, up = gate_up.float().chunk(2, -1)
    for is_gelu, activated in ((False, silu(gate)), (True, gelu(gate, approximate="tanh"))):
        GATED(found, gate_up, is_gelu)
        _close(found, activated.to(torch.bfloat16).float() * up)

    heads, slots = normal(3, 5, 64), torch.tensor([9, 2, 30])
    turns = [normal(3, 1, 64) for _ in range(2)]
    cache = [torch.zeros(2, 16, 1, 64, dtype=torch.bfloat16) for _ in range(2)]
    turned = heads.float()
    rotate_(turned[:, :4], (turns[0].float(), turns[1].float()))
    values = heads[:, 4:].clone()
    ROTARY_STORE(heads, turns, slots, cache, [], [])
    _close(heads[:, :3], turned[:, :3])
    _close(cache[0].flatten(0, 1)[slots], turned[:, 3:4])
    assert torch.equal(cache[1].flatten(0, 1)[slots], values)


def _close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Fails if the difference is above two units in the last place of bfloat16. The interpreter
    truncates."""
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), wanted, rtol=2**-6, atol=2**-7)


def _parts(heads: torch.Tensor, num_heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of the queries and of the keys."""
    return heads[:, :num_heads], heads[:, num_heads : num_heads + kv_heads]
