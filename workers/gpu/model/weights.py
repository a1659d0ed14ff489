"""The version of a model's weights."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import torch

log = logging.getLogger(__name__)

HASHED = 2**24
"""Number of elements of a weight that are hashed at a time."""


def weights_version(model: Any) -> str:
    """The version of the loaded weights. It is the first 32 hexadecimal digits of a SHA-256 of all
    weights, with their names, types and shapes. If the model is spread over several devices, only
    this rank's parts are hashed.

    The version is a random number if a weight has a type whose bytes cannot be read.
    """
    try:
        return version_of(model.state_dict())
    except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
        log.info("the weights have a random version, because they cannot be hashed: %s", error)
        return secrets.token_hex(16)


def version_of(tensors: Mapping[str, Any]) -> str:
    """``weights_version`` of a model with these weights. Raises an exception if the weights cannot
    be hashed."""
    found = hashlib.sha256()
    for name, weight in sorted(tensors.items()):
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        found.update(f"{name} {local.dtype} {tuple(local.shape)}\n".encode())
        for plain in plain_tensors(local):
            part: torch.Tensor
            for part in torch.split(plain.detach().reshape(-1), HASHED):
                found.update(part.contiguous().cpu().view(torch.uint8).numpy().data)
    return found.hexdigest()[:32]


def plain_tensors(tensor: Any) -> Iterator[torch.Tensor]:
    """The tensors of which a weight consists. A quantized weight is a subclass of Tensor. It
    consists of several plain tensors, but reports the properties of a single tensor."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from plain_tensors(getattr(tensor, name))
