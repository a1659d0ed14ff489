"""Serves the files of the gateway's pages (the chat page and the console) unchanged.

The files have no data of users, so they are served without an API key. The pages send the key with
their requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".wasm": "application/wasm",
}
HEADERS = {
    # A page may load only files of this gateway, and scripts may not build HTML from text.
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

FOLDERS = ("/chat/", "/console/")
"""The paths of the folders with the pages' files."""
PAGES = ("/", "/console")
"""The paths that answer with a page if the client accepts HTML."""

Endpoint = Callable[[Request], Awaitable[Response]]


def files_of(folder: Path) -> list[Path]:
    """The files of a page's folder that are served, sorted by name."""
    return sorted(path for path in folder.iterdir() if path.suffix in TYPES)


def serve_file(path: Path, **headers: str) -> Endpoint:
    """The endpoint that answers with one file. If the browser's copy is current, it answers with
    status 304. The file is read once, in this call. ``headers``: further headers of the answer."""
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    all_headers = {**HEADERS, **headers, "etag": etag}

    async def serve(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if etag in (one.strip().removeprefix("W/") for one in known.split(",")):
            return Response(status_code=304, headers=all_headers)
        return Response(content, headers=all_headers, media_type=TYPES[path.suffix])

    return serve


def wants_page(headers: Headers) -> bool:
    """Whether a request's ``Accept`` header names ``text/html``, as a person's browser does."""
    return "text/html" in headers.get("accept", "")


def is_file_of_page(scope: Scope) -> bool:
    """Whether a request is for a page or a file of a page. Such requests need no API key."""
    if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
        return False
    path = str(scope["path"])
    return path.startswith(FOLDERS) or (path in PAGES and wants_page(Headers(scope=scope)))
