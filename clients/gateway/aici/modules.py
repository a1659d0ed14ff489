"""Uploads and tags of controller modules, which are the same in both of AICI's forms."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from ....protocol.messages import MAX_MODULE_BYTES, StoredModule, Tagged
from ..bodies.reading import Body, read_body, read_bytes
from ..context import gateway_of
from ..json import json_response

NOBODY = "localhost"
"""The value of ``updated_by`` if the tag was assigned without an API key, as in AICI's server."""

TagName = Annotated[str, Meta(min_length=1, max_length=256)]


class SetTags(Body):
    """The body of a POST to ``tags``."""

    module_id: TagName
    tags: TagName | Annotated[list[TagName], Meta(min_length=1)]


class Uploaded(Struct):
    """The answer to an upload."""

    module_id: str
    wasm_size: int
    compiled_size: int
    """Size of the compiled module, in bytes; ``wasm_size`` is in bytes too."""
    time: int
    """The time to compile the module, in milliseconds."""


class TagInfo(Struct):
    """A tag of a module."""

    tag: str
    module_id: str
    updated_at: int
    """The time of the last assignment, in seconds since 1970."""
    updated_by: str
    wasm_size: int
    compiled_size: int


class TagList(Struct):
    """The answer to a GET and to a POST of tags."""

    tags: list[TagInfo]


async def upload(request: Request) -> Response:
    """Stores the module in the body. The content type is not checked."""
    wasm = await read_bytes(request, MAX_MODULE_BYTES)
    stored = await gateway_of(request).client.upload_controller(wasm, by=user_of(request))
    time = round(stored.compile_ms)
    return json_response(Uploaded(stored.module, stored.size, stored.compiled_size, time))


async def set_tags(request: Request) -> Response:
    """Assigns tags to a module, which is named by its id or by another tag."""
    body = await read_body(request, SetTags)
    tags = [body.tags] if isinstance(body.tags, str) else body.tags
    client = gateway_of(request).client
    stored = await client.tag_controller(body.module_id, *tags, by=user_of(request))
    return json_response(TagList([described(stored, tag) for tag in dict.fromkeys(tags)]))


async def get_tags(request: Request) -> Response:
    """Answers with all tags, the most recently assigned first."""
    stored = await gateway_of(request).client.controllers()
    tags = [described(module, tag) for module in stored for tag in module.tags]
    tags.sort(key=lambda tag: -tag.updated_at)
    return json_response(TagList(tags))


def described(stored: StoredModule, tag: str) -> TagInfo:
    """The description of the tag ``tag`` of a module."""
    tagged = stored.tagged.get(tag, Tagged(at=stored.uploaded))
    return TagInfo(
        tag,
        stored.module,
        int(tagged.at),
        tagged.by or NOBODY,
        stored.size,
        stored.compiled_size,
    )


def user_of(request: Request) -> str:
    """The name of a request's API key; empty if the gateway does not require keys."""
    name: str = request.scope.get("api_key_name", "")
    return name
