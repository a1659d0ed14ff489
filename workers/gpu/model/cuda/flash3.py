"""Attention on Hopper GPUs: FlashAttention 3 reads the blocks in place, if it is installed.

``flash_attn_with_kvcache`` of the package ``flash_attn_3`` takes packed queries (``cu_seqlens_q``)
and a page table, so one call computes decodes and prompts. With ``num_splits=1``, the split of a
sequence's keys does not depend on the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module

import torch

from ..kv_cache import FLASH3_BLOCK_SIZE
from ..loader import LoadedModel
from .varlen import VarlenBatch, why_unsupported

TITLE = "FlashAttention 3"
BLOCK_SIZE = FLASH3_BLOCK_SIZE
MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
"""The names of the package's Python module in different versions of the package."""
_NEEDED = {"cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q", "num_splits"}


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
    ``[T, heads, dim]``."""
    keys, values = context.cache.layers[layer]
    found: torch.Tensor = function()(
        query,
        keys,
        values,
        cache_seqlens=context.lengths,
        page_table=context.block_table,
        cu_seqlens_q=context.starts,
        max_seqlen_q=context.max_chunk,
        softmax_scale=scaling,
        causal=True,
        window_size=(sliding_window - 1, 0) if sliding_window else (-1, -1),
        softcap=softcap or 0.0,
        num_splits=1,
    )
    return found


@cache
def function() -> Callable[..., torch.Tensor]:
    """``flash_attn_with_kvcache``. Raises ImportError, with the reason, if it cannot be
    imported."""
    reason = "it is not installed"
    for name in MODULES:
        try:
            found: Callable[..., torch.Tensor] = import_module(name).flash_attn_with_kvcache
        except ModuleNotFoundError:
            continue
        except (ImportError, OSError, AttributeError) as error:
            # The import can fail, for example if the package was built for another torch.
            reason = f"its import fails: {error}"
            continue
        if missing := _NEEDED - set(inspect.signature(found).parameters):
            reason = f"its version does not have {', '.join(sorted(missing))}"
            continue
        return found
    raise ImportError(reason)


def why_no_kernel() -> str:
    """The reason why FlashAttention 3 cannot be imported; empty if it can."""
    try:
        function()
    except ImportError as error:
        return str(error)
    return ""


def why_not(loaded: LoadedModel) -> str:
    """The reason why FlashAttention 3 cannot attend for a model; empty if it can."""
    return why_unsupported(loaded) or why_no_kernel()
