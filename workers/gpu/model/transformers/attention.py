"""Attention over the paged KV cache, for models that use transformers' attention interface.

The tokens of a step, from all sequences, are packed into one row. ``paged_attention`` is registered
with transformers under the name ``tokenbus``, and each layer calls it. The model receives the
``PackedBatch`` as an extra keyword argument, and passes it to this function. The function writes
the new keys and values to the slots of ``slot_mapping``. Each group of sequences then attends over
its gathered blocks or over its mirror.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ..kv_cache import KVCache, Mirror

NAME = "tokenbus"
NAME_COMPILED = "tokenbus_compiled"
_NOTHING = torch.empty(())
"""The addend of ``torch.baddbmm``. If ``beta`` is 0, torch does not read the addend."""


@dataclass(slots=True)
class Group:
    """Chunks of similar size, padded to a rectangle of ``batch`` rows of ``width`` tokens. A chunk
    is the tokens of one sequence in a step.

    The chunks are the packed tokens ``[start, end)``. Chunks of one token need no padding.
    """

    start: int
    end: int
    width: int
    blocks: torch.Tensor
    """``[batch * max_blocks]``: the blocks of each sequence's keys, padded with block 0."""
    length: int
    """The greatest end position of the chunks, in tokens."""
    positions: torch.Tensor
    """``[batch, width]``: the position of each token in its sequence."""
    rows: torch.Tensor | None
    """``[batch, width]``: the index of the packed token at each place of the rectangle; None at
    width 1."""
    places: torch.Tensor | None
    """``[end - start]``: the place of each packed token in the flattened rectangle."""
    fresh: bool = False
    """Whether all chunks begin at position 0: the new tokens attend only to each other."""
    level: bool = False
    """For decodes: whether all are at the same position. If so, no mask is needed."""
    mirror: Mirror | None = None
    """For decodes: the contiguous copy of the sequences' keys and values."""
    continues: bool = False
    """Whether the mirror contains all tokens except the new ones. If not, the mirror is filled from
    blocks."""
    masks: dict[int, torch.Tensor] = field(default_factory=dict)
    """The masks by sliding window (0: no window), each made once per step: ``[batch, 1, width,
    length]``."""
    places_in_mirror: dict[int, torch.Tensor] = field(default_factory=dict)
    """The places of the new tokens in the mirror, by number of key heads, each made once per step:
    ``[(end - start) * kv_heads]``."""

    def mask(self, window: int, dtype: torch.dtype) -> torch.Tensor:
        """The term that is added to the scores: 0 if a token attends to a key, -inf if it does not.
        ``window``: the sliding window in tokens; 0 if there is no window."""
        found = self.masks.get(window)
        if found is None:
            keys = torch.arange(self.length, device=self.positions.device)
            queries = self.positions.unsqueeze(-1)
            hidden = keys > queries
            if window:
                hidden |= keys <= queries - window
            found = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self.masks[window] = found = found.masked_fill_(hidden, float("-inf")).unsqueeze(1)
        return found

    def gathered(
        self, cache: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values of these sequences, gathered from blocks, each ``[batch,
        kv_heads, length, dim]``. Whole blocks are copied."""
        keys, values = (
            paged.flatten(1)
            .index_select(0, self.blocks)
            .view(len(self.positions), -1, *paged.shape[2:])[:, : self.length]
            .transpose(1, 2)
            for paged in cache
        )
        return keys, values

    def mirrored(
        self,
        mirror: Mirror,
        layer: int,
        cache: tuple[torch.Tensor, torch.Tensor],
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values of these sequences from the mirror, each ``[batch * kv_heads,
        room, dim]``. ``k`` and ``v``: the keys and values of the new tokens, which ``cache``
        already contains."""
        if not self.continues:
            return mirror.fill(layer, cache, self.blocks.view(len(self.positions), -1))
        return mirror.add(layer, k, v, self._added(mirror, k.shape[1]))

    def _added(self, mirror: Mirror, kv_heads: int) -> torch.Tensor:
        """The places of the new tokens in the mirror."""
        found = self.places_in_mirror.get(kv_heads)
        if found is None:
            rows = torch.arange(len(self.positions) * kv_heads, device=self.positions.device)
            rows, positions = rows.view(-1, kv_heads), self.positions
            if self.places is not None:
                rows = rows[self.places // self.width]
                positions = positions.view(-1, 1)[self.places]
            found = (rows * mirror.room + positions).flatten()
            self.places_in_mirror[kv_heads] = found
        return found


@dataclass(slots=True)
class PackedBatch:
    """The metadata of a step for the attention function."""

    cache: KVCache
    slot_mapping: torch.Tensor
    """``[num_tokens]``: the slots to which the new keys and values are written."""
    groups: list[Group]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_batch: PackedBatch,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention. ``query`` is ``[1, heads, num_tokens, dim]``, and the result is ``[1,
    num_tokens, heads, dim]``. ``attention_mask`` is None, because each sequence attends only to its
    own blocks."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    found = attend(
        layer,
        q,
        k,
        v,
        packed_batch,
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    return found.unsqueeze(0), None


def attend(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: PackedBatch,
    *,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """One layer's attention. ``query`` and the result are ``[num_tokens, heads, dim]``."""
    context.cache.write(layer, context.slot_mapping, key, value)
    cache = context.cache.layers[layer]
    window = sliding_window or 0
    found = []
    for group in context.groups:
        q, k, v = query, key, value
        if len(context.groups) > 1:
            q, k, v = (t[group.start : group.end] for t in (q, k, v))
        if group.mirror is None:
            keys, values = group.gathered(cache)
        else:
            keys, values = group.mirrored(group.mirror, layer, cache, k, v)
            if q.dtype == torch.float32:
                by_products = _attend_decodes if group.rows is None else _attend_drafts
                found.append(by_products(group, q, keys, values, scaling, window, softcap))
                continue
            batch = len(group.positions)
            keys, values = (
                t[:, : group.length].view(batch, -1, group.length, t.shape[-1])
                for t in (keys, values)
            )
        found.append(_attend(group, q, keys, values, scaling, window, softcap))
    return found[0] if len(found) == 1 else torch.cat(found)


def _attend(
    group: Group,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float | None,
    window: int,
    softcap: float | None,
) -> torch.Tensor:
    """The attention of one group's tokens ``[num_tokens, heads, dim]`` over ``k`` and ``v``
    ``[batch, kv_heads, length, dim]``."""
    if group.rows is None:
        # Decodes: the query heads that share a key head become rows of one matrix, so that each key
        # is read once.
        batch, kv_heads = k.shape[:2]
        grouped = q.reshape(batch, kv_heads, -1, q.shape[-1])
        mask = group.mask(window, q.dtype)
        found = dot_product(grouped, k, v, mask, scaling, softcap, causal=False)
        return found.flatten(1, 2)
    assert group.places is not None
    rectangle = q[group.rows - group.start].transpose(1, 2)
    causal = group.fresh and not window
    seen = None if causal and softcap is None else group.mask(window, q.dtype)
    found = dot_product(rectangle, k, v, seen, scaling, softcap, causal=seen is None)
    return found.transpose(1, 2).flatten(0, 1)[group.places]


def _attend_decodes(
    group: Group,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float | None,
    window: int,
    softcap: float | None,
) -> torch.Tensor:
    """The attention of one token of each sequence ``[batch, heads, dim]`` over the mirror ``[batch
    * kv_heads, room, dim]``.

    For one token of a sequence, two products and a softmax take a third of the time of SDPA. SDPA's
    tiles are made for many tokens.
    """
    batch, heads, _ = q.shape
    first = max(0, group.length - window) if group.level and window else 0
    k, v = k[:, first : group.length], v[:, first : group.length]
    scores = _scores(q, k, scaling, softcap)
    if not group.level:
        scores.view(batch, -1, *scores.shape[1:]).add_(group.mask(window, q.dtype))
    return torch.bmm(torch.softmax(scores, -1), v).view(batch, heads, -1)


def _attend_drafts(
    group: Group,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float | None,
    window: int,
    softcap: float | None,
) -> torch.Tensor:
    """The attention of the new tokens of each sequence, ``[num_tokens, heads, dim]``. The new
    tokens are the last token and a draft."""
    assert group.rows is not None
    assert group.places is not None
    batch, width = group.positions.shape
    _, heads, dim = q.shape
    k, v = k[:, : group.length], v[:, : group.length]
    rectangle = q[group.rows - group.start].transpose(1, 2)
    scores = _scores(rectangle, k, scaling, softcap)
    scores.view(batch, heads, width, -1).add_(group.mask(window, q.dtype))
    found = torch.bmm(torch.softmax(scores, -1), v).view(batch, heads, width, dim)
    return found.transpose(1, 2).flatten(0, 1)[group.places]


def _scores(
    q: torch.Tensor, k: torch.Tensor, scaling: float | None, softcap: float | None
) -> torch.Tensor:
    """The scores ``[batch * kv_heads, queries, length]``, before the mask is added, for keys
    ``[batch * kv_heads, length, dim]``. ``queries``: number of the queries of one key head."""
    dim = q.shape[-1]
    scale = dim**-0.5 if scaling is None else scaling
    scores = torch.baddbmm(
        _NOTHING,
        q.reshape(len(k), -1, dim),
        k.transpose(1, 2),
        beta=0,
        alpha=scale if softcap is None else scale / softcap,
    )
    return scores if softcap is None else scores.tanh_().mul_(softcap)


def dot_product(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    *,
    causal: bool,
) -> torch.Tensor:
    if softcap is None:
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    # Gemma 2 caps its scores before the softmax, which SDPA does not support.
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.tanh(q @ k.transpose(-1, -2) * (scale / softcap)) * softcap
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v


def _no_mask(*_: Any, **__: Any) -> None:
    """Replaces the function with which transformers makes a mask. Returns None, because the
    attention of this module makes its own masks."""


def register(name: str, function: Callable[..., Any]) -> None:
    """Registers ``function`` as an attention of transformers, without a mask."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, _no_mask)


register(NAME, paged_attention)
# torch.compile does not compile this function, because the ``PackedBatch`` differs in every step.
register(NAME_COMPILED, torch.compiler.disable(paged_attention))  # type: ignore[no-untyped-call]
