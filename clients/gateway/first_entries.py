"""Waits for the first entries of a stream before the HTTP answer begins, so that a refusal
determines the HTTP status."""

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

    Raises TokenbusError if the stream fails before its first token. Errors with a code in ``shown``
    are not raised, because the answer itself reports them. Raises ClientDisconnect if the client
    disconnects. Both errors close the stream.
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
