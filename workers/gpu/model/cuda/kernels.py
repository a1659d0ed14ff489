"""The common interface of the attention kernels that read the blocks of the KV cache in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from ..fused.decoder import Attend
from ..kv_cache import Kernel
from ..loader import LoadedModel
from ..transformers.attention import register
from ..triton import attention as triton
from . import flash3, varlen


class BlockAttention(Protocol):
    """The functions and constants of a kernel's module."""

    @property
    def TITLE(self) -> str:
        """The name of the kernel in messages."""
        ...

    @property
    def BLOCK_SIZE(self) -> int:
        """Number of tokens of a block."""
        ...

    @property
    def attend_stored(self) -> Attend:
        """Attention of a layer whose cache already contains the keys and values of the step."""
        ...

    def why_not(self, loaded: LoadedModel) -> str:
        """The reason why the kernel cannot attend for a model; empty if it can. Called before
        the trials that compare the kernel with plain attention."""
        ...


KERNELS: Mapping[Kernel, BlockAttention] = {"varlen": varlen, "fa3": flash3, "triton": triton}


def writing(attend_stored: Attend) -> Attend:
    """A function that writes the keys and values to the cache and then calls ``attend_stored``."""

    def attend(
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: varlen.VarlenBatch,
        **options: Any,
    ) -> torch.Tensor:
        context.cache.write(layer, context.slot_mapping, key, value)
        return attend_stored(layer, query, key, value, context, **options)

    return attend


def function_name(kernel: Kernel) -> str:
    """The name under which a kernel is registered in transformers. The name does not contain
    ``flash``, because transformers reserves such names."""
    return f"tokenbus_{kernel}"


def _for_transformers(attend: Attend) -> Callable[..., tuple[torch.Tensor, None]]:
    def function(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_batch: varlen.VarlenBatch,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """One layer's attention. ``query`` is ``[1, heads, T, dim]``, and the result is ``[1, T,
        heads, dim]``."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        found = attend(
            layer,
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            packed_batch,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
        )
        return found.unsqueeze(0), None

    return function


for _name, _kernel in KERNELS.items():
    register(function_name(_name), _for_transformers(writing(_kernel.attend_stored)))
