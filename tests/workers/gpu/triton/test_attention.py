"""Paged attention by the Triton kernels equals plain attention in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ....counts import examples
from . import interpreted
from .paged import Paged, Shape

pytestmark = interpreted

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Shapes of models that are served."""
    return Shape(
        group=draw(st.sampled_from([1, 3, 4, 7, 16, 20])),
        kv_heads=draw(st.sampled_from([1, 2])),
        dim=draw(st.sampled_from([64, 96, 128, 256])),
        block_size=draw(st.sampled_from([16, 32, 64, 128, 256])),
        window=draw(st.sampled_from([None, None, 1, 40, 1000])),
        cap=draw(st.sampled_from([None, None, 5.0, 50.0])),
        dtype=draw(st.sampled_from([torch.float32, torch.float16])),
    )


@st.composite
def chunks(draw: st.DrawFn, longest: int) -> tuple[int, int]:
    """The numbers of new tokens and of keys of a chunk: a decode, a draft, or a part of a
    prompt."""
    keys = draw(st.integers(1, longest))
    tokens = draw(st.sampled_from([1, 1, 5, 33, 70, keys]))
    return min(tokens, keys, 70), keys


def check(paged: Paged, found: list[torch.Tensor]) -> None:
    for row, own in enumerate(found):
        away = (own.float() - paged.plain(row)).abs().max().item()
        assert away <= TOLERANCES[own.dtype]


@settings(max_examples=examples(12))
@given(shapes(), st.lists(chunks(300), min_size=1, max_size=2), st.integers(0, 300))
def test_chunks_attend_as_plain_attention(
    shape: Shape, batch: list[tuple[int, int]], shared: int
) -> None:
    paged = Paged(shape, batch, shared=shared)
    check(paged, paged.attend())


@settings(max_examples=examples(5))
@given(st.sampled_from([(4, 64), (2, 96), (8, 128), (1, 256)]), st.integers(1000, 4096), st.data())
def test_long_sequences_attend_as_plain_attention(
    heads: tuple[int, int], keys: int, data: st.DataObject
) -> None:
    group, dim = heads
    window = data.draw(st.sampled_from([None, 700]))
    cap = data.draw(st.sampled_from([None, 20.0]))
    paged = Paged(Shape(group, 1, dim, 64, window, cap), [(1, keys), (3, keys // 3)], shared=900)
    check(paged, paged.attend(max_programs=data.draw(st.sampled_from([1, 3, 16]))))


@settings(max_examples=examples(5))
@given(shapes(), st.lists(chunks(300), min_size=1, max_size=2), st.data())
def test_a_row_is_the_same_alone_and_in_a_batch(
    shape: Shape, batch: list[tuple[int, int]], data: st.DataObject
) -> None:
    paged = Paged(shape, [(1, 550), *batch])
    together = paged.attend(max_programs=data.draw(st.integers(1, 5)))
    for row in {0, data.draw(st.integers(1, len(batch)))}:
        assert torch.equal(paged.attend([row])[0], together[row])


@pytest.mark.parametrize("chunk", [(1, 700), (3, 40), (70, 140)], ids=["decode", "draft", "prompt"])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (100, 20.0)])
def test_bfloat16_attends_as_float32(
    chunk: tuple[int, int], window: int | None, cap: float | None
) -> None:
    paged = Paged(Shape(4, 2, 128, 64, window, cap, torch.bfloat16), [chunk, (1, 30)])
    found = paged.attend()
    assert {own.dtype for own in found} == {torch.bfloat16}
    check(paged, found)


def test_forks_that_share_their_blocks_attend_alike() -> None:
    paged = Paged(Shape(4, 1, 64, 32), [(1, 320), (1, 320)], shared=320)
    assert (paged.table[0] == paged.table[1]).all()
    paged.rows[1] = paged.rows[0]
    first, second = paged.attend()
    assert torch.equal(first, second)
    check(paged, [first, second])


def test_a_prompt_after_a_prefix_hit_attends_to_the_prefix() -> None:
    paged = Paged(Shape(2, 1, 64, 16), [(40, 140), (7, 107)], shared=100)
    assert (paged.table[0, :6] == paged.table[1, :6]).all()
    check(paged, paged.attend())


def test_partial_results_that_exceed_their_memory_are_computed_in_turn(monkeypatch: Any) -> None:
    from tokenbus.workers.gpu.model.triton import attention

    paged = Paged(Shape(2, 1, 64, 64), [(1, 600), (1, 700), (1, 20)])
    wanted = paged.attend()
    monkeypatch.setattr(attention, "MAX_PARTIAL_BYTES", 1)
    assert all(torch.equal(a, b) for a, b in zip(paged.attend(), wanted, strict=True))


@pytest.mark.parametrize("rows", [1, 3])
def test_decodes_of_a_graph_are_those_of_any_batch(rows: int) -> None:
    from tokenbus.workers.gpu.model.triton import attention

    paged = Paged(Shape(4, 2, 64, 64), [(1, 300), (1, 30), (1, 600)][:rows])
    workspace = attention.workspace_of(paged.cache)
    found = attention.paged_attention(
        torch.cat(paged.rows)[:, :8],
        paged.cache.layers[0],
        (
            torch.arange(rows + 1, dtype=torch.int32),
            torch.tensor([keys for _, keys in paged.chunks], dtype=torch.int32),
            torch.from_numpy(paged.table),
        ),
        attention.decode_tiles(rows, 4, workspace),
        workspace,
        scaling=None,
        sliding_window=None,
        softcap=None,
    )
    assert torch.equal(found, torch.cat(paged.attend()))
