"""The version of a model's weights."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Mapping
from typing import Any

import torch

log = logging.getLogger(__name__)

HASHED = 2**24
"""Number of elements of a weight that are hashed at a time."""


def weights_version(model: Any) -> str:
    """The version of the loaded weights: the first 32 hexadecimal digits of a SHA-256 of all
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
    """``weights_version`` of a model with these weights. Raises an exception if they cannot be
    hashed."""
    found = hashlib.sha256()
    for name, weight in sorted(tensors.items()):
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        found.update(f"{name} {local.dtype} {tuple(local.shape)}\n".encode())
        for part in local.detach().reshape(-1).split(HASHED):
            found.update(part.contiguous().cpu().view(torch.uint8).numpy())
    return found.hexdigest()[:32]
