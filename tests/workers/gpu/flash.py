"""``varlen_attn`` on a CPU: it computes the documented result and makes the checks of its kernel.

``varlen_attn`` runs on CUDA only. The checks are those of torch's built-in FlashAttention 2
(``mha_varlen_fwd``), except for the device and for float16 or bfloat16.
"""

from __future__ import annotations

import torch

PAGE = 256
"""The kernel needs a block size that is a multiple of this number of tokens."""
MAX_HEAD_DIM = 256


def varlen_attn(
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
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Attention of packed queries over the blocks of a KV cache. Raises RuntimeError for arguments
    that the kernel refuses."""
    if cu_seq_k is None:
        raise RuntimeError("cu_seqlens_k: bad optional access")
    if seqused_k is None or block_table is None:
        raise RuntimeError("block_table requires seqused_k")
    demand(num_splits == 1, "only num_splits=1 makes rows independent of their batch")
    demand(enable_gqa or query.shape[1] == key.shape[2], "Hq and Hkv differ: set enable_gqa")
    ints = (cu_seq_q, cu_seq_k, seqused_k, block_table)
    found: torch.Tensor = _kernel(query, key, value, *ints, max_q, max_k, scale, list(window_size))
    return found


@torch.library.custom_op("tokenbus_tests::flash", mutates_args=())
def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    window_size: list[int],
) -> torch.Tensor:
    # For torch this is one operation, like the kernel, so a graph captures it as a whole.
    tables, lengths = _checked(query, key, value, cu_seq_q, cu_seq_k, seqused_k, block_table)
    demand(max(lengths) <= max_k, "a sequence has more than max_k keys")
    return attention(query, (key, value), cu_seq_q, lengths, tables, max_q, scale, window_size)


def attention(
    query: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    cu_seq_q: torch.Tensor,
    lengths: list[int],
    tables: torch.Tensor,
    max_q: int,
    scale: float | None,
    window_size: list[int],
    cap: float = 0.0,
) -> torch.Tensor:
    """Plain attention of packed queries over the blocks of a KV cache: ``[total, heads, dim]``."""
    starts = cu_seq_q.tolist()
    repeat = query.shape[1] // cache[0].shape[2]
    demand(starts[-1] == len(query), "cu_seqlens_q must end at the number of queries")
    out = query.new_empty(query.shape)
    for i, length in enumerate(lengths):
        first, last = starts[i], starts[i + 1]
        demand(last - first <= max_q, "a sequence has more than max_q queries")
        blocks = tables[i, : -(-length // cache[0].shape[1])].long()
        k, v = (t[blocks].flatten(0, 1)[:length].transpose(0, 1) for t in cache)
        k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
        hidden = _hidden(length, last - first, *window_size)
        scores = query[first:last].transpose(0, 1) @ k.transpose(-1, -2)
        scores = scores * (scale or query.shape[-1] ** -0.5)
        if cap:
            scores = torch.tanh(scores / cap) * cap
        scores = scores.masked_fill(hidden, float("-inf"))
        out[first:last] = (torch.softmax(scores, -1) @ v).transpose(0, 1)
    return out


@_kernel.register_fake
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(query.shape)


def _hidden(length: int, queries: int, left: int, right: int) -> torch.Tensor:
    """``[queries, length]``: the keys that each query does not attend to. The last query is at the
    position of the last key."""
    at = torch.arange(length - queries, length).unsqueeze(-1)
    keys = torch.arange(length)
    hidden = torch.zeros(queries, length, dtype=torch.bool)
    if right >= 0:
        hidden |= keys > at + right
    if left >= 0:
        hidden |= keys < at - left
    return hidden


def _checked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
) -> tuple[torch.Tensor, list[int]]:
    """The block tables and the lengths, after the checks that the kernel makes."""
    batch, (_, heads, dim) = cu_seq_q.numel() - 1, query.shape
    demand(batch > 0, "batch size must be positive")
    demand(key.dtype == value.dtype == query.dtype, "query and key must have the same dtype")
    for name, ints in (("q", cu_seq_q), ("k", cu_seq_k)):
        demand(ints.dtype == torch.int32, f"cu_seqlens_{name} must have dtype int32")
        demand(ints.is_contiguous(), f"cu_seqlens_{name} must be contiguous")
        demand(ints.shape == (batch + 1,), f"cu_seqlens_{name} must have shape (batch_size + 1)")
    demand(block_table.dtype == torch.int32, "block_table must have dtype torch.int32")
    demand(block_table.stride(-1) == 1, "block_table must have contiguous last dimension")
    demand(block_table.dim() == 2 and len(block_table) == batch, "block_table: wrong shape")
    for tensor in (query, key, value):
        demand(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    demand(dim % 8 == 0 and dim <= MAX_HEAD_DIM, "head size: a multiple of 8, at most 256")
    demand(key.dim() == 4 and key.shape == value.shape, "paged keys have 4 dimensions")
    demand(key.shape[1] % PAGE == 0, "Paged KV cache block size must be divisible by 256")
    demand(key.shape[-1] == dim and heads % key.shape[2] == 0, "heads of keys: wrong shape")
    demand(seqused_k.dtype == torch.int32, "seqused_k must have dtype int32")
    demand(seqused_k.is_contiguous(), "seqused_k must be contiguous")
    demand(seqused_k.shape == (batch,), "seqused_k must have shape (batch_size)")
    lengths: list[int] = seqused_k.tolist()
    demand(int(cu_seq_k[0]) == 0, "cu_seqlens_k must begin at 0")
    demand(cu_seq_k.diff().tolist() == lengths, "cu_seqlens_k must add up seqused_k")
    return block_table, lengths


def demand(holds: bool, why: str) -> None:
    """Raises RuntimeError, as the kernel does, if a condition does not hold."""
    if not holds:
        raise RuntimeError(why)
