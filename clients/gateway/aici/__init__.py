"""AICI's REST interface, in both published forms.

The later form uses ``/v1/controllers`` and ``/v1/run``. The earlier form uses ``/v1/aici_modules``,
and ``/v1/completions`` with ``aici_module``. Source: ``docs/REST.md`` and ``pyaici`` of
microsoft/aici.
"""

from __future__ import annotations

from dataclasses import replace

from starlette.routing import BaseRoute, Route

from ..errors import AiciError
from ..openapi import Operation
from .modules import SetTags, TagList, Uploaded, get_tags, set_tags, upload
from .runs import RunRequest, run


def routes() -> list[BaseRoute]:
    """The paths of both forms, except ``/v1/completions``, which OpenAI's routes contain."""
    found: list[BaseRoute] = [Route("/v1/run", run, methods=["POST"])]
    for modules in ("/v1/controllers", "/v1/aici_modules"):
        found += [
            Route(modules, upload, methods=["POST"]),
            Route(f"{modules}/tags", set_tags, methods=["POST"]),
            Route(f"{modules}/tags", get_tags, methods=["GET"]),
        ]
    return found


def operations() -> list[Operation]:
    """The operations for the OpenAPI document."""
    found = [Operation("post", "/v1/run", "Runs a controller", "AICI", RunRequest, stream=True)]
    for modules in ("/v1/controllers", "/v1/aici_modules"):
        tags = f"{modules}/tags"
        found += [
            Operation("post", modules, "Uploads a controller", "AICI", bytes, Uploaded),
            Operation("post", tags, "Tags a controller", "AICI", SetTags, TagList),
            Operation("get", tags, "The tags of controllers", "AICI", None, TagList),
        ]
    return [replace(operation, error=AiciError) for operation in found]
