"""The arguments of FlashAttention on a GPU, checked on the CPU by their documented meaning.

``varlen_attn`` runs on CUDA only. Here a plain function with its signature and its documented
semantics stands in for it, so that all that leads to the call is tested: blocks, tables, lengths,
windows. That the kernel does what it documents is tried when a model is loaded.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu import engine as engine_module
from tokenbus.workers.gpu import varlen
from tokenbus.workers.gpu.engine import Engine, EngineConfig
from tokenbus.workers.gpu.kv_cache import FLASH_BLOCK_SIZE, Layout
from tokenbus.workers.gpu.loader import load_model, wrap_model

from . import shapes
from .test_architectures import make


def documented(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Causal attention of packed queries over paged keys, as torch documents ``varlen_attn``."""
    assert cu_seq_k is None
    assert num_splits == 1
    assert {t.dtype for t in (cu_seq_q, seqused_k, block_table)} == {torch.int32}
    assert key.shape[1] == FLASH_BLOCK_SIZE
    starts, lengths = cu_seq_q.tolist(), seqused_k.tolist()
    assert starts[-1] == len(query)
    assert max(lengths) <= max_k
    repeat = query.shape[1] // key.shape[2]
    assert enable_gqa == (repeat > 1)
    out = torch.empty_like(query)
    for i, length in enumerate(lengths):
        first, last = starts[i], starts[i + 1]
        assert last - first <= max_q
        blocks = block_table[i, : -(-length // key.shape[1])].long()
        k, v = (t[blocks].flatten(0, 1)[:length].transpose(0, 1) for t in (key, value))
        k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
        at = torch.arange(length - (last - first), length).unsqueeze(-1)
        keys = torch.arange(length)
        hidden = keys > at + window_size[1]
        if window_size[0] >= 0:
            hidden |= keys < at - window_size[0]
        q = query[first:last].transpose(0, 1)
        scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
        scores = scores.masked_fill(hidden, float("-inf"))
        out[first:last] = (torch.softmax(scores, -1) @ v).transpose(0, 1)
    return out


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines read blocks in place, as on a GPU."""
    layout = Layout(FLASH_BLOCK_SIZE, True, "for a test")
    monkeypatch.setattr(engine_module, "choose_layout", lambda loaded: layout)
    monkeypatch.setattr(varlen, "varlen_attn", documented)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral with a sliding window", "gpt-neox"])
def test_tokens_are_those_of_generate(name: str, in_place: None) -> None:
    model = make(name)
    prompts = shapes.prompts(11, 300)
    wanted = [shapes.greedy(model, p, 8) for p in prompts]
    loaded = wrap_model(name, model)
    engine = Engine(loaded, EngineConfig(max_num_batched_tokens=200, kv_cache_bytes=32 * 2**20))
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
    engine = Engine(loaded, EngineConfig(kv_cache_bytes=32 * 2**20))
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


def test_on_a_cpu_blocks_are_gathered() -> None:
    layout = varlen.choose_layout(load_model("embedded"))
    assert not layout.in_place
    assert "cpu" in layout.why
