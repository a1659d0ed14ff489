"""Quantizes the weights of a loaded model with torchao, and measures how much the logits change.

Only the weights of the decoder layers' linear modules are quantized. In int8, each output has a
scale. In int4, each group of 32 inputs has a scale. Embeddings and the output layer keep their
type.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.nn.functional import kl_div, nll_loss

from ....protocol.messages import Quantized
from .weights import plain_tensors

log = logging.getLogger(__name__)

GROUP = 32
"""Number of neighbouring inputs that share a scale in int4."""
TEXT = """\
The harbour opens at six. Two boats wait outside the wall, and a third comes in with the tide: it
carries 240 crates of apples, which were picked on Tuesday. "Who signs for them?" asks the pilot.
def total(crates):
    return sum(crate.weight for crate in crates if crate.weight > 0)
{"boat": "Marie", "crates": 240, "price": 18.5, "signed": false}
A crate costs 18.50 euros, so the whole load is worth 240 * 18.5 = 4440 euros before tax.
"""
"""The text with which the change of the logits is measured."""
MAX_TOKENS = 192
"""Maximum number of tokens of the text."""


class NotQuantizable(Exception):
    """The model cannot be quantized; the message says why."""


def quantize(name: str, model: Any, tokenizer: Any, kind: str) -> Quantized:
    """Quantizes the weights of a causal model of transformers in place, to ``int8`` or ``int4``.
    Raises NotQuantizable."""
    modules = dict(model.named_modules())
    head = model.get_output_embeddings()
    chosen = [
        module
        for module in modules.values()
        if type(module) is torch.nn.Linear and module is not head and _fits(module, kind)
    ]
    if not all(_is_plain(parameter) for parameter in model.parameters()):
        raise NotQuantizable("its checkpoint is quantized already; serve it without --quantize")
    if not chosen:
        raise NotQuantizable(f"it has no linear modules that {kind} can represent")
    ids = _ids(model, tokenizer)
    before, expected = _stored(model), _log_probabilities(model, ids)
    _apply(model, set(chosen), kind)
    found = _log_probabilities(model, ids)
    if not torch.isfinite(found).all():
        raise NotQuantizable(f"its logits in {kind} are not finite")
    result = Quantized(
        kind=kind,
        saved_bytes=before - _stored(model),
        divergence=kl_div(found, expected, reduction="batchmean", log_target=True).item(),
        perplexity=_perplexity(found, ids),
        perplexity_before=_perplexity(expected, ids),
    )
    log.info("%s: %s", name, result)
    return result


def stored_bytes(tensor: torch.Tensor) -> int:
    """Size of a weight in memory, in bytes."""
    return sum(plain.nbytes for plain in plain_tensors(tensor))


def _apply(model: Any, chosen: set[torch.nn.Module], kind: str) -> None:
    try:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

        config: Any = Int8WeightOnlyConfig(set_inductor_config=False)
        if kind == "int4" and model.device.type == "cpu":
            # On a CPU, only the prototypes of torchao support int4.
            from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

            config = PrototypeInt4WeightOnlyConfig(GROUP, set_inductor_config=False)
        elif kind == "int4":
            config = Int4WeightOnlyConfig(
                GROUP, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
            )
    except ImportError as error:
        raise NotQuantizable(f"{error}; pip install 'tokenbus[quantize]' installs it") from None
    with torch.inference_mode(False), torch.no_grad():
        quantize_(model, config, filter_fn=lambda module, _: module in chosen)


def _fits(module: torch.nn.Linear, kind: str) -> bool:
    return kind == "int8" or module.in_features % GROUP == 0


def _is_plain(parameter: torch.nn.Parameter) -> bool:
    return type(parameter.data) is torch.Tensor and parameter.is_floating_point()


def _stored(model: Any) -> int:
    return sum(stored_bytes(parameter.data) for parameter in model.parameters())


def _ids(model: Any, tokenizer: Any) -> torch.Tensor:
    config = model.config.get_text_config()
    ids = [] if tokenizer is None else tokenizer.encode(TEXT)
    if len(ids) < 2:
        ids = [id % config.vocab_size for id in range(64)]
    longest = getattr(config, "max_position_embeddings", None) or MAX_TOKENS
    return torch.tensor(ids[: min(longest, MAX_TOKENS)], device=model.device)


@torch.inference_mode()
def _log_probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The log-probabilities of each next token, ``[num_tokens, vocab]``."""
    logits: torch.Tensor = model(ids.unsqueeze(0), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


def _perplexity(log_probabilities: torch.Tensor, ids: torch.Tensor) -> float:
    return nll_loss(log_probabilities[:-1], ids[1:]).exp().item()
