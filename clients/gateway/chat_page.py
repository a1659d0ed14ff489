"""Serves the chat page at ``/`` and its files, and converts a chat to a request to the bus.

The page sends its conversations to ``/v1/chat/completions``, like any other client.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from .bodies.reading import ignored_of, read_body
from .console import FOLDER as CONSOLE
from .context import gateway_of
from .conversation.planning import prepare
from .events import unless_disconnected
from .generation.generations import rest_of_context
from .json import json_response
from .openai.chat_bodies import ChatRequest
from .pages import HEADERS, files_of, serve_file, wants_page
from .tokenization import num_items

FOLDER = Path(__file__).parent.parent / "chat"
"""The folder with the files of the page."""
PAGE = "index.html"
SHARED = ("base.css", "dom.js", "icon.svg")
"""Files of the console's folder that the chat page also uses."""


class BusRequest(msgspec.Struct):
    """The request to the bus that generates the answer to a chat."""

    text: str
    """The text of the prompt, with special tokens."""
    generate: dict[str, Any]
    """The fields of the ``GENERATE`` message."""


def routes() -> list[BaseRoute]:
    """The routes ``/``, ``/chat/NAME`` for each file, and ``/console/request``."""
    names = [path for path in files_of(FOLDER) if path.name != PAGE]
    return [
        Route("/", _root()),
        *(Route(f"/chat/{path.name}", serve_file(path)) for path in names),
        *(Route(f"/chat/{name}", serve_file(CONSOLE / name)) for name in SHARED),
        Route("/console/request", bus_request, methods=["POST"]),
    ]


def _root() -> Any:
    """Answers browsers with the page. Redirects other clients to ``/console``."""
    page = serve_file(FOLDER / PAGE, vary="accept")

    async def root(request: Request) -> Response:
        if wants_page(request.headers):
            return await page(request)
        return RedirectResponse("console", headers={**HEADERS, "vary": "accept"})

    return root


async def bus_request(request: Request) -> Response:
    """Converts the body of a chat completion to a request to the bus. The console sends this
    request to generate the answer again."""
    ignored = ignored_of(request)
    body = await read_body(request, ChatRequest, ignored)
    body.check()
    gateway = gateway_of(request)
    conversation = await gateway.models.tokenization.prepare(
        num_items(body.messages, body.tools), body.to_conversation
    )
    work = prepare(gateway, body.model, conversation, ignored)
    prepared = await unless_disconnected(request.receive, work)
    options = body.options(prepared.constraint)
    options.setdefault("max_tokens", rest_of_context(prepared))
    text = await prepared.model.detokenize(prepared.ids)
    fields = {**options, "model": prepared.model.name, "prompt": prepared.ids}
    return json_response(BusRequest(text, fields))
