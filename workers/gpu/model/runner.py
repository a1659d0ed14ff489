"""Runs the model over a step's batch, on this rank and on the others."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ....protocol.messages import ForwardPath
from ....protocol.sampling import Sampling
from ..engine.packing import Mirrors, Packed, PackedGroup, pack
from ..engine.scheduler import Batch, Chunk
from ..engine.sequence import Sequence
from .cpu_native.decoder import NativeDecoder, Unsupported, is_native
from .cpu_native.head import PackedHead, packed_head
from .cpu_native.threads import ThreadChooser
from .cuda import varlen
from .cuda.graphs import DecodeGraphs
from .device_queue import DeviceQueue, InlineQueue, Work, on_device
from .fused.decoder import Attend, FusedDecoder
from .fused.projections import packing_budget
from .kv_cache import KVCache, Layout, Mirror, token_bytes
from .loader import FUSED_TOLERANCE, PROBE_TOLERANCE, LoadedModel, OnProgress, difference
from .transformers.attention import NAME, NAME_COMPILED, Group, PackedBatch, attend
from .triton import attention as triton_attention
from .triton.decoder import NotFusible, TritonDecoder

log = logging.getLogger(__name__)

PROBE_TOKENS = 4
"""Number of tokens with which a faster forward is compared with the model's own."""
MAX_COMPILED_VARIANTS = 64
"""Compiled forms of one function. torch.compile makes one for each combination of no, one or
several rows, one or several tokens, and the classes that share a decorator; its default is 8."""


@dataclass(slots=True)
class Forward:
    """A forward that has been submitted to the device."""

    num_rows: int
    work: Work[torch.Tensor]
    """The logits ``[num_rows, vocab]`` (float32) of the tokens from each chunk's ``first_row`` to
    its end."""


class Runner:
    """Owns the model and its KV cache of ``num_blocks`` blocks, on every rank.

    ``compiled``: run through torch.compile, if its logits equal the model's own and there is one
    rank; the first steps of each kind are slow. ``queue``: the device queue of rank 0.
    ``fixed_threads``: forwards on a CPU use all threads of torch, even if fewer are faster.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        num_blocks: int,
        layout: Layout,
        compiled: bool = False,
        queue: DeviceQueue | None = None,
        fixed_threads: bool = False,
    ) -> None:
        self.queue: DeviceQueue = queue or InlineQueue()
        self._device = loaded.device
        self._ranks = loaded.ranks
        self._name = loaded.name
        self._layout = layout
        model = loaded.model
        model.set_attn_implementation(_attention_name(layout))
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._model: Any = model
        self._decoder: FusedDecoder | None = None
        self._head: PackedHead | None = None
        self._native: NativeDecoder | None = None
        self._threads: ThreadChooser | None = None
        self._attend = _attend_of(layout)
        self._mirror: dict[int, Mirror] = {}
        # One extra block is never allocated to sequences: graphs and probes write to it.
        self._cache = KVCache(
            loaded.layers, num_blocks + 1, layout.block_size, loaded.dtype, loaded.device
        )
        compiled = compiled and self._compile()
        plain = self._ranks is None and self._keeps_logits and not compiled
        if plain:
            self._decoder = loaded.decoder
        if self._decoder is not None:
            self._decoder.pack(packing_budget())
        elif plain:
            self._head = packed_head(model)
        self._why_no_kernels = "its layers run as transformers' modules" if layout.triton else ""
        self._triton: TritonDecoder | None = None
        if self._decoder is not None and layout.triton:
            self._triton = self._triton_decoder(self._decoder)
        self._graphs: DecodeGraphs | None = None
        self._why_no_graphs = self._refused_graphs(compiled)
        self._longest = -(-loaded.context_length // layout.block_size)
        """Blocks of the longest sequence."""
        # A GPU reads scattered blocks at full speed: a mirror would only take memory.
        self._mirrors: Mirrors | None = None
        if self._device.type == "cpu":
            if self._ranks is None and not fixed_threads:
                self._threads = ThreadChooser(torch.get_num_threads())
            per_token = token_bytes(loaded.layers, loaded.dtype)
            self._mirrors = Mirrors(per_token, layout.block_size)
        if self._decoder is not None and self._device.type == "cpu" and not layout.in_place:
            try:
                self._native = self._native_decoder(self._decoder)
            except Unsupported as why:
                log.info("%s: torch computes all of its steps: %s", self._name, why)
        if self._ranks is not None:
            self._ranks.open(self._name, num_blocks, layout)

    def _refused_graphs(self, compiled: bool) -> str:
        """The reason why no CUDA graphs can be captured; empty if they can."""
        if not self._layout.in_place:
            return "the attention gathers blocks, and their number differs from step to step"
        if self._ranks is not None:
            return "the model is spread over several devices"
        if compiled:
            return "torch.compile runs the model"
        if not self._keeps_logits:
            return "the model computes the logits of all tokens"
        return ""

    def capture_graphs(self, max_batch: int, on_progress: OnProgress) -> None:
        """Captures the CUDA graphs of steps that decode up to ``max_batch`` sequences, if
        possible."""
        if self._why_no_graphs:
            return
        spare = self._cache.num_blocks - 1
        self._graphs = DecodeGraphs(self._cache, spare, self._longest, max_batch)
        self._graphs.capture(self._forward, on_progress)
        self._why_no_graphs = self._graphs.why
        self._cache.clear_blocks([spare])

    @property
    def path(self) -> ForwardPath:
        """The attention kernel, CUDA graphs and fallbacks of the forward."""
        found = ForwardPath(
            attention=self._layout.attention,
            graphs=len(self._graphs) if self._graphs is not None else 0,
        )
        if self._layout.in_place or self._device.type != "cpu":
            reasons = {
                "attention": self._layout.why,
                "layers": self._why_no_kernels,
                "CUDA graphs": self._why_no_graphs,
            }
            found.fallbacks = [f"{name}: {why}" for name, why in reasons.items() if why]
        return found

    def pack(self, batch: Batch) -> tuple[list[Chunk], Packed]:
        """The chunks of a step in the order of their rows, and the forward that computes them."""
        size, in_place = self._layout.block_size, self._layout.in_place
        mirrors = self.mirrors_for(batch.num_tokens, len(batch.chunks))
        return pack(batch, size, spans=in_place, mirrors=mirrors)

    def mirrors_for(self, num_tokens: int, num_sequences: int) -> Mirrors | None:
        """The mirrors for a forward of this size; None if the forward reads keys and values from
        their blocks. Existing mirrors then become invalid."""
        if self._native is None or not is_native(num_tokens, num_sequences):
            return self._mirrors
        self.forget_mirrors()
        return None

    def launch(self, packed: Packed, drawn: Callable[[], torch.Tensor] | None = None) -> Forward:
        """Submits the forward of a step to the device. ``drawn`` returns the tokens of the previous
        sampling, for ids that the host does not know; it is called in the order of the queue."""
        if packed.copies:
            # Block copies are separate work: if the forward fails, the block tables still need
            # them.
            self.queue.submit(lambda: self._copy_blocks(packed))
        work = self.queue.submit(lambda: self._run(packed, drawn))
        return Forward(len(packed.rows), work)

    def forget_mirrors(self) -> None:
        """Makes the mirrors invalid, because a forward that was launched was not computed."""
        if self._mirrors is not None:
            self._mirrors.forget()

    def clear_blocks(self, blocks: Sequences[int]) -> None:
        """Sets blocks that contain NaN to zeros."""
        self.queue.submit(lambda: self._cache.clear_blocks(blocks))
        if self._ranks is not None:
            self._ranks.clear(self._name, blocks)

    def follow(self, packed: Packed) -> None:
        """Runs this rank's part of a forward that rank 0 has sent."""
        self._copy_blocks(packed)
        self.forward(packed)

    def forward(self, packed: Packed, drawn: torch.Tensor | None = None) -> torch.Tensor:
        """Runs this rank's part of a forward, and returns the logits of ``packed.rows``."""
        native = self._native
        if native is not None:
            num_sequences = sum([group.batch for group in packed.groups])
            if is_native(len(packed.ids), num_sequences):
                return self._natively(native, _known_ids(packed, drawn), packed)
        return self._by_torch(packed, drawn)

    @torch.inference_mode()
    def _by_torch(self, packed: Packed, drawn: torch.Tensor | None) -> torch.Tensor:
        ids = self._ids(packed, drawn)
        if self._graphs is not None:
            logits = self._graphs.run(packed, ids)
            if logits is not None:
                # The next replay overwrites the logits, and a deferred sequence keeps its row.
                return logits.to(torch.float32, copy=True)
        rows, positions = self._tensor(packed.rows), self._tensor(packed.positions)
        return self._forward(ids, positions, rows, self._context(packed)).float()

    def _ids(self, packed: Packed, drawn: torch.Tensor | None) -> torch.Tensor:
        """The token ids of a forward on the device, including the tokens that were just drawn
        there."""
        if drawn is None or packed.fed is None:
            return self._tensor(packed.ids)
        tokens = drawn if packed.drawn is None else drawn[self._tensor(packed.drawn)]
        if len(packed.fed) == len(packed.ids):
            return tokens
        ids = self._tensor(packed.ids)
        ids[self._tensor(packed.fed)] = tokens
        return ids

    def _run(self, packed: Packed, drawn: Callable[[], torch.Tensor] | None) -> torch.Tensor:
        """Runs rank 0's part of a forward, in the order of the queue."""
        tokens = drawn() if drawn is not None and packed.fed is not None else None
        if self._ranks is None:
            return self.forward(packed, tokens)
        with self._ranks.forward(self._name, packed):
            return self.forward(packed, tokens)

    @torch.inference_mode()
    def _copy_blocks(self, packed: Packed) -> None:
        self._cache.copy_blocks(packed.copies)

    @torch.inference_mode()
    def _compile(self) -> bool:
        """Switches to torch.compile. Returns False, and logs the reason, if the logits differ from
        the model's own or there are several ranks."""
        if self._ranks is not None:
            log.warning("%s runs without torch.compile, as it has several ranks", self._name)
            return False
        # This import takes more than a second.
        from torch._dynamo import config

        model, why = self._model, ""
        prefill, decode = self._probe(0, PROBE_TOKENS), self._probe(PROBE_TOKENS, 1)
        wanted = [self._compute_probe(packed).clone() for packed in (prefill, decode)]
        limit = FUSED_TOLERANCE if model.dtype == torch.float32 else PROBE_TOLERANCE
        config.recompile_limit = MAX_COMPILED_VARIANTS
        if not self._layout.in_place:
            model.set_attn_implementation(NAME_COMPILED)
        self._model = torch.compile(model, dynamic=True)
        try:
            found = [self._compute_probe(packed) for packed in (prefill, decode)]
            for own, other in zip(wanted, found, strict=True):
                away = difference(other, own)
                if not away <= limit:
                    why = f"its logits would be off by {away:.3g} of their spread"
        except Exception as error:
            why = f"it failed: {error}"
        self._cache.clear_blocks([self._cache.num_blocks - 1])
        if why:
            log.warning("%s runs without torch.compile: %s", self._name, why)
            self._model = model
            model.set_attn_implementation(_attention_name(self._layout))
        return not why

    def _probe(self, start: int, count: int) -> Packed:
        """A forward of ``count`` tokens from position ``start`` in the block that is never
        allocated. Logits are computed for the last token."""
        tokens = list(range(start + count))
        sequence = Sequence(0, 0, tokens, len(tokens), Sampling(), len(tokens))
        sequence.block_table.blocks.append(self._cache.num_blocks - 1)
        batch = Batch([Chunk(sequence, start, start + count)])
        return pack(batch, self._layout.block_size, spans=self._layout.in_place)[1]

    def _compute_probe(self, packed: Packed) -> torch.Tensor:
        """The logits of a probe, computed by torch."""
        ids, rows, positions = map(self._tensor, (packed.ids, packed.rows, packed.positions))
        return self._compute(ids, positions, rows, self._context(packed)).float()

    def _triton_decoder(self, decoder: FusedDecoder) -> TritonDecoder | None:
        """The decoder's layers in fewer kernels. None, with the reason in ``path``, if they are not
        supported or the logits differ."""
        try:
            found = TritonDecoder(decoder)
            prompt, step = self._probe(0, PROBE_TOKENS), self._probe(PROBE_TOKENS, 1)
            for packed in (prompt, step):
                wanted = self._compute_probe(packed).clone()
                self._triton = found
                away = difference(self._compute_probe(packed), wanted)
                self._triton = None
                limit = FUSED_TOLERANCE if self._model.dtype == torch.float32 else PROBE_TOLERANCE
                if not away <= limit:
                    raise NotFusible(f"the logits would be off by {away:.3g} of their spread")
        except Exception as error:
            self._triton = None
            self._why_no_kernels = str(error)
            return None
        finally:
            self._cache.clear_blocks([self._cache.num_blocks - 1])
        self._why_no_kernels = ""
        return found

    def _native_decoder(self, decoder: FusedDecoder) -> NativeDecoder:
        """The native code for forwards of few tokens. Raises Unsupported, also if its logits differ
        from torch's."""
        native = NativeDecoder(decoder, self._cache, self._layout.block_size)
        packed = self._probe(0, PROBE_TOKENS)
        found = native.forward(packed.ids, packed, 1)
        wanted = self._compute_probe(packed)
        self._cache.clear_blocks([self._cache.num_blocks - 1])
        away = difference(found, wanted)
        if not away <= FUSED_TOLERANCE:
            raise Unsupported(f"its logits would be off by {away:.3g} of their spread")
        return native

    def _natively(self, native: NativeDecoder, ids: np.ndarray, packed: Packed) -> torch.Tensor:
        """Runs a forward of few tokens in native code."""
        if self._threads is None:
            return native.forward(ids, packed, torch.get_num_threads())
        threads = self._threads.choose(len(ids))
        began = time.perf_counter()
        logits = native.forward(ids, packed, threads)
        self._threads.observe(len(ids), time.perf_counter() - began)
        return logits

    def _forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        context: PackedBatch | varlen.VarlenBatch,
    ) -> torch.Tensor:
        if self._threads is None:
            return self._compute(ids, positions, rows, context)
        torch.set_num_threads(self._threads.choose(len(ids)))
        began = time.perf_counter()
        try:
            return self._compute(ids, positions, rows, context)
        finally:
            self._threads.observe(len(ids), time.perf_counter() - began)
            torch.set_num_threads(self._threads.most)

    def _compute(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        context: PackedBatch | varlen.VarlenBatch,
    ) -> torch.Tensor:
        if self._triton is not None:
            return self._triton.forward(
                ids, positions, rows, context, triton_attention.attend_stored
            )
        if self._decoder is not None:
            return self._decoder.forward(ids, positions, rows, context, self._attend)
        keep = {"logits_to_keep": rows} if self._keeps_logits else {}
        with self._head.applied() if self._head is not None else nullcontext():
            logits: torch.Tensor = self._model(
                input_ids=ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                packed_batch=context,
                **keep,
            ).logits[0]
        return logits if self._keeps_logits else logits[rows]

    def _context(self, packed: Packed) -> PackedBatch | varlen.VarlenBatch:
        """The metadata of a forward for the attention function."""
        slot_mapping = self._tensor(packed.slot_mapping)
        if packed.spans is not None:
            return varlen.batch_of(packed.spans, self._cache, slot_mapping)
        kept = {g.mirror for g in packed.groups}
        self._mirror = {n: mirror for n, mirror in self._mirror.items() if n in kept}
        return PackedBatch(self._cache, slot_mapping, [self._group(g) for g in packed.groups])

    def _group(self, group: PackedGroup) -> Group:
        shape = (group.batch, group.width)
        mirror = None
        if group.mirror:
            mirror = self._mirror.setdefault(group.mirror, Mirror(group.batch, group.room))
        return Group(
            start=group.start,
            end=group.end,
            width=group.width,
            blocks=self._tensor(group.blocks),
            length=group.length,
            positions=self._tensor(group.positions).view(shape),
            rows=None if group.rows is None else self._tensor(group.rows).view(shape),
            places=None if group.places is None else self._tensor(group.places),
            fresh=group.fresh,
            level=group.width == 1 and bool((group.positions == group.positions[0]).all()),
            mirror=mirror,
            continues=group.continues,
        )

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return on_device(values, self._device)


def _attention_name(layout: Layout) -> str:
    """The name of the attention for transformers."""
    if layout.triton:
        return triton_attention.NAME
    return varlen.NAME if layout.in_place else NAME


def _attend_of(layout: Layout) -> Attend:
    """The attention of a ``FusedDecoder``."""
    if layout.triton:
        return triton_attention.attend
    return varlen.attend if layout.in_place else attend


def _known_ids(packed: Packed, drawn: torch.Tensor | None) -> np.ndarray:
    """The token ids of a forward on a CPU, where the tokens that were just drawn are known."""
    if drawn is None or packed.fed is None:
        return packed.ids
    tokens = drawn.numpy()
    ids = packed.ids.copy()
    ids[packed.fed] = tokens if packed.drawn is None else tokens[packed.drawn]
    return ids
