"""Short forwards with which a faster backend is compared with a slower backend."""

from __future__ import annotations

import torch

from ....protocol.sampling import Sampling
from ..engine.packing import Packed, pack
from ..engine.scheduler import Batch, Chunk
from ..engine.sequence import Sequence
from .backend import ForwardBackend
from .kv_cache import Layout
from .step_tensors import StepTensors

PROBE_TOKENS = 4
"""Number of tokens of the prompt with which a faster forward is compared with the model's own."""


class Probes:
    """Makes forwards that use only the last block of a KV cache. This block is never allocated to a
    sequence."""

    def __init__(self, tensors: StepTensors, layout: Layout) -> None:
        self._tensors = tensors
        self._layout = layout
        self._spare = tensors.cache.num_blocks - 1

    def prompt(self) -> Packed:
        """A forward of ``PROBE_TOKENS`` tokens; logits are computed for the last token."""
        return self._packed(0, PROBE_TOKENS)

    def decode(self) -> Packed:
        """A forward of the token after the tokens of ``prompt``."""
        return self._packed(PROBE_TOKENS, 1)

    def logits(self, backend: ForwardBackend, packed: Packed) -> torch.Tensor:
        """The logits of a forward, computed by ``backend.compute``: float32 ``[1, vocab]``."""
        tensors = self._tensors
        ids, rows, positions = map(tensors.tensor, (packed.ids, packed.rows, packed.positions))
        return backend.compute(ids, positions, rows, tensors.context(packed)).float()

    def clear(self) -> None:
        """Clears the block to which the forwards have written."""
        self._tensors.cache.clear_blocks([self._spare])

    def _packed(self, start: int, count: int) -> Packed:
        tokens = list(range(start + count))
        sequence = Sequence(0, 0, tokens, len(tokens), Sampling(), len(tokens))
        sequence.block_table.blocks.append(self._spare)
        batch = Batch([Chunk(sequence, start, start + count)])
        return pack(batch, self._layout.block_size, spans=self._layout.in_place)[1]
