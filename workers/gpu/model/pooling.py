"""Vectors of texts: the states after a model's last layer, pooled over the tokens of each text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch.nn.functional import normalize
from transformers import PreTrainedModel
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
    model = loaded.model
    before = model.config._attn_implementation
    # The engine's attention reads the KV cache of the engine, which has no blocks for these texts.
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        body = model.base_model
        states = body(ids.to(loaded.device), attention_mask=mask.long()).last_hidden_state
    finally:
        model.set_attn_implementation(before)
    return normalize(_pool(states.float(), mask, lengths, poolings), dim=-1).cpu()


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
