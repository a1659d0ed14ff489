"""``flash_attn_with_kvcache`` of FlashAttention 3 on a CPU, with the checks of its kernel.

The signature is that of ``hopper/flash_attn_interface.py``. The checks are those of ``mha_fwd`` in
``hopper/flash_api.cpp``, except for the device and for float16 or bfloat16. This stand-in computes
only the calls that the engine makes: packed queries over the blocks of a KV cache, without new
keys.
"""

from __future__ import annotations

from typing import Any

import torch

from .flash import MAX_HEAD_DIM, attention, demand


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    """Attention of packed queries over the blocks of a KV cache. Raises an exception for arguments
    that the kernel refuses."""
    assert k_cache.stride(-1) == 1, "k_cache must have contiguous last dimension"
    assert v_cache.stride(-1) == 1, "v_cache must have contiguous last dimension"
    demand(num_splits == 1, "only num_splits=1 makes the split independent of the batch")
    demand(cu_seqlens_q is not None and page_table is not None, "not a call of the engine")
    demand(max_seqlen_q is not None, "max_seqlen_q must be provided if cu_seqlens_q is provided")
    demand(isinstance(cache_seqlens, torch.Tensor), "seqused_k must be provided")
    left, right = window_size
    window = [left, 0 if causal else right]
    given: Any = (page_table, cu_seqlens_q, cache_seqlens, max_seqlen_q)
    found: torch.Tensor = _kernel(q, k_cache, v_cache, *given, softmax_scale, window, softcap)
    return found


@torch.library.custom_op("tokenbus_tests::flash3", mutates_args=())
def _kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    max_seqlen_q: int,
    scale: float | None,
    window: list[int],
    softcap: float,
) -> torch.Tensor:
    batch = len(page_table)
    demand(q.dtype == k.dtype == v.dtype, "query and key must have the same dtype")
    demand(q.dim() == 3 and q.stride(-1) == 1, "packed queries: [total, heads, dim]")
    demand(q.shape[-1] % 8 == 0 and q.shape[-1] <= MAX_HEAD_DIM, "head_size")
    demand(k.dim() == 4 and k.shape == v.shape and k.shape[-1] == q.shape[-1], "paged keys")
    demand(q.shape[1] % k.shape[2] == 0, "heads of keys must divide heads of queries")
    for name, ints, shape in (
        ("page_table", page_table, (batch, page_table.shape[1])),
        ("cu_seqlens_q", cu_seqlens_q, (batch + 1,)),
        ("seqused_k", seqused_k, (batch,)),
    ):
        demand(ints.dtype == torch.int32, f"{name} must have dtype int32")
        demand(ints.shape == shape, f"{name} must have shape {shape}")
        contiguous = ints.stride(-1) == 1 if ints.dim() == 2 else ints.is_contiguous()
        demand(contiguous, f"{name} must be contiguous")
    lengths: list[int] = seqused_k.tolist()
    demand(max(lengths) <= page_table.shape[1] * k.shape[1], "seqused_k exceeds the page table")
    arguments = (cu_seqlens_q, lengths, page_table, max_seqlen_q, scale, window, softcap)
    return attention(q, (k, v), *arguments)


@_kernel.register_fake
def _(q: torch.Tensor, *_: object) -> torch.Tensor:
    return q.new_empty(q.shape)
