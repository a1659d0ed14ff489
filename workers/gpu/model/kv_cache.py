"""The memory of the paged KV cache: one tensor of keys and one of values for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import psutil
import torch

from .device_queue import on_device

BLOCK_SIZE = 16
"""Number of tokens of a block, if no GPU kernel reads blocks in place. The attention then gathers
the blocks of a sequence into one tensor, or native code on a CPU reads the blocks."""
FLASH_BLOCK_SIZE = 256
"""Number of tokens of a block that FlashAttention reads in place. FlashAttention 2 requires at
least 256."""
FLASH3_BLOCK_SIZE = 64
"""Number of tokens of a block that FlashAttention 3 reads in place. FlashAttention 3 supports any
size. With small blocks, sequences share more of a prefix."""
TRITON_BLOCK_SIZE = 64
"""Number of tokens of a block that the Triton kernels read in place. Each iteration over keys reads
one block or a part of a block."""

CPU_BYTES = 1 << 30
CPU_PART = 0.25
"""The maximum size of the cache on a CPU is this fraction of the free memory, but at most
``CPU_BYTES``."""


Kernel = Literal["gather", "varlen", "fa3", "triton"]
"""The attention: SDPA over gathered blocks, or a kernel that reads blocks in place."""
_ATTENTIONS: dict[Kernel, str] = {
    "gather": "SDPA over gathered blocks",
    "varlen": "FlashAttention over blocks",
    "fa3": "FlashAttention 3 over blocks",
    "triton": "Triton over blocks",
}


class Layout(NamedTuple):
    """The block size of the KV cache, and the attention that reads the blocks."""

    block_size: int
    """Number of tokens of a block."""
    kernel: Kernel
    why: str = ""
    """The reason why no GPU kernel reads the blocks in place; empty if a GPU kernel does."""

    @property
    def in_place(self) -> bool:
        """Whether a GPU kernel reads the blocks in place. If not, the blocks are gathered for SDPA,
        or native code on a CPU reads them."""
        return self.kernel != "gather"

    @property
    def attention(self) -> str:
        """The name of the attention, for logs and users."""
        return _ATTENTIONS[self.kernel]


class LayerShape(NamedTuple):
    """The shapes of a layer's keys ``[kv_heads, key_dim]`` and values ``[kv_heads, value_dim]`` for
    one token."""

    kv_heads: int
    key_dim: int
    value_dim: int


class KVCache:
    """The paged keys and values. Slot ``block * block_size + offset`` has the key and the value of
    one token.

    ``layers`` maps a layer's index to keys ``[num_blocks, block_size, kv_heads, key_dim]`` and
    values ``[num_blocks, block_size, kv_heads, value_dim]``.
    """

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        # Unwritten memory must not contain NaN: attention multiplies the values at masked positions
        # by 0, and 0 * NaN is NaN.
        self.layers = {
            index: (
                torch.zeros(
                    num_blocks, block_size, s.kv_heads, s.key_dim, dtype=dtype, device=device
                ),
                torch.zeros(
                    num_blocks, block_size, s.kv_heads, s.value_dim, dtype=dtype, device=device
                ),
            )
            for index, s in shapes.items()
        }
        self._slots = {
            index: (keys.flatten(0, 1), values.flatten(0, 1))
            for index, (keys, values) in self.layers.items()
        }
        """Views of ``layers`` by slot: ``[num_blocks * block_size, kv_heads, dim]``."""

    def write(
        self, layer: int, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Writes new keys and values ``[num_tokens, kv_heads, dim]`` to their slots."""
        keys, values = self._slots[layer]
        keys.index_copy_(0, slot_mapping, key.to(keys.dtype))
        values.index_copy_(0, slot_mapping, value.to(values.dtype))

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies blocks, given as (from, to)."""
        if not copies:
            return
        device = next(iter(self.layers.values()))[0].device
        source, target = on_device(np.array(copies, dtype=np.int64), device).T
        for pair in self.layers.values():
            for tensor in pair:
                tensor[target] = tensor[source]

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Sets blocks, which may contain NaN, to zeros."""
        device = next(iter(self.layers.values()))[0].device
        at = on_device(np.array(blocks, dtype=np.int64), device)
        for pair in self.layers.values():
            for tensor in pair:
                tensor.index_fill_(0, at, 0)


class Mirror:
    """A contiguous copy of the keys and values of the sequences that decode. It is reused from step
    to step.

    A layer's keys and values are ``[batch * kv_heads, room, dim]``. ``room``: capacity for each
    sequence, in tokens; a multiple of the block size. The keys of one head are contiguous.
    """

    def __init__(self, batch: int, room: int) -> None:
        self._batch = batch
        self.room = room
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._places: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Views of the tensors in ``_layers``: ``[batch * kv_heads * room, dim]``."""

    def fill(
        self, layer: int, cache: tuple[torch.Tensor, torch.Tensor], blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies the blocks ``[batch, count]`` of a layer's ``cache`` into the mirror. Returns the
        mirror's keys and values of the layer."""
        made = self._layers.get(layer)
        if made is None:
            keys, values = cache
            made = self._layers[layer] = (self._zeros(keys), self._zeros(values))
            self._places[layer] = (made[0].flatten(0, 1), made[1].flatten(0, 1))
        for paged, mirror in zip(cache, made, strict=True):
            gathered = paged.index_select(0, blocks.flatten())
            rows = gathered.view(self._batch, -1, *paged.shape[2:]).transpose(1, 2)
            mirror.view(self._batch, -1, *mirror.shape[1:])[:, :, : rows.shape[2]] = rows
        return made

    def add(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the keys ``k`` and values ``v`` ``[num_tokens, kv_heads, dim]`` of new tokens.
        Returns the mirror's keys and values of the layer.

        ``at`` ``[num_tokens * kv_heads]``: for each token and head, the row of ``_places``, which
        is ``(sequence * kv_heads + head) * room + position``.
        """
        keys, values = self._places[layer]
        keys.index_copy_(0, at, k.flatten(0, 1).to(keys.dtype))
        values.index_copy_(0, at, v.flatten(0, 1).to(values.dtype))
        return self._layers[layer]

    def _zeros(self, paged: torch.Tensor) -> torch.Tensor:
        kv_heads, dim = paged.shape[2:]
        return paged.new_zeros(self._batch * kv_heads, self.room, dim)


def token_bytes(shapes: Mapping[int, LayerShape], dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values over all layers."""
    per_token = sum(s.kv_heads * (s.key_dim + s.value_dim) for s in shapes.values())
    return per_token * dtype.itemsize


def cpu_bytes() -> int:
    """The default size of the cache on a CPU, in bytes, which depends on the memory that is free
    now."""
    return min(CPU_BYTES, int(psutil.virtual_memory().available * CPU_PART))
