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
"""The bus does not report since when a model is served; clients expect a number."""


class Model(Struct):
    """A model that is served."""

    id: str
    created: int
    """When this gateway started, in seconds since 1970."""
    max_model_len: int
    """Its context length, as vLLM names it."""
    owned_by: str = "tokenbus"
    object: Literal["model"] = "model"


class ModelList(Struct):
    """All models that are served."""

    data: list[Model]
    object: Literal["list"] = "list"


async def models(request: Request) -> Response:
    """The models that are loaded, by name."""
    gateway = gateway_of(request)
    names = await _loaded(gateway)
    return json_response(ModelList([await _model(gateway, name) for name in names]))


async def model(request: Request) -> Response:
    """One of the loaded models; 404 if it is not loaded."""
    gateway = gateway_of(request)
    name = request.path_params["model"]
    names = await _loaded(gateway)
    if name not in names:
        raise ApiError(
            404,
            f"the model {name!r} is not served; these are: {', '.join(names) or 'none'}",
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
