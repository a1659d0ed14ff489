"""``GET /v1/models``: the models that are served."""

from __future__ import annotations

import time
from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ..context import Gateway, gateway_of
from ..errors import ApiError
from ..json import json_response

STARTED = int(time.time())
"""The start time of this gateway. Clients expect a time, but the bus does not report when a model
was loaded."""


class Model(Struct):
    """A loaded model, a LoRA adapter of a loaded model, or a further name of a model or adapter."""

    id: str
    created: int
    """The start time of this gateway, in seconds since 1970."""
    max_model_len: int
    """The context length. The name is vLLM's."""
    root: str
    """The model that answers. It differs from ``id`` if ``id`` is a name or a pattern of
    ``served_model_name``. The name is vLLM's."""
    owned_by: str = "tokenbus"
    object: Literal["model"] = "model"
    parent: str | UnsetType = UNSET
    """The model of a LoRA adapter; unset for a model. The name is vLLM's."""


class ModelList(Struct):
    """All loaded models."""

    data: list[Model]
    object: Literal["list"] = "list"


async def models(request: Request) -> Response:
    """Answers with the loaded models, sorted by name, followed by their further names and then by
    LoRA adapters. The chat page chooses the first model."""
    gateway = gateway_of(request)
    loaded = await _loaded(gateway)
    names = [*loaded, *(name for name in gateway.models.aliases.names if name not in loaded)]
    found = [await _model(gateway, name, loaded) for name in names]
    listed = [one for one in found if one is not None]
    listed.sort(key=lambda one: one.parent is not UNSET)
    return json_response(ModelList(listed))


async def model(request: Request) -> Response:
    """Answers with a loaded model, or with 404."""
    gateway = gateway_of(request)
    name = request.path_params["model"]
    loaded = await _loaded(gateway)
    found = await _model(gateway, name, loaded)
    if found is None:
        raise ApiError(
            404,
            f"the model {name!r} is not loaded; loaded models: {', '.join(loaded) or 'none'}",
            code="model_not_found",
            param="model",
        )
    return json_response(found)


async def _loaded(gateway: Gateway) -> list[str]:
    status = await gateway.client.status()
    return sorted({name for worker in status.workers for name in worker.models})


async def _model(gateway: Gateway, name: str, loaded: list[str]) -> Model | None:
    """Describes the model with the name or further name ``name``; None if it is not loaded."""
    root = gateway.models.aliases.model(name)
    if root not in loaded and (root or not loaded):
        return None
    info = await gateway.models.info(name)
    return Model(name, STARTED, info.context_length, root=info.name, parent=info.parent or UNSET)
