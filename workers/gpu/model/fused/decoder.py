"""Computes a decoder's forward with few operations, from the weights of a transformers model.

For one token of a small model, small operations take longer than matrix products: transformers'
modules run about a hundred small operations for each token. ``FusedDecoder`` computes the same
results without module calls. It has one product for queries, keys and values, and one for both
halves of a gated MLP. The rotary embedding is applied in place. The last product of the attention
and the last product of the MLP also add the residual. ``fused_model`` derives the decoder from the
model's structure. The decoder is used only if its logits equal the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import rms_norm

from .projections import Projection

Function = Callable[[torch.Tensor], torch.Tensor]
Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of each token's position, ``[num_tokens, 1, rotary_dim]``; the first half of
the sines is negated."""


class Attend(Protocol):
    """Attention over the tokens of a layer's KV cache and the new tokens."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: Any,
        *,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """``query`` ``[num_tokens, heads, dim]``, ``key`` and ``value`` ``[num_tokens, kv_heads,
        dim]`` of the new tokens; returns ``[num_tokens, heads, dim]``."""
        ...


@dataclass(slots=True, frozen=True)
class AttentionOptions:
    """The arguments that a model passes to the attention of one layer."""

    scaling: float | None = None
    sliding_window: int | None = None
    softcap: float | None = None


class RmsNorm:
    """``x / sqrt(mean(x ** 2) + eps) * gain`` over the last dimension."""

    def __init__(self, gain: torch.Tensor, eps: float, offset: torch.Tensor | None = None) -> None:
        """Some models add 1 to the weight of the norm. For such a model, ``offset`` is the weight,
        and ``gain`` is a copy of the sum. For other models, ``offset`` is None, and ``gain`` is the
        model's own weight."""
        self.gain = gain
        self.eps = eps
        self._offset = offset
        # On a CPU, torch's rms_norm takes a dozen operations. The following formula takes four: x *
        # gain * sqrt(dim), divided by the hypotenuse of the norm of x and sqrt(dim * eps).
        self._few = gain.device.type == "cpu" and gain.dtype == torch.float32
        self._scaled = gain * len(gain) ** 0.5
        self._floor = torch.tensor((len(gain) * eps) ** 0.5, dtype=gain.dtype, device=gain.device)

    @torch.inference_mode()
    def refresh(self) -> None:
        """Computes the copies of the weight again, after the weight has been changed in place."""
        if self._offset is not None:
            self.gain.copy_(1 + self._offset)
        self._scaled.copy_(self.gain * len(self.gain) ** 0.5)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self._few:
            return rms_norm(x, self.gain.shape, self.gain, self.eps)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scaled: torch.Tensor = x * self._scaled
        return scaled.div_(torch.hypot(norm, self._floor))


@dataclass(slots=True)
class HeadNorms:
    """Norms of queries and keys. A norm is computed over each head, or over all heads together."""

    query: Function
    key: Function
    per_head: bool

    def apply_(self, heads: torch.Tensor, num_heads: int, num_keys: int) -> None:
        """Normalizes the queries and keys in ``heads`` ``[num_tokens, heads, dim]``, in place.
        ``num_heads``: number of query heads, which come first. ``num_keys``: number of query heads
        and key heads together."""
        for norm, part in (
            (self.query, heads[:, :num_heads]),
            (self.key, heads[:, num_heads:num_keys]),
        ):
            if self.per_head:
                part.copy_(norm(part))
            else:
                part.copy_(norm(part.flatten(1)).view(part.shape))


class GatedMlp:
    """``down(activation(gate(x)) * up(x))``, with one product for gate and up."""

    def __init__(self, gate_up: Projection, down: Projection, activation: Function) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    def add_to(self, residual: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        """The MLP's result, added to ``residual`` if there is one."""
        gate, up = self.gate_up(x).chunk(2, -1)
        product = self.activation(gate).mul_(up)
        return self.down(product) if residual is None else self.down.add_to(residual, product)


@dataclass(slots=True)
class Layer:
    """One decoder layer. A norm that the model does not have is None."""

    index: int
    num_heads: int
    num_kv_heads: int
    qkv: Projection
    head_norms: HeadNorms | None
    rotation: str | None
    """The name of the layer's rotary embedding; None if queries and keys are not rotated."""
    options: AttentionOptions
    output: Projection
    mlp: GatedMlp
    before_attention: Function | None
    after_attention: Function | None
    before_mlp: Function | None
    after_mlp: Function | None
    residual_scale: float = 1.0

    def __call__(
        self, hidden: torch.Tensor, rotations: dict[str, Rotation], context: Any, attend: Attend
    ) -> torch.Tensor:
        x = hidden if self.before_attention is None else self.before_attention(hidden)
        num_tokens, keys = x.shape[0], self.num_heads + self.num_kv_heads
        heads = self.qkv(x).view(num_tokens, keys + self.num_kv_heads, -1)
        if self.head_norms is not None:
            self.head_norms.apply_(heads, self.num_heads, keys)
        if self.rotation is not None:
            rotate_(heads[:, :keys], rotations[self.rotation])
        options = self.options
        parts = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        query, key, value = torch.split(heads, parts, 1)
        attended = attend(
            self.index,
            query,
            key,
            value,
            context,
            scaling=options.scaling,
            sliding_window=options.sliding_window,
            softcap=options.softcap,
        ).reshape(num_tokens, -1)
        if self.after_attention is None and self.residual_scale == 1:
            hidden = self.output.add_to(hidden, attended)
        else:
            hidden = self._added(hidden, self.output(attended), self.after_attention)
        x = hidden if self.before_mlp is None else self.before_mlp(hidden)
        if self.after_mlp is None and self.residual_scale == 1:
            return self.mlp.add_to(hidden, x)
        return self._added(hidden, self.mlp.add_to(None, x), self.after_mlp)

    def _added(
        self, hidden: torch.Tensor, update: torch.Tensor, norm: Function | None
    ) -> torch.Tensor:
        if norm is not None:
            update = norm(update)
        return hidden.add_(update, alpha=self.residual_scale)


class FusedDecoder:
    """The forward of a whole model.

    ``rotary`` computes cosines and sines ``[1, num_tokens, rotary_dim]`` as the model does. Its
    arguments are hidden states, positions ``[1, num_tokens]`` and one of ``kinds``.
    ``by_position``: whether cosines and sines depend only on the position.
    """

    def __init__(
        self,
        embed: Function,
        embedding_scale: float,
        layers: Sequence[Layer],
        norm: Function,
        head: Projection,
        rotary: Callable[[torch.Tensor, torch.Tensor, str], Rotation],
        logits_scale: float,
        logits_cap: float | None,
        by_position: bool = False,
        measured_scale: Callable[[], float] | None = None,
    ) -> None:
        """``measured_scale``: measures ``embedding_scale`` again when the weights have changed,
        because the rounding of a measured scale depends on the weights."""
        self.embed = embed
        self._embedding_scale = embedding_scale
        self._measured_scale = measured_scale
        self.layers = list(layers)
        self.kinds = sorted({layer.rotation for layer in layers if layer.rotation is not None})
        """The rotary embeddings that the layers use."""
        self.norm = norm
        self.head = head
        self._rotary = rotary
        self.by_position = by_position
        self.logits_scale = logits_scale
        self.logits_cap = logits_cap

    @torch.inference_mode()
    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        context: Any,
        attend: Attend,
    ) -> torch.Tensor:
        """The logits ``[num_rows, vocab]`` of some of the tokens ``ids`` ``[num_tokens]``.
        ``rows``: the indices of these tokens. If ``rows`` has as many entries as ``ids``, it must
        contain all indices in order. ``context`` is passed to ``attend``."""
        hidden = self.embedded(ids)
        rotations = {kind: self.rotation(hidden, positions, kind) for kind in self.kinds}
        for layer in self.layers:
            hidden = layer(hidden, rotations, context, attend)
        if len(rows) != len(ids):
            hidden = hidden.index_select(0, rows)
        return self.scaled(self.head(self.norm(hidden)))

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """The hidden states ``[num_tokens, hidden]`` before the first layer."""
        hidden = self.embed(ids)
        return hidden if self._embedding_scale == 1 else hidden * self._embedding_scale

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Scales the logits of the output layer as the model does, in place."""
        if self.logits_scale != 1:
            logits = logits.mul_(self.logits_scale)
        if self.logits_cap is not None:
            logits = logits.div_(self.logits_cap).tanh_().mul_(self.logits_cap)
        return logits

    def pack(self, budget: int) -> int:
        """Makes packed copies of weights (``Projection.pack``) of at most ``budget`` bytes. The
        output layer is the largest product, so its weights are packed first. Returns the size of
        the packed copies in bytes."""
        left = budget
        for projection in self._projections():
            left -= projection.pack(left)
        return budget - left

    def refresh(self) -> None:
        """Makes all copies of weights again, after the weights have been changed in place."""
        for projection in self._projections():
            projection.refresh()
        for norm in self._norms():
            if isinstance(norm, RmsNorm):
                norm.refresh()
        if self._measured_scale is not None and self._embedding_scale != 1:
            self._embedding_scale = self._measured_scale()

    def _projections(self) -> Iterator[Projection]:
        yield self.head
        for layer in self.layers:
            yield from (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)

    def _norms(self) -> Iterator[Function | None]:
        yield self.norm
        for layer in self.layers:
            yield from (layer.before_attention, layer.after_attention)
            yield from (layer.before_mlp, layer.after_mlp)
            if layer.head_norms is not None:
                yield from (layer.head_norms.query, layer.head_norms.key)

    def rotation(self, hidden: torch.Tensor, positions: torch.Tensor, kind: str) -> Rotation:
        """The cosines and sines of the rotary embedding ``kind``, one of ``kinds``, at
        ``positions`` ``[num_tokens]``. Only the dtype and device of ``hidden`` are used."""
        cos, sin = self._rotary(hidden, positions.unsqueeze(0), kind)
        half = sin.shape[-1] // 2
        signed = torch.cat((sin[0, :, :half].neg(), sin[0, :, half:]), -1)
        return cos[0].unsqueeze(1), signed.unsqueeze(1)


def rotate_(heads: torch.Tensor, rotation: Rotation) -> None:
    """Rotates the first ``rotary_dim`` entries of ``heads`` ``[num_tokens, heads, dim]`` in place.
    Entries i and i + rotary_dim / 2 are rotated together, as in GPT-NeoX."""
    cos, sin = rotation
    size = cos.shape[-1]
    part = heads if size == heads.shape[-1] else heads[..., :size]
    swapped = part.roll(size // 2, -1)
    part.mul_(cos).addcmul_(swapped, sin)
