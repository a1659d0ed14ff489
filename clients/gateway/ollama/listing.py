"""``/api/tags``, ``/api/ps``, ``/api/show`` and ``/api/version``: the served models."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ....protocol.messages import ModelInfo
from ..answer_forms import THOUGHT
from ..bodies.reading import Body, ignored_of, read_body
from ..context import gateway_of
from ..errors import invalid_field
from ..json import json_response
from ..templates.templates import template_of
from .names import loaded_names, served_name

STARTED = datetime.now(UTC).isoformat().replace("+00:00", "Z")
"""The start time of this gateway. The bus does not report when a model was loaded."""


class Details(Struct):
    """Properties of a model, under Ollama's names."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(Struct):
    """A loaded model."""

    name: str
    model: str
    modified_at: str
    size: int
    """Size of the weights in bytes, computed from the number of parameters, the ``dtype`` and the
    memory that quantization saves."""
    digest: str
    """The fingerprint of the tokenizer."""
    details: Details


class ModelListing(Struct):
    """The answer of ``GET /api/tags`` and ``GET /api/ps``."""

    models: list[ListedModel]


class ShowRequest(Body, kw_only=True):
    """The body of ``POST /api/show``."""

    model: str | None = None
    name: str | None = None
    """The older name of ``model``."""


class ShownModel(Struct):
    """The answer of ``POST /api/show``."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    license: str | UnsetType = UNSET


class Version(Struct):
    """The answer of ``GET /api/version``."""

    version: str


async def tags(request: Request) -> Response:
    """Answers with the loaded models."""
    gateway = gateway_of(request)
    infos = [await gateway.models.info(name) for name in await loaded_names(gateway)]
    return json_response(ModelListing([_listed(info) for info in infos]))


async def show(request: Request) -> Response:
    """Answers with the properties of a model."""
    body = await read_body(request, ShowRequest, ignored_of(request))
    name = body.model or body.name
    if not name:
        raise invalid_field("model", "model is missing; give the name of a served model")
    gateway = gateway_of(request)
    model = await gateway.models.get(await served_name(gateway, name))
    template = template_of(model)
    info = model.info
    architecture = info.architecture or "unknown"
    facts = {
        "general.architecture": architecture,
        "general.parameter_count": info.parameters,
        f"{architecture}.context_length": info.context_length,
    }
    can = ["completion", "tools", *(["thinking"] if THOUGHT in template else [])]
    return json_response(
        ShownModel(f"FROM {info.name}", "", template, _details(info), facts, can, STARTED)
    )


async def server_version(request: Request) -> Response:
    """Answers with the version of this server."""
    try:
        return json_response(Version(version("tokenbus")))
    except PackageNotFoundError:
        return json_response(Version("0.0.0"))


def _listed(info: ModelInfo) -> ListedModel:
    width = {"float32": 4, "float64": 8}.get(info.dtype, 2)
    quantized = info.path.quantized
    size = info.parameters * width - (quantized.saved_bytes if quantized else 0)
    return ListedModel(info.name, info.name, STARTED, size, info.fingerprint, _details(info))


def _details(info: ModelInfo) -> Details:
    family = info.architecture.removesuffix("ForCausalLM").lower()
    size = f"{info.parameters / 1e6:.1f}M" if info.parameters < 1e9 else ""
    size = size or f"{info.parameters / 1e9:.1f}B"
    level = info.path.quantized.kind if info.path.quantized else info.dtype
    return Details("", "safetensors", family, [family], size, level)
