"""Attention on CUDA: PyTorch's FlashAttention reads the blocks in place.

``torch.nn.attention.varlen.varlen_attn`` with a block table. ``num_splits=1`` makes a sequence's
results independent of what else is in the batch. ``attention_choice`` tests it on the device before
it is used.
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
from ..transformers.attention import register

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    # torch 2.9 does not have it.
    varlen_attn = None  # type: ignore[assignment]

NAME = "tokenbus_varlen"
TOLERANCE = 2e-2
"""Greatest difference from plain attention, in bfloat16, for unit normal inputs."""


@dataclass(slots=True)
class VarlenBatch:
    """The metadata of a step for the attention function, for N chunks and T tokens."""

    cache: KVCache
    slot_mapping: torch.Tensor
    """``[T]``: the slots to which the new keys and values are written."""
    starts: torch.Tensor
    """``[N + 1]``, int32: the index of each chunk's first token."""
    key_starts: torch.Tensor
    """``[N + 1]``, int32: the cumulative sums of ``lengths``. FlashAttention 2 requires them
    although it reads ``lengths``."""
    lengths: torch.Tensor
    """``[N]``, int32: number of tokens that each chunk attends to."""
    block_table: torch.Tensor
    """``[N, max_blocks]``, int32."""
    max_chunk: int
    longest: int
    spans: PackedSpans | None = None
    """The chunks on the host; None in a graph, whose chunks have one token each."""
    tiles: dict[tuple[int, int], Any] = field(default_factory=dict)
    """The tiles of the Triton kernels by numbers of heads, made once per step."""


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
    """The start of each of N consecutive parts of these sizes, and the end of the last: ``[N +
    1]``."""
    return np.concatenate([[0], np.cumsum(counts)])


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_batch: VarlenBatch,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention: ``query`` ``[1, heads, T, dim]`` to ``[1, T, heads, dim]``."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    found = attend(
        layer, q, k, v, packed_batch, scaling=scaling, sliding_window=sliding_window, softcap=None
    )
    return found.unsqueeze(0), None


def attend(
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
    """One layer's attention: ``query`` ``[T, heads, dim]`` to ``[T, heads, dim]``. Models with
    capped scores do not use it (``why_not``)."""
    context.cache.write(layer, context.slot_mapping, key, value)
    keys, values = context.cache.layers[layer]
    found: torch.Tensor = varlen_attn(
        query.contiguous(),
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


register(NAME, varlen_attention)


def why_no_kernel() -> str:
    """The reason why this torch has no attention over blocks; empty if it has."""
    if varlen_attn is None or "block_table" not in inspect.signature(varlen_attn).parameters:
        return f"torch {torch.__version__} has no attention over blocks; torch 2.13 has it"
    return ""


def why_not(loaded: LoadedModel) -> str | None:
    """The reason why FlashAttention cannot read the blocks of this model; None if it can."""
    if loaded.dtype not in (torch.bfloat16, torch.float16):
        return f"the weights are {loaded.dtype}"
    if loaded.soft_caps:
        return "its scores are capped"
    shapes = set(loaded.layers.values())
    if any(s.key_dim != s.value_dim or s.key_dim > 256 or s.key_dim % 8 for s in shapes):
        return "its heads are of a size that FlashAttention does not take"
    if missing := why_no_kernel():
        return missing
    try:
        for shape in shapes:
            _try_it(shape.kv_heads, shape.key_dim, loaded.dtype, loaded.device)
    except Exception as error:
        return f"a trial of varlen_attn failed: {error}"
    return None


def _try_it(kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compares the attention of two chunks over scattered blocks with plain attention; raises if
    they differ."""
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    heads = 2 * kv_heads
    keys, values = (normal(5, FLASH_BLOCK_SIZE, kv_heads, dim) for _ in range(2))
    q = normal(4, heads, dim)
    tables, queries, lengths = [[3, 1], [4, 2]], [3, 1], [300, 257]

    def ints(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    found = varlen_attn(
        q,
        keys,
        values,
        ints(starts_of(np.array(queries))),
        ints(starts_of(np.array(lengths))),
        max(queries),
        max(lengths),
        window_size=(-1, 0),
        enable_gqa=True,
        seqused_k=ints(lengths),
        block_table=ints(tables),
        num_splits=1,
    )
    at = 0
    for table, count, length in zip(tables, queries, lengths, strict=True):
        k, v = (t[table].flatten(0, 1)[:length].transpose(0, 1).float() for t in (keys, values))
        k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        rows = q[at : at + count].transpose(0, 1).float()
        scores = rows @ k.transpose(-1, -2) * dim**-0.5
        positions = torch.arange(length - count, length, device=device).unsqueeze(-1)
        hidden = torch.arange(length, device=device) > positions
        wanted = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v
        away = (found[at : at + count].transpose(0, 1).float() - wanted).abs().max().item()  # type: ignore[union-attr]
        if not away <= TOLERANCE:
            raise ValueError(f"its result differs by {away:.3g} from plain attention")
        at += count
