"""The console: a page that shows a running system, and its files.

The page receives its data over LMTP, on the WebSocket at ``/`` of the same origin.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from .pages import HEADERS, files_of, serve_file

FOLDER = Path(__file__).parent.parent / "console"
"""The folder with the files of the page."""
PAGE = "index.html"


def routes() -> list[BaseRoute]:
    """The routes ``/console`` and ``/console/``, and ``/console/NAME`` for each file."""
    return [
        Route("/console", serve_file(FOLDER / PAGE)),
        Route("/console/", _to_page),
        *(
            Route(f"/console/{path.name}", serve_file(path))
            for path in files_of(FOLDER)
            if path.name != PAGE
        ),
    ]


async def _to_page(request: Request) -> Response:
    """Redirects to ``/console`` without a final slash, because the page's links are relative to
    that path."""
    return RedirectResponse("../console", headers=HEADERS)
