"""The beginning of a stream, before its answer begins, so that a refusal can still set the
status."""

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

    Raises TokenbusError if the stream failed before any token, unless the code of its error is one
    of ``shown``, which the answer itself shows. Raises ClientDisconnect if the client has
    disconnected. In both cases the stream is closed.
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
