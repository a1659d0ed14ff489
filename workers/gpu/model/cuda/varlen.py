"""Attention on CUDA: PyTorch's FlashAttention reads the blocks in place.

The kernel is ``torch.nn.attention.varlen.varlen_attn`` with a block table. ``num_splits=1`` makes a
sequence's results independent of the rest of the batch. ``trial.py`` tests the kernel on the device
before it is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...engine.packing import PackedSpans
from ..device_queue import together_on_device
from ..kv_cache import FLASH_BLOCK_SIZE, KVCache
from ..loader import LoadedModel

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    # torch 2.9 does not have this module.
    varlen_attn = None  # type: ignore[assignment]

TITLE = "FlashAttention"
BLOCK_SIZE = FLASH_BLOCK_SIZE
MAX_HEAD_DIM = 256


@dataclass(slots=True)
class VarlenBatch:
    """The metadata of a step for the attention function. A chunk is the tokens that the step
    computes of one sequence. The step has N chunks and T tokens."""

    cache: KVCache
    slot_mapping: torch.Tensor
    """``[T]``: the slots to which the new keys and values are written."""
    starts: torch.Tensor
    """``[N + 1]``, int32: the index of each chunk's first token, and the end of the last chunk."""
    key_starts: torch.Tensor
    """``[N + 1]``, int32: the cumulative sums of ``lengths``. FlashAttention 2 requires these sums
    although it reads ``lengths``."""
    lengths: torch.Tensor
    """``[N]``, int32: number of tokens that each chunk attends to."""
    block_table: torch.Tensor
    """``[N, max_blocks]``, int32: the blocks of each chunk's keys."""
    max_chunk: int
    """The greatest number of tokens of a chunk."""
    longest: int
    """The greatest of ``lengths``, or an upper bound."""
    spans: PackedSpans | None = None
    """The chunks on the host; None in a CUDA graph, in which each chunk has one token."""
    tiles: dict[tuple[int, int], Any] = field(default_factory=dict)
    """The tiles of the Triton kernels (``Tiles``), which are made once per step. The key has two
    numbers: the query heads for each key head, and the key heads."""


def batch_of(spans: PackedSpans, cache: KVCache, slot_mapping: torch.Tensor) -> VarlenBatch:
    """The metadata of a forward's chunks, on the device."""
    tensors = together_on_device(arrays_of(spans), slot_mapping.device)
    return batch_from(spans, cache, slot_mapping, tensors)


def arrays_of(spans: PackedSpans) -> list[np.ndarray]:
    """The arrays that ``batch_from`` needs on the device, all int32."""
    table = spans.blocks.reshape(-1, spans.width)
    arrays = starts_of(spans.queries), starts_of(spans.keys), spans.keys, table
    return [array.astype(np.int32) for array in arrays]


def batch_from(
    spans: PackedSpans, cache: KVCache, slot_mapping: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> VarlenBatch:
    """The metadata of a forward's chunks. ``tensors``: ``arrays_of(spans)`` on the device."""
    starts, key_starts, lengths, block_table = tensors
    return VarlenBatch(
        cache=cache,
        slot_mapping=slot_mapping,
        starts=starts,
        key_starts=key_starts,
        lengths=lengths,
        block_table=block_table,
        max_chunk=int(spans.queries.max()),
        longest=int(spans.keys.max()),
        spans=spans,
    )


def starts_of(counts: np.ndarray) -> np.ndarray:
    """The start of each of N consecutive parts, and the end of the last: ``[N + 1]``. ``counts``:
    the sizes of the parts."""
    return np.concatenate([[0], np.cumsum(counts)])


def attend_stored(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: VarlenBatch,
    *,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of a layer whose cache contains ``key`` and ``value``. ``query`` and the result are
    ``[T, heads, dim]``. Models with capped scores do not use this kernel (``why_not``)."""
    keys, values = context.cache.layers[layer]
    found: torch.Tensor = varlen_attn(
        query,
        keys,
        values,
        context.starts,
        context.key_starts,
        context.max_chunk,
        context.longest,
        scale=scaling,
        window_size=(sliding_window - 1 if sliding_window else -1, 0),
        enable_gqa=query.shape[1] != keys.shape[2],
        seqused_k=context.lengths,
        block_table=context.block_table,
        num_splits=1,
    )  # type: ignore[assignment]
    return found


def why_no_kernel() -> str:
    """The reason why this torch has no attention over blocks; empty if it has such attention."""
    if varlen_attn is None or "block_table" not in inspect.signature(varlen_attn).parameters:
        return f"torch {torch.__version__} has no attention over blocks; torch 2.13 has it"
    return ""


def why_unsupported(loaded: LoadedModel) -> str:
    """The reason why no version of FlashAttention supports a model: the type of the weights, or the
    size of the heads. Empty if both are supported."""
    if loaded.dtype not in (torch.bfloat16, torch.float16):
        return f"the weights are {loaded.dtype}"
    shapes = set(loaded.layers.values())
    if any(s.key_dim != s.value_dim or s.key_dim > MAX_HEAD_DIM or s.key_dim % 8 for s in shapes):
        return "it does not support the size of the heads"
    return ""


def why_not(loaded: LoadedModel) -> str:
    """The reason why FlashAttention cannot attend for a model; empty if it can."""
    capped = "its scores are capped" if loaded.soft_caps else ""
    return why_unsupported(loaded) or capped or why_no_kernel()
