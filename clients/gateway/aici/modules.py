"""Modules of controllers: uploads and tags, the same in both forms."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ....protocol.messages import MAX_MODULE_BYTES, StoredModule, Tagged
from ..bodies import Body, read_body, read_bytes
from ..context import gateway_of
from ..json import json_response

NOBODY = "localhost"
"""The user of a gateway without API keys; AICI's own server names it so."""

TagName = Annotated[str, Meta(min_length=1, max_length=256)]


class SetTags(Body):
    """The body of a POST to ``tags``."""

    module_id: TagName
    tags: TagName | Annotated[list[TagName], Meta(min_length=1)]


async def upload(request: Request) -> Response:
    """Stores the module that is the body, whatever its content type."""
    wasm = await read_bytes(request, MAX_MODULE_BYTES)
    stored = await gateway_of(request).client.upload_controller(wasm, by=user_of(request))
    return json_response(
        {
            "module_id": stored.module,
            "wasm_size": stored.size,
            "compiled_size": stored.compiled_size,
            "time": round(stored.compile_ms),
        }
    )


async def set_tags(request: Request) -> Response:
    """Assigns tags to a module, named by its id or by another tag of it."""
    body = await read_body(request, SetTags)
    tags = [body.tags] if isinstance(body.tags, str) else body.tags
    client = gateway_of(request).client
    stored = await client.tag_controller(body.module_id, *tags, by=user_of(request))
    return json_response({"tags": [described(stored, tag) for tag in dict.fromkeys(tags)]})


async def get_tags(request: Request) -> Response:
    """All tags, those first that were assigned last."""
    stored = await gateway_of(request).client.controllers()
    tags = [described(module, tag) for module in stored for tag in module.tags]
    tags.sort(key=lambda tag: -int(tag["updated_at"]))
    return json_response({"tags": tags})


def described(stored: StoredModule, tag: str) -> dict[str, Any]:
    """A tag, as both forms describe it."""
    tagged = stored.tagged.get(tag, Tagged(at=stored.uploaded))
    return {
        "tag": tag,
        "module_id": stored.module,
        "updated_at": int(tagged.at),
        "updated_by": tagged.by or NOBODY,
        "wasm_size": stored.size,
        "compiled_size": stored.compiled_size,
    }


def user_of(request: Request) -> str:
    """The name of the API key of a request; empty where none is needed."""
    name: str = request.scope.get("api_key_name", "")
    return name
