"""Waits for the first entries of a stream before the HTTP answer begins. If the bus refuses the
request, the answer can then have an error status."""

from __future__ import annotations

from collections.abc import Container

from starlette.requests import Request

from ...protocol.errors import Code, error_for
from ...protocol.messages import Token
from .. import AsyncStream
from .events import unless_disconnected


async def first_entries(
    request: Request, stream: AsyncStream, shown: Container[str] = ()
) -> list[Token]:
    """The first entries of the stream that answers ``request``.

    ``shown``: codes of errors that the body of the answer reports. Raises TokenbusError if the bus
    refuses the request, or if the first entry is an error with another code. Raises
    ClientDisconnect if the client disconnects. If an error is raised, the stream is closed.
    """
    try:
        first = await unless_disconnected(request.receive, stream.arrived())
        begin = first[0] if first else None
        if begin and begin.finish_reason == "error" and begin.code not in shown:
            raise error_for(begin.code or Code.INTERNAL, begin.error or "the sequence failed")
    except BaseException:
        stream.close()
        raise
    return first
