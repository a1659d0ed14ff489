"""Vectors of texts: the states after a model's last layer, pooled over the tokens of each text."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import normalize
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.utils.hub import cached_file

from ....protocol.errors import Code, RequestError
from ....protocol.messages import Pooling
from . import checkpoint
from .loader import LoadedModel

CONFIG = "1_Pooling/config.json"
"""The file in which sentence-transformers stores a checkpoint's pooling."""
_NAMES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


def pooling_of(loaded: LoadedModel) -> Pooling:
    """The pooling that the checkpoint names. By default, the mean for an encoder, and the last
    state for a causal model, because its earlier states do not depend on the whole text."""
    with suppress(OSError, ValueError):
        revision = checkpoint.find(loaded.name).options.get("revision")
        place = loaded.model.name_or_path
        path = cached_file(place, CONFIG, revision=revision, local_files_only=True)
        modes = json.loads(Path(path or CONFIG).read_text())
        for name, pooling in _NAMES.items():
            if modes.get(name):
                return pooling
    return "last" if loaded.causal else "mean"


def check_poolable(loaded: LoadedModel) -> None:
    """Raises RequestError if the worker cannot compute the states of a model."""
    why = ""
    if loaded.ranks is not None:
        why = "it is spread over several ranks; serve it on one device"
    elif not isinstance(loaded.model, PreTrainedModel):
        why = "its states after the last layer are not known"
    if why:
        what = f"the model {loaded.name!r} does not give embeddings: {why}"
        raise RequestError(Code.UNSUPPORTED, what, path="$.model")


def vector_bytes(loaded: LoadedModel) -> int:
    """The memory of one vector of a model, in bytes."""
    return 4 * int(loaded.model.config.get_text_config().hidden_size)


@torch.inference_mode()
def pooled(
    loaded: LoadedModel, texts: Sequence[list[int]], poolings: list[Pooling]
) -> torch.Tensor:
    """The vectors of some texts, scaled to length 1, as float32 ``[num_texts, dimensions]`` on the
    CPU. The texts are computed as one batch, padded on the right."""
    lengths = torch.tensor([len(text) for text in texts], device=loaded.device)
    width = int(lengths.max())
    ids = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts])
    places = torch.arange(width, device=loaded.device)
    mask = places < lengths.unsqueeze(1)
    # Without padding, the model needs no mask, whose memory grows with the square of the width.
    padded = any(len(text) < width for text in texts)
    options: dict[str, Any] = {"attention_mask": mask.long() if padded else None}
    if loaded.causal:
        options["use_cache"] = False
    states = _states(loaded.model, ids.to(loaded.device), options)
    return normalize(_pool(states, mask, lengths, poolings), dim=-1).cpu()


@dataclass(slots=True, eq=False)
class ChunkedText:
    """A text of a causal model whose states are computed in chunks (``pool_chunk``)."""

    tokens: list[int]
    pooling: Pooling
    num_computed_tokens: int = 0
    cache: Cache | None = None
    """The keys and values of the computed tokens; None before the first chunk."""
    state: torch.Tensor | None = None
    """The pooled state of the computed tokens, float32 ``[1, dimensions]``: the first state, the
    last state, or for the mean the sum of all states. None before the first chunk."""


@torch.inference_mode()
def pool_chunk(loaded: LoadedModel, text: ChunkedText, num_tokens: int) -> torch.Tensor | None:
    """Computes the states of the next ``num_tokens`` tokens of a text, or of the rest if the rest
    is shorter. After the last chunk, returns the text's vector, as ``pooled`` does: ``[1,
    dimensions]``. Otherwise returns None."""
    body = loaded.model.base_model
    if text.cache is None:
        text.cache = DynamicCache(config=body.config)
    # transformers 5.23 and earlier have another name for the argument.
    parameters = inspect.signature(body.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    start = text.num_computed_tokens
    chunk = text.tokens[start : start + num_tokens]
    ids = torch.tensor([chunk], device=loaded.device)
    states = _states(loaded.model, ids, {name: text.cache, "use_cache": True})
    if text.pooling == "mean":
        summed = states.sum(1)
        text.state = summed if text.state is None else text.state + summed
    elif text.pooling == "last":
        text.state = states[:, -1].clone()
    elif text.state is None:
        text.state = states[:, 0].clone()
    text.num_computed_tokens += len(chunk)
    if text.num_computed_tokens < len(text.tokens):
        if loaded.device.type == "cuda":
            # The caller measures the time of each chunk.
            torch.cuda.current_stream(loaded.device).synchronize()
        return None
    found = text.state / len(text.tokens) if text.pooling == "mean" else text.state
    return normalize(found, dim=-1).cpu()


def _states(model: Any, ids: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """The states after the last layer, float32 ``[num_texts, width, dimensions]``. ``options``: the
    other arguments of the forward."""
    before = model.config._attn_implementation
    # The engine's attention reads the KV cache of the engine, which has no blocks for these texts.
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        states: torch.Tensor = model.base_model(ids, **options).last_hidden_state
    finally:
        model.set_attn_implementation(before)
    return states.float()


def _pool(
    states: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor, poolings: list[Pooling]
) -> torch.Tensor:
    """One vector for each text, from ``states`` ``[num_texts, width, dimensions]``."""
    rows = torch.arange(len(states), device=states.device)
    found = {
        "first": states[:, 0],
        "last": states[rows, lengths - 1],
        "mean": (states * mask.unsqueeze(-1)).sum(1) / lengths.unsqueeze(-1),
    }
    return torch.stack([found[pooling][row] for row, pooling in enumerate(poolings)])
