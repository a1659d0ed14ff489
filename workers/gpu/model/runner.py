"""Runs the model over a step's batch, on this rank and on the other ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

import numpy as np
import torch
from msgspec import structs

from ....protocol.messages import ForwardPath
from ..engine.packing import Mirrors, Packed, pack
from ..engine.scheduler import Batch, Chunk
from .backends import ForwardOptions, choose_backend
from .cpu_native.library import instruction_set
from .cuda.backend import CudaBackend
from .cuda.graphs import DecodeGraphs
from .device_queue import DeviceQueue, InlineQueue, Work
from .device_traits import traits_of
from .kv_cache import KVCache, Layout, token_bytes
from .loader import LoadedModel, OnProgress
from .lora.backend import AdaptedBackend
from .step_tensors import StepTensors

log = logging.getLogger(__name__)

DEFAULTS = ForwardOptions()
NATIVE_ATTENTION = "native code over blocks"
"""The name of the attention in logs and answers to users, if native code computes all steps."""


@dataclass(slots=True)
class Forward:
    """A forward that was submitted to the device queue."""

    num_rows: int
    work: Work[torch.Tensor]
    """The work that computes the logits ``[num_rows, vocab]`` (float32). In each chunk, these are
    the logits of the tokens from the chunk's ``first_row`` to its end."""


class Runner:
    """Owns the model and its KV cache of ``num_blocks`` blocks. Each rank has a runner.

    ``queue``: the device queue to which rank 0 submits its work.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        num_blocks: int,
        layout: Layout,
        queue: DeviceQueue | None = None,
        options: ForwardOptions = DEFAULTS,
    ) -> None:
        self.queue: DeviceQueue = queue or InlineQueue()
        self._traits = traits_of(loaded.device)
        self._ranks = loaded.ranks
        self._name = loaded.name
        self._layout = layout
        # The cache has one more block, which is never allocated to a sequence. Graphs and probes
        # write to this block.
        self._cache = KVCache(
            loaded.layers, num_blocks + 1, layout.block_size, loaded.dtype, loaded.device
        )
        tensors = StepTensors(self._cache, loaded.device)
        self.backend = choose_backend(loaded, tensors, layout, options)
        self._adapted: AdaptedBackend | None = None
        """The forward of tokens with LoRA adapters; None if the model does not have adapters."""
        if loaded.adapters is not None:
            # ``tensors`` keeps the mirrors of the last forward only.
            own = StepTensors(self._cache, loaded.device)
            self._adapted = AdaptedBackend(own, loaded.model, loaded.adapters)
        self._loaded = loaded
        self._longest = -(-loaded.context_length // layout.block_size)
        """Number of blocks of the longest sequence."""
        self._mirrors: Mirrors | None = None
        if not self._traits.scattered_reads:
            per_token = token_bytes(loaded.layers, loaded.dtype)
            self._mirrors = Mirrors(per_token, layout.block_size)
        if self._ranks is not None:
            self._ranks.open(self._name, num_blocks, layout)

    @property
    def _why_no_graphs(self) -> str:
        """The reason why CUDA graphs cannot be captured; empty if they can."""
        if not self._layout.in_place:
            return "the attention gathers blocks, and their number differs from step to step"
        if self._ranks is not None:
            return "the model is spread over several devices"
        return self.backend.why_no_graphs

    def capture_graphs(self, max_batch: int, on_progress: OnProgress) -> None:
        """Captures the CUDA graphs of steps that decode up to ``max_batch`` sequences. Does nothing
        if graphs cannot be captured."""
        if self._why_no_graphs:
            return
        spare = self._cache.num_blocks - 1
        graphs = DecodeGraphs(self._cache, spare, self._longest, max_batch)
        graphs.capture(self.backend.compute, on_progress)
        self.backend = CudaBackend(self.backend, graphs)
        self._cache.clear_blocks([spare])

    def drop_graphs(self) -> None:
        """Drops the CUDA graphs, so that further steps run without graphs and can be compared with
        steps that had graphs."""
        if isinstance(self.backend, CudaBackend):
            self.backend = self.backend.base

    @property
    def path(self) -> ForwardPath:
        """How the steps are computed, for logs and users."""
        why = self.backend.why_not_exact
        found = ForwardPath(
            attention=self._layout.attention if why else NATIVE_ATTENTION,
            graphs=self.backend.num_graphs,
            exact=not why,
            why_not_exact=why,
            arithmetic="" if why else instruction_set(),
            weights=self._loaded.weights,
            version=self._loaded.version,
            quantized=self._loaded.quantized,
        )
        if self._layout.in_place or not self._traits.host_memory:
            reasons = {
                "attention": self._layout.why,
                "layers": self.backend.why_no_kernels if self._layout.in_place else "",
                "CUDA graphs": self._why_no_graphs,
            }
            found.fallbacks = [f"{name}: {why}" for name, why in reasons.items() if why]
        return found

    def path_of(self, adapter: str) -> ForwardPath:
        """The forward path of tokens with a LoRA adapter."""
        assert self._adapted is not None
        assert self._loaded.adapters is not None
        return structs.replace(
            self.path,
            attention=self._layout.attention,
            graphs=0,
            fallbacks=[],
            exact=False,
            why_not_exact=self._adapted.why_not_exact,
            arithmetic="",
            weights=f"{self._loaded.weights}+{adapter}@{self._loaded.adapters.hash(adapter)}",
        )

    def refresh(self) -> None:
        """Makes all copies of weights again, after the weights have been changed in place. The
        mirrors become invalid, because they have keys and values of the old weights."""
        self.forget_mirrors()
        self.backend.refresh()

    def pack(self, batch: Batch) -> tuple[list[Chunk], Packed]:
        """Returns the chunks of a step in the order of their rows, and the inputs of the step's
        forward."""
        if self._adapted is not None:
            adapted = [c for c in batch.chunks if c.sequence.block_table.adapter]
            if adapted:
                return self._pack_adapted(batch, adapted)
        return self._pack(batch)

    def _pack(self, batch: Batch) -> tuple[list[Chunk], Packed]:
        size, in_place = self._layout.block_size, self._layout.in_place
        mirrors = self.mirrors_for(batch.num_tokens, len(batch.chunks))
        return pack(batch, size, spans=in_place, mirrors=mirrors)

    def _pack_adapted(self, batch: Batch, adapted: list[Chunk]) -> tuple[list[Chunk], Packed]:
        """Does the work of ``pack`` for a batch in which some chunks have LoRA adapters. The other
        chunks get a separate forward, so that their logits do not depend on the adapters."""
        size, in_place = self._layout.block_size, self._layout.in_place
        chunks, packed = pack(Batch(adapted), size, spans=in_place)
        numbers = [chunk.sequence.block_table.adapter for chunk in chunks]
        packed.adapters = np.repeat(numbers, [chunk.end - chunk.start for chunk in chunks])
        others = [c for c in batch.chunks if not c.sequence.block_table.adapter]
        if not others:
            packed.copies = batch.copies
            return chunks, packed
        first_chunks, first = self._pack(Batch(others, batch.copies))
        first.further = packed
        return first_chunks + chunks, first

    def mirrors_for(self, num_tokens: int, num_sequences: int) -> Mirrors | None:
        """The mirrors (contiguous copies of keys and values) for a forward of this size. If the
        forward reads blocks in place, returns None, and all existing mirrors become invalid."""
        if not self.backend.reads_blocks(num_tokens, num_sequences):
            return self._mirrors
        self.forget_mirrors()
        return None

    def launch(self, packed: Packed, drawn: Callable[[], torch.Tensor] | None = None) -> Forward:
        """Submits the forward of a step to the device queue.

        ``drawn`` is called when the queue reaches the forward. It returns the tokens that the
        previous step has sampled. The ids of these tokens are not on the host yet.
        """
        if packed.copies:
            # The blocks are copied in a separate ``Work``. They must be copied even if the forward
            # fails, because the block tables already contain the new blocks.
            self.queue.submit(lambda: self._copy_blocks(packed))
        work = self.queue.submit(lambda: self._run(packed, drawn))
        return Forward(packed.num_rows, work)

    def forget_mirrors(self) -> None:
        """Makes all mirrors invalid, for example because a launched forward was not computed."""
        if self._mirrors is not None:
            self._mirrors.forget()

    def clear_blocks(self, blocks: Sequences[int]) -> None:
        """Sets blocks to zeros, because they may contain NaN."""
        self.queue.submit(lambda: self._cache.clear_blocks(blocks))
        if self._ranks is not None:
            self._ranks.clear(self._name, blocks)

    def follow(self, packed: Packed) -> None:
        """Runs this rank's part of a forward, on a rank other than 0."""
        self._copy_blocks(packed)
        self.forward(packed)

    def forward(self, packed: Packed, drawn: torch.Tensor | None = None) -> torch.Tensor:
        """Runs this rank's part of a forward. Returns the logits of ``packed.rows``, followed by
        the logits of ``packed.further`` if the batch has a second forward."""
        if packed.adapters is not None:
            assert self._adapted is not None
            return self._adapted.forward(packed, drawn)
        logits = self.backend.forward(packed, drawn)
        if packed.further is None:
            return logits
        with torch.inference_mode():
            return torch.cat((logits, self.forward(packed.further, drawn)))

    def _run(self, packed: Packed, drawn: Callable[[], torch.Tensor] | None) -> torch.Tensor:
        """Runs rank 0's part of a forward, when the queue reaches the forward."""
        tokens = drawn() if drawn is not None and packed.awaits_drawn else None
        if self._ranks is None:
            return self.forward(packed, tokens)
        with self._ranks.forward(self._name, packed):
            return self.forward(packed, tokens)

    @torch.inference_mode()
    def _copy_blocks(self, packed: Packed) -> None:
        self._cache.copy_blocks(packed.copies)
