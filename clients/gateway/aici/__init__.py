"""AICI's REST interface, in both of its published forms, with one implementation.

The later form has controllers (``/v1/controllers``, ``/v1/run``), the earlier one modules
(``/v1/aici_modules``, and ``/v1/completions`` with ``aici_module``). Source: ``docs/REST.md`` and
``pyaici`` of microsoft/aici.
"""

from __future__ import annotations

from dataclasses import replace

from starlette.routing import BaseRoute, Route

from ..errors import AiciError
from ..openapi import Operation
from .modules import SetTags, TagList, Uploaded, get_tags, set_tags, upload
from .runs import RunRequest, run


def routes() -> list[BaseRoute]:
    """The paths of both forms except ``/v1/completions``, which is OpenAI's too."""
    found: list[BaseRoute] = [Route("/v1/run", run, methods=["POST"])]
    for modules in ("/v1/controllers", "/v1/aici_modules"):
        found += [
            Route(modules, upload, methods=["POST"]),
            Route(f"{modules}/tags", set_tags, methods=["POST"]),
            Route(f"{modules}/tags", get_tags, methods=["GET"]),
        ]
    return found


def operations() -> list[Operation]:
    """These paths, as the OpenAPI document describes them."""
    found = [Operation("post", "/v1/run", "Runs a controller", "AICI", RunRequest, stream=True)]
    for modules in ("/v1/controllers", "/v1/aici_modules"):
        tags = f"{modules}/tags"
        found += [
            Operation("post", modules, "Uploads a controller", "AICI", bytes, Uploaded),
            Operation("post", tags, "Tags a controller", "AICI", SetTags, TagList),
            Operation("get", tags, "The tags of controllers", "AICI", None, TagList),
        ]
    return [replace(operation, error=AiciError) for operation in found]
