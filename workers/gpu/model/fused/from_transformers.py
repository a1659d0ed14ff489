"""Derives a ``FusedDecoder`` from a transformers model.

A model is recognized by its parts, not by its name: decoder layers with ``self_attn`` and a gated
``mlp``, and norms around them. Llama has these parts, and so do Mistral, Qwen 2 and 3, Gemma 1 to
3, Phi-3, OLMo 2, SmolLM3 and Granite. A model with an unknown module cannot be fused. Properties
that a module's name does not show (the gain of a norm, the scale of the embeddings) are measured on
the module. A model may have the same parts but compute something else. The caller detects such a
model by comparing logits.

The original model still works after the fusion. The weights of layers that become one product are
placed next to each other in memory. The model's parameters become views of this memory, so that no
weight is stored twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.functional import rms_norm, silu

from ..kv_cache import LayerShape
from .decoder import (
    AttentionOptions,
    Function,
    FusedDecoder,
    GatedMlp,
    HeadNorms,
    Layer,
    RmsNorm,
    Rotation,
)
from .projections import Projection, stored_by_input

IGNORED = {"act_fn", "activation_fn", "resid_attn_dropout", "resid_mlp_dropout"}
"""Names of modules without weights, which a layer may have. Dropout does nothing in a model that is
served."""
BY_POSITION = {"default", "linear", "llama3", "yarn"}
"""Types of rotary embeddings that depend only on the position. Other rotary embeddings also depend
on the length of the text."""


class NotFusible(Exception):
    """The model cannot be a ``FusedDecoder``; the message says why."""


def fused_model(
    model: Any,
    shapes: Mapping[int, LayerShape],
    options: Mapping[int, AttentionOptions],
    by_input: bool = True,
) -> FusedDecoder:
    """The model as a FusedDecoder.

    ``shapes`` and ``options``: for each layer, the shapes of keys and values, and the options of
    the attention. ``by_input``: whether to store weights as ``[in, out]`` if that is faster
    (``stored_by_input``). Raises NotFusible.
    """
    if not type(model).__module__.startswith("transformers."):
        raise NotFusible("its code is not transformers' own")
    base = getattr(model, "model", None)
    _only(model, {"model", "lm_head"})
    _only(base, {"embed_tokens", "layers", "norm", "rotary_emb"})
    assert base is not None
    config = model.config.get_text_config()
    # Embeddings are looked up by rows. So if the weights of the output layer are tied to the
    # embeddings, they are not stored as ``[in, out]``.
    tied = model.lm_head.weight is base.embed_tokens.weight
    rotary = _Rotary(base.rotary_emb, config)
    layers = [
        _layer(layer, i, shapes.get(i), options.get(i), rotary.kind(i), by_input)
        for i, layer in enumerate(base.layers)
    ]
    return FusedDecoder(
        embed=base.embed_tokens,
        embedding_scale=_embedding_scale(model, base),
        layers=layers,
        norm=fused_norm(base.norm),
        head=_joined([model.lm_head], by_input and not tied),
        rotary=rotary,
        logits_scale=1 / getattr(config, "logits_scaling", 1.0),
        logits_cap=getattr(config, "final_logit_softcapping", None),
        by_position=rotary.by_position,
        measured_scale=partial(_scale_measured_later, model, base),
    )


# --- parts ----------------------------------------------------------------------------------------


def _only(module: Any, known: set[str]) -> None:
    """Raises NotFusible if a module has children that are not among ``known``."""
    if module is None:
        raise NotFusible("it has no decoder under the name model")
    unknown = [name for name, _ in module.named_children() if name not in known | IGNORED]
    if unknown:
        raise NotFusible(f"its {type(module).__name__} has a module {unknown[0]}")


def _layer(
    layer: Any,
    index: int,
    shape: LayerShape | None,
    options: AttentionOptions | None,
    rotation: str,
    by_input: bool,
) -> Layer:
    if shape is None or options is None:
        raise NotFusible(f"the attention of layer {index} was not called")
    if shape.key_dim != shape.value_dim:
        raise NotFusible("its keys and values differ in size")
    norms = {
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    }
    _only(layer, {"self_attn", "mlp", *norms})
    found = {n: fused_norm(getattr(layer, n)) for n in norms if hasattr(layer, n)}
    around = "post_feedforward_layernorm" in found
    after = found.get("post_attention_layernorm")
    attention = layer.self_attn
    _only(attention, {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm"})
    if hasattr(attention, "qkv_proj"):
        qkv = _joined([attention.qkv_proj], by_input)
    else:
        qkv = _joined([attention.q_proj, attention.k_proj, attention.v_proj], by_input)
    dim, rest = shape.key_dim, qkv.weight.shape[0] % shape.key_dim
    num_heads = qkv.weight.shape[0] // dim - 2 * shape.kv_heads
    if rest or num_heads < shape.kv_heads:
        raise NotFusible("its projections do not have the size of its heads")
    return Layer(
        index=index,
        num_heads=num_heads,
        num_kv_heads=shape.kv_heads,
        qkv=qkv,
        head_norms=_head_norms(attention, dim),
        rotation=rotation if getattr(attention, "use_rope", True) else None,
        options=options,
        output=_joined([attention.o_proj], by_input),
        mlp=_mlp(layer.mlp, by_input),
        before_attention=found.get("input_layernorm"),
        after_attention=after if around else None,
        before_mlp=found.get("pre_feedforward_layernorm") if around else after,
        after_mlp=found.get("post_feedforward_layernorm"),
        residual_scale=getattr(layer, "residual_multiplier", 1.0),
    )


def _mlp(mlp: Any, by_input: bool) -> GatedMlp:
    _only(mlp, {"gate_proj", "up_proj", "gate_up_proj", "down_proj"})
    if hasattr(mlp, "gate_up_proj"):
        gate_up = _joined([mlp.gate_up_proj], by_input)
    elif hasattr(mlp, "gate_proj") and hasattr(mlp, "up_proj"):
        gate_up = _joined([mlp.gate_proj, mlp.up_proj], by_input)
    else:
        raise NotFusible(f"its {type(mlp).__name__} has no gate")
    activation = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    if activation is None:
        raise NotFusible(f"its {type(mlp).__name__} has no act_fn")
    sample = torch.linspace(-4, 4, 64)
    if torch.equal(activation(sample), silu(sample)):
        activation = silu
    return GatedMlp(gate_up, _joined([mlp.down_proj], by_input), activation)


def _head_norms(attention: Any, dim: int) -> HeadNorms | None:
    if not hasattr(attention, "q_norm"):
        return None
    query, key = attention.q_norm, attention.k_norm
    per_head = query.weight.shape[-1] == dim == key.weight.shape[-1]
    return HeadNorms(fused_norm(query), fused_norm(key), per_head)


def fused_norm(module: Any) -> Function:
    """Returns a norm that computes the result of ``module`` in one operation, or ``module`` itself
    if the results differ."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return module  # type: ignore[no-any-return]
    weight = weight.detach()
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(3, len(weight), generator=generator).to(weight.device, weight.dtype)
    # The sample includes small numbers, for which the epsilon matters.
    sample = torch.cat((sample, sample * eps**0.5))
    tolerance = 1e-5 if weight.dtype == torch.float32 else 2e-2
    with torch.inference_mode():
        wanted = module(sample)
        for gain, offset in ((weight, None), (1 + weight, weight)):
            found = rms_norm(sample, weight.shape, gain, eps)
            if torch.allclose(found, wanted, rtol=tolerance, atol=tolerance):
                return RmsNorm(gain, eps, offset)
    return module  # type: ignore[no-any-return]


def _joined(layers: list[Any], by_input: bool) -> Projection:
    """Joins linear layers that have the same input into one product. Their weights are copied into
    one matrix, and become views of this matrix. ``by_input``: whether to store the matrix as ``[in,
    out]`` if that is faster."""
    for layer in layers:
        if type(layer) is not torch.nn.Linear or type(layer.weight.data) is not torch.Tensor:
            raise NotFusible(f"its {type(layer).__name__} is not a plain linear layer")
        if layer._forward_hooks or layer._forward_pre_hooks:
            raise NotFusible("its linear layers have hooks")
    if len({layer.bias is None for layer in layers}) > 1:
        raise NotFusible("some of its projections have a bias and others do not")
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    bias = torch.cat(biases) if biases else None
    weights = [layer.weight.detach() for layer in layers]
    joined = _already_joined(weights, by_input)
    if joined is None:
        joined = torch.cat(weights) if len(weights) > 1 else weights[0]
        wants = by_input and stored_by_input(joined)
        joined = joined.t().contiguous().t() if wants else joined.contiguous()
        for layer, part in zip(layers, joined.split([len(w) for w in weights]), strict=True):
            layer.weight.data = part
    return Projection(joined, bias, biases)


def _already_joined(parts: list[torch.Tensor], by_input: bool) -> torch.Tensor | None:
    """The matrix whose rows are ``parts``. None if the layers were not joined before, or if the
    matrix is not stored as ``by_input`` requires."""
    first = parts[0]
    storage, strides = first.untyped_storage(), first.stride()
    at = first.data_ptr()
    for part in parts:
        same = part.untyped_storage().data_ptr() == storage.data_ptr()
        if not same or part.stride() != strides or part.data_ptr() != at:
            return None
        at += len(part) * strides[0] * part.itemsize
    rows = sum(len(part) for part in parts)
    joined = first.as_strided((rows, first.shape[1]), strides)
    wants = by_input and stored_by_input(joined)
    return joined if wants != joined.is_contiguous() else None


def _embedding_scale(model: Any, base: Any) -> float:
    """The factor by which a model multiplies its embeddings before the first layer."""
    seen: list[torch.Tensor] = []

    def record(_: Any, args: Any, kwargs: Any) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"]).detach())

    hook = base.layers[0].register_forward_pre_hook(record, with_kwargs=True)
    ids = torch.arange(2, device=model.device).unsqueeze(0)
    try:
        with torch.inference_mode():
            model(ids, use_cache=False)
            embedded = base.embed_tokens(ids)
    finally:
        hook.remove()
    if not seen or seen[0].shape != embedded.shape:
        raise NotFusible("its first layer does not take the embeddings")
    scale = (seen[0].float().norm() / embedded.float().norm()).item()
    return 1.0 if abs(scale - 1) < 1e-6 else scale


def _scale_measured_later(model: Any, base: Any) -> float:
    """Computes ``_embedding_scale`` when the engine has already replaced the model's attention.
    Uses transformers' own attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return _embedding_scale(model, base)
    finally:
        model.set_attn_implementation(before)


class _Rotary:
    """A model's rotary embeddings. Some models have a different one for each type of layer."""

    def __init__(self, module: Any, config: Any) -> None:
        self._module = module
        self._types: list[str] | None = None
        given = getattr(module, "rope_type", None)
        if isinstance(given, Mapping):
            self._types = list(config.layer_types)
        found = set(given.values()) if isinstance(given, Mapping) else {given}
        self.by_position = found <= BY_POSITION

    def kind(self, layer: int) -> str:
        """The name of the rotary embedding of a layer."""
        return "all" if self._types is None else self._types[layer]

    def __call__(self, hidden: torch.Tensor, positions: torch.Tensor, kind: str) -> Rotation:
        given = () if self._types is None else (kind,)
        cos, sin = self._module(hidden.unsqueeze(0), positions, *given)
        return cos, sin
