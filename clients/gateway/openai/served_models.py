"""``GET /v1/models``: the models that are served."""

from __future__ import annotations

import time
from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from ..context import Gateway, gateway_of
from ..errors import ApiError
from ..json import json_response

STARTED = int(time.time())
"""The start time of this gateway. Clients expect a time, but the bus does not report when a model
was loaded."""


class Model(Struct):
    """A loaded model."""

    id: str
    created: int
    """The start time of this gateway, in seconds since 1970."""
    max_model_len: int
    """The context length. The name is vLLM's."""
    owned_by: str = "tokenbus"
    object: Literal["model"] = "model"


class ModelList(Struct):
    """All loaded models."""

    data: list[Model]
    object: Literal["list"] = "list"


async def models(request: Request) -> Response:
    """Answers with the loaded models, sorted by name."""
    gateway = gateway_of(request)
    names = await _loaded(gateway)
    return json_response(ModelList([await _model(gateway, name) for name in names]))


async def model(request: Request) -> Response:
    """Answers with a loaded model, or with 404."""
    gateway = gateway_of(request)
    name = request.path_params["model"]
    names = await _loaded(gateway)
    if name not in names:
        raise ApiError(
            404,
            f"the model {name!r} is not loaded; loaded models: {', '.join(names) or 'none'}",
            code="model_not_found",
            param="model",
        )
    return json_response(await _model(gateway, name))


async def _loaded(gateway: Gateway) -> list[str]:
    status = await gateway.client.status()
    return sorted({name for worker in status.workers for name in worker.models})


async def _model(gateway: Gateway, name: str) -> Model:
    info = await gateway.models.info(name)
    return Model(name, STARTED, info.context_length)
