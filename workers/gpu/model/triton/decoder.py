"""A ``FusedDecoder`` whose small operations are Triton kernels: nine kernels per layer.

Four kernels are products. The other five are two norms with the residual, the rotary embedding with
the store to the cache, the attention, and the activation. A norm that the model has between a
product and the residual is part of the norm kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.functional import gelu, silu

from ..fused.decoder import Attend, Function, FusedDecoder, HeadNorms, Layer, RmsNorm, Rotation
from .ops import GATED, NORM, ROTARY_STORE

MAX_WIDTH = 16384
"""Maximum number of values of a row. A program of the norm kernel keeps the whole row in
registers."""


class NotFusible(Exception):
    """The Triton kernels cannot compute the model's layers; the message says why."""


class TritonDecoder:
    """The forward of a whole model. Its results equal those of the ``FusedDecoder`` except for
    rounding. The constructor raises NotFusible."""

    def __init__(self, decoder: FusedDecoder) -> None:
        self._decoder = decoder
        self._layers = [_Layer(layer) for layer in decoder.layers]
        self._norm = _rms(decoder.norm, "its last norm")

    @torch.inference_mode()
    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        context: Any,
        attend: Attend,
    ) -> torch.Tensor:
        """Does the work of ``FusedDecoder.forward``. ``attend`` must not write to the cache,
        because the kernel of the rotary embedding writes the keys and values.

        ``context`` has the ``cache`` and the ``slot_mapping`` of the new tokens.
        """
        decoder = self._decoder
        hidden = decoder.embedded(ids).contiguous()
        rotations = {kind: decoder.rotation(hidden, positions, kind) for kind in decoder.kinds}
        update = _NOTHING
        for layer in self._layers:
            update = layer(hidden, update, rotations, context, attend)
        if len(rows) != len(ids):
            hidden = hidden.index_select(0, rows)
            update = update.rows(rows)
        return decoder.scaled(decoder.head(_normed(hidden, update, self._norm)))


class _Update:
    """The product of an attention or an MLP, which is not yet added to the hidden states."""

    __slots__ = ("norm", "scale", "values")

    def __init__(
        self, values: torch.Tensor | None, norm: RmsNorm | None = None, scale: float = 1.0
    ) -> None:
        self.values = values
        self.norm = norm
        self.scale = scale

    def rows(self, rows: torch.Tensor) -> _Update:
        """The update of a subset of the tokens."""
        values = None if self.values is None else self.values.index_select(0, rows)
        return _Update(values, self.norm, self.scale)


_NOTHING = _Update(None)


class _Layer:
    """One decoder layer. Raises NotFusible."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._before_attention = _rms(layer.before_attention, "the norm before an attention")
        self._before_mlp = _rms(layer.before_mlp, "the norm before an MLP")
        self._after_attention = _optional(layer.after_attention)
        self._after_mlp = _optional(layer.after_mlp)
        self._gains, self._eps = _head_norms(layer.head_norms)
        self._gelu = _is_gelu(layer.mlp.activation)

    def __call__(
        self,
        hidden: torch.Tensor,
        update: _Update,
        rotations: dict[str, Rotation],
        context: Any,
        attend: Attend,
    ) -> _Update:
        """Adds ``update`` to ``hidden`` in place, and returns the update of this layer, which is
        not added yet."""
        layer, options = self._layer, self._layer.options
        x = _normed(hidden, update, self._before_attention)
        keys = layer.num_heads + layer.num_kv_heads
        heads = layer.qkv(x).view(len(x), keys + layer.num_kv_heads, -1)
        rotation = [] if layer.rotation is None else list(rotations[layer.rotation])
        cache = context.cache.layers[layer.index]
        ROTARY_STORE(heads, rotation, context.slot_mapping, list(cache), self._gains, self._eps)
        attended = attend(
            layer.index,
            heads[:, : layer.num_heads],
            heads[:, layer.num_heads : keys],
            heads[:, keys:],
            context,
            scaling=options.scaling,
            sliding_window=options.sliding_window,
            softcap=options.softcap,
        )
        product = layer.output(attended.view(len(x), -1))
        added = _Update(product, self._after_attention, layer.residual_scale)
        x = _normed(hidden, added, self._before_mlp)
        gate_up = layer.mlp.gate_up(x)
        product = gate_up.new_empty(len(x), gate_up.shape[1] // 2)
        GATED(product, gate_up, self._gelu)
        return _Update(layer.mlp.down(product), self._after_mlp, layer.residual_scale)


def _normed(hidden: torch.Tensor, update: _Update, norm: RmsNorm) -> torch.Tensor:
    """Adds ``update`` to ``hidden`` in place, and returns the norm of ``hidden``."""
    normed = torch.empty_like(hidden)
    post = update.norm
    NORM(
        normed,
        hidden,
        update.values,
        norm.gain,
        norm.eps,
        update.scale,
        None if post is None else post.gain,
        0.0 if post is None else post.eps,
    )
    return normed


def _rms(norm: Function | None, where: str) -> RmsNorm:
    if not isinstance(norm, RmsNorm):
        raise NotFusible(f"{where} is not an RMS norm")
    if len(norm.gain) > MAX_WIDTH:
        raise NotFusible(
            f"its rows have {len(norm.gain)} values; at most {MAX_WIDTH} are supported"
        )
    return norm


def _optional(norm: Function | None) -> RmsNorm | None:
    return None if norm is None else _rms(norm, "a norm before a residual")


def _head_norms(norms: HeadNorms | None) -> tuple[list[torch.Tensor], list[float]]:
    """The gains and epsilons of the norms of queries and keys; empty without norms."""
    if norms is None:
        return [], []
    if not norms.per_head:
        raise NotFusible("its queries are normalized over all heads together")
    both = [_rms(norm, "the norm of its heads") for norm in (norms.query, norms.key)]
    return [norm.gain for norm in both], [norm.eps for norm in both]


def _is_gelu(activation: Function) -> bool:
    """Whether an activation is GELU in its tanh form; False for SiLU. Raises NotFusible for other
    activations."""
    if activation is silu:
        return False
    sample = torch.linspace(-4, 4, 64)
    if torch.allclose(activation(sample), partial(gelu, approximate="tanh")(sample), atol=1e-6):
        return True
    raise NotFusible("its activation is neither SiLU nor GELU in its tanh form")
