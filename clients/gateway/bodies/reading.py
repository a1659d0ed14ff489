"""Reads the bodies of requests, and checks their size, type and fields."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import ClientDisconnect, Request

from ....protocol.expected_values import MAX_REPEATED_BYTES
from ....protocol.messages import MAX_BODY_BYTES
from ..context import Gateway, gateway_of
from ..errors import ApiError
from ..users.idempotency import HEADER, LAST_EVENT, current_named
from ..users.turns import current_user, on_thread
from .content_encoding import decoder_of
from .leniency import Ignored, decode, decode_valid
from .value_counts import MAX_STRINGS, SMALL_BODY_BYTES, ValueCounts
from .wrong_values import refusal

MAX_FREE_BYTES = 8 * 1024
"""Maximum size of a body that is decoded without a turn, in bytes. Decoding a body of 250 KiB may
take 30 ms, and the event loop must not decode a hundred such bodies in one pass."""


class Body(Struct, kw_only=True):
    """The base of the structs of all request bodies. ``leniency.py`` decides whether a field that a
    struct does not declare is ignored or refused."""


B = TypeVar("B", bound=Body)


async def read_bytes(request: Request, limit: int = MAX_BODY_BYTES) -> bytes:
    """The body of a request, decompressed. Raises ApiError 413 if the body is longer than ``limit``
    bytes, 415 if its encoding is unknown, and 400 if it is incomplete or not valid gzip. Raises
    UnavailableError if the gateway's or the user's memory for bodies is used up."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(int(declared), limit)
    parts: list[bytes] = []
    size = 0
    gateway = gateway_of(request)
    shares = gateway.shares
    named = gateway.named.of(request.headers.get(HEADER), request.headers.get(LAST_EVENT))
    try:
        async for part in decoded(request, limit):
            size += len(part)
            if size > limit:
                raise _too_large(size, limit)
            shares.take_bytes(len(part))
            parts.append(part)
    except ClientDisconnect:
        raise ApiError(400, "the connection was closed before the whole body arrived") from None
    body = b"".join(parts)
    if named is not None:
        named.read(request.url.path, body)
        current_named.set(named)
    return body


async def decoded(request: Request, limit: int) -> AsyncIterator[bytes]:
    """The body of a request in decompressed pieces, between which other requests are served.

    Raises ApiError 413 if the compressed body is longer than ``limit`` bytes. A compressed body may
    have any number of empty blocks, so the caller's bound on the decompressed size is not enough.
    """
    decoder = decoder_of(request.headers.get("content-encoding", ""))
    received = 0
    async for part in request.stream():
        received += len(part)
        if received > limit:
            raise _too_large(received, limit)
        for number, piece in enumerate(decoder.pieces(part)):
            if number:
                await asyncio.sleep(0)
            yield piece
    decoder.end()


async def read_body(request: Request, kind: type[B], ignored: Ignored | None = None) -> B:
    """The JSON body of a request as a ``kind``. ``ignored`` receives the names of fields that have
    no effect. If ``ignored`` is None, unknown fields are refused.

    Raises ApiError 415 if the content type is not JSON, 413 if the body is too large or has too
    many values, and 400 if the body is not a valid ``kind``. The error 400 has the path of a faulty
    field.
    """
    check_json(request)
    return await decode_in_turn(gateway_of(request), await read_bytes(request), kind, ignored)


def ignored_of(request: Request) -> Ignored:
    """A new ``Ignored``, which collects the names of the request's fields that have no effect."""
    return Ignored(gateway_of(request).settings.strict_fields)


def check_json(request: Request) -> None:
    """Raises ApiError 415 if the content type of a request is not JSON. The type that curl declares
    by default is accepted too, unless the request has an ``Origin`` header, which browsers send
    with the requests of web pages."""
    declared = request.headers.get("content-type", "")
    kind = declared.partition(";")[0].strip().lower()
    if kind == "application/x-www-form-urlencoded" and "origin" not in request.headers:
        return
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415,
            f"the content type of the body is {declared or 'not given'!r}; it must be "
            "application/json",
            code="unsupported_media_type",
        )


async def decode_in_turn(
    gateway: Gateway, body: bytes, kind: type[B], ignored: Ignored | None = None
) -> B:
    """Decodes ``body`` as ``read_body`` does, in a turn (``body_turn``). The memory of the decoded
    values counts towards the user's share; raises UnavailableError if it is used up.

    A body of more than ``MAX_FREE_BYTES`` that is not valid, or has elements to leave out, is
    decoded on a thread. Searching 250 KiB for the fault takes up to 80 ms.
    """
    rules = ignored or _strict()
    async with body_turn(gateway, body):
        gateway.shares.take_bytes(_memory_of(body))
        if len(body) <= MAX_FREE_BYTES:
            return _decoded(body, kind, rules)
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return decode_valid(body, kind, rules)
    return await on_thread(gateway.large_bodies, lambda: _decoded(body, kind, rules))


async def take_decoded(gateway: Gateway, body: bytes) -> None:
    """Counts a body and the memory of its decoded values until the current request ends. For a task
    that continues after the request that decoded the body. Raises as ``decode_in_turn`` does."""
    async with body_turn(gateway, body):
        gateway.shares.take_bytes(len(body) + _memory_of(body))


@asynccontextmanager
async def body_turn(gateway: Gateway, body: bytes) -> AsyncIterator[None]:
    """Waits until the event loop may decode a body or count its values. The event loop decodes at
    most one body of more than ``MAX_FREE_BYTES`` in each pass. If bodies of several users wait, the
    users take turns."""
    if len(body) <= MAX_FREE_BYTES:
        yield
        return
    async with gateway.large_bodies.of(current_user.get()):
        # Without this pause, several requests could decode large bodies in the same pass, if each
        # of them finds the lock free.
        await asyncio.sleep(0)
        yield


def _memory_of(body: bytes) -> int:
    """The memory of the decoded values of a body. Raises ApiError 413 if a large body has too many
    values."""
    counts = ValueCounts.of((body,)) if len(body) <= SMALL_BODY_BYTES else _checked_counts(body)
    return counts.memory


def decode_body(body: bytes, kind: type[B], ignored: Ignored | None = None) -> B:
    """Decodes ``body`` as a ``kind`` without a turn, for a Python client. Raises ApiError 413 if
    the body has too many values, and 400 with the path of a faulty field."""
    if len(body) > SMALL_BODY_BYTES:
        _checked_counts(body)
    return _decoded(body, kind, ignored or _strict())


def _strict() -> Ignored:
    return Ignored(strict=True, accepted=frozenset())


def _decoded(body: bytes, kind: type[B], ignored: Ignored) -> B:
    try:
        return decode(body, kind, ignored)
    except msgspec.ValidationError as error:
        beginning = body[:MAX_REPEATED_BYTES]
        raise refusal(error, kind, lambda: msgspec.json.decode(beginning)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


def check_inner(texts: Sequence[str]) -> None:
    """Raises ApiError 413 if JSON texts in the string fields of a body have too many values.
    Decoding them would block the event loop for too long."""
    if sum(map(len, texts)) <= SMALL_BODY_BYTES:
        return
    counts = ValueCounts.of(text.encode(errors="surrogatepass") for text in texts)
    count = counts.strings + counts.values
    if count > MAX_STRINGS:
        raise _too_many(count, "values in texts that are JSON", MAX_STRINGS)


def _checked_counts(body: bytes) -> ValueCounts:
    """The numbers of values in a body. Raises ApiError 413 if they are too large.

    Decoding many values would block the event loop for too long. The values are therefore counted
    in the raw bytes.
    """
    counts = ValueCounts.of((body,))
    if counts.excess is not None:
        raise _too_many(*counts.excess)
    return counts


def _too_many(count: int, what: str, limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body has at least {count} {what}; at most {limit} are allowed",
        code="too_large",
    )


def _too_large(size: int, limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body has at least {size} bytes; at most {limit} are allowed",
        code="too_large",
    )
