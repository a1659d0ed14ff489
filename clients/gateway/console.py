"""The console: a page that shows a running system, and its files.

The files in ``clients/console`` are served unchanged, without a build step and without other
servers. The page receives its data over LMTP, on the WebSocket at ``/`` of the same origin.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

FOLDER = Path(__file__).parent.parent / "console"
"""The folder with the files of the page."""
PAGE = "index.html"
TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".wasm": "application/wasm",
}
HEADERS = {
    # The page may load only its own files, and scripts may not build HTML from text.
    "content-security-policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    # File names have no version, so a browser must check whether its copy is current.
    "cache-control": "no-cache",
}

Endpoint = Callable[[Request], Awaitable[Response]]


def routes() -> list[BaseRoute]:
    """The routes ``/console``, ``/console/NAME`` for each file, and ``/``, which redirects to
    ``/console``."""
    files = sorted(path for path in FOLDER.iterdir() if path.suffix in TYPES)
    return [
        Route("/", _from_root),
        Route("/console", _file(FOLDER / PAGE)),
        Route("/console/", _to_page),
        *(Route(f"/console/{path.name}", _file(path)) for path in files if path.name != PAGE),
    ]


def _file(path: Path) -> Endpoint:
    """Serves one file, or status 304 if the browser's copy is current. The file is read once."""
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "etag": etag}

    async def serve(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if etag in (one.strip().removeprefix("W/") for one in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=TYPES[path.suffix])

    return serve


async def _from_root(request: Request) -> Response:
    """Redirects ``/`` to the page, for people who open the address of the gateway."""
    return RedirectResponse("console", headers=HEADERS)


async def _to_page(request: Request) -> Response:
    """Redirects to ``/console`` without a final slash, because the page's links are relative to
    that path."""
    return RedirectResponse("../console", headers=HEADERS)
