"""Runs the model over a step's batch, on this rank and on the others."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from . import varlen
from .attention import NAME, NAME_COMPILED, Group, PackedBatch, attend
from .fused import Attend
from .graphs import DecodeGraphs
from .head import packed_head
from .kv_cache import KVCache, Layout, Mirror, token_bytes
from .loader import LoadedModel
from .packing import Mirrors, Packed, PackedGroup, pack
from .projections import packing_budget
from .scheduler import Batch, Chunk


class Runner:
    """Owns the model and its KV cache of ``num_blocks`` blocks, on every rank.

    ``compiled``: through torch.compile, which makes the first steps slow.
    """

    def __init__(
        self, loaded: LoadedModel, num_blocks: int, layout: Layout, compiled: bool = False
    ) -> None:
        self._device = loaded.device
        self._ranks = loaded.ranks
        self._name = loaded.name
        self._layout = layout
        model = loaded.model
        gathered = NAME_COMPILED if compiled else NAME
        model.set_attn_implementation(varlen.NAME if layout.in_place else gathered)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        plain = self._ranks is None and self._keeps_logits and not compiled
        self._decoder = loaded.decoder if plain else None
        self._attend: Attend = varlen.attend if layout.in_place else attend
        if self._decoder is not None:
            self._decoder.pack(packing_budget())
        self._head = packed_head(model) if plain and self._decoder is None else None
        self._model = torch.compile(model, dynamic=True) if compiled else model
        # One block more than is allocated: graphs write to it for rows that are padding.
        self._cache = KVCache(
            loaded.layers, num_blocks + 1, layout.block_size, loaded.dtype, loaded.device
        )
        self._graphs: DecodeGraphs | None = None
        if layout.in_place and plain:
            width = -(-loaded.context_length // layout.block_size)
            self._graphs = DecodeGraphs(self._forward, self._cache, num_blocks, width)
        # A GPU reads scattered blocks at full speed: a mirror would only take memory.
        self._mirrors: Mirrors | None = None
        if self._device.type == "cpu":
            per_token = token_bytes(loaded.layers, loaded.dtype)
            self._mirrors = Mirrors(per_token, layout.block_size)
        self._mirror: dict[int, Mirror] = {}
        if self._ranks is not None:
            self._ranks.open(self._name, num_blocks, layout, compiled)

    def run(self, batch: Batch) -> tuple[list[Chunk], torch.Tensor]:
        """The forward of a step: the chunks in the order of their rows, and the logits
        ``[rows, vocab]`` (float32) of the tokens from each chunk's ``first_row`` to its end."""
        size, in_place, _ = self._layout
        chunks, packed = pack(batch, size, spans=in_place, mirrors=self._mirrors)
        if self._ranks is None:
            return chunks, self.forward(packed)
        with self._ranks.forward(self._name, packed):
            return chunks, self.forward(packed)

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Sets blocks to zeros, since they contain NaN."""
        self._cache.clear_blocks(blocks)
        if self._ranks is not None:
            self._ranks.clear(self._name, blocks)

    @torch.inference_mode()
    def forward(self, packed: Packed) -> torch.Tensor:
        """This rank's part of a forward: the logits of ``packed.rows``."""
        self._cache.copy_blocks(packed.copies)
        if self._graphs is not None:
            logits = self._graphs.run(packed)
            if logits is not None:
                return logits.float()
        rows = self._tensor(packed.rows)
        ids, positions = self._tensor(packed.ids), self._tensor(packed.positions)
        return self._forward(ids, positions, rows, self._context(packed)).float()

    def _forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        context: PackedBatch | varlen.VarlenBatch,
    ) -> torch.Tensor:
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
        mirror = added = None
        if group.mirror:
            mirror = self._mirror.setdefault(group.mirror, Mirror(group.batch, group.room))
            if group.continues:
                places = [i * group.room + at for i, at in enumerate(group.positions)]
                added = self._tensor(places)
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
            mirror=mirror,
            added=added,
        )

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)
