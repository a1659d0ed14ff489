"""The bodies of requests: bounded, of the right type, and without unknown fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, TypeVar

import msgspec
from msgspec import UNSET, Struct
from starlette.requests import ClientDisconnect, Request

from ...protocol.messages import MAX_BODY_BYTES
from .context import gateway_of
from .errors import ApiError, field_name, invalid_field
from .idempotency import HEADER, LAST_EVENT, current_named

SMALL_BODY_BYTES = 256 * 1024
"""The values of a smaller body are not counted."""
MAX_STRINGS = 65_536
"""Maximum strings of a body, including the names of fields: the event loop creates objects for
them."""
MAX_VALUES = 1_048_576
"""Maximum values of a body, such as token ids."""
_STRUCTURE = b",[{"
"""The characters that may precede a value, in addition to the colon after a name."""
IGNORED_HEADER = "x-tokenbus-ignored"
"""The header that lists the fields of the request without an effect."""


class Body(Struct, kw_only=True, forbid_unknown_fields=True):
    """The base of all bodies. A field that is not declared is refused, with its path."""

    IGNORED: ClassVar[frozenset[str]] = frozenset()
    """Declared fields without an effect, which default to UNSET: accepted and reported."""

    def ignored(self) -> list[str]:
        """The given fields without an effect, by name: ``user``, ``messages[].name``."""
        found = dict.fromkeys(self._ignored(""))
        return list(found)

    def _ignored(self, prefix: str) -> Iterator[str]:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name in self.IGNORED:
                if value is not UNSET:
                    yield prefix + name
            elif isinstance(value, Body):
                yield from value._ignored(f"{prefix}{name}.")
            elif isinstance(value, list) and value and isinstance(value[0], Body):
                for one in value:
                    yield from one._ignored(f"{prefix}{name}[].")


B = TypeVar("B")


async def read_bytes(request: Request, limit: int = MAX_BODY_BYTES) -> bytes:
    """The body of a request; raises ApiError 413 if it is longer than ``limit`` bytes, and
    UnavailableError if the gateway has no room for it."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(int(declared), limit)
    parts: list[bytes] = []
    size = 0
    gateway = gateway_of(request)
    shares = gateway.shares
    named = gateway.named.of(request.headers.get(HEADER), request.headers.get(LAST_EVENT))
    try:
        async for part in request.stream():
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


async def read_body(request: Request, kind: type[B], limit: int = MAX_BODY_BYTES) -> B:
    """The JSON body of a request as a ``kind``.

    Raises ApiError: 415 if it is not declared as JSON, 413 if it is too large, 400 if it is not
    JSON or not a valid ``kind``, with the path of the field at fault.
    """
    check_json(request)
    return decode_body(await read_bytes(request, limit), kind)


def check_json(request: Request) -> None:
    """Raises ApiError 415 if the body of a request is not declared as JSON."""
    declared = request.headers.get("content-type", "")
    kind = declared.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415,
            f"the content type of the body is {declared or 'not given'!r}; it must be "
            "application/json",
            code="unsupported_media_type",
        )


def decode_body(body: bytes, kind: type[B]) -> B:
    """``body`` as a ``kind``; raises ApiError 413 if it has too many values, and 400 with the path
    of the field at fault."""
    if len(body) > SMALL_BODY_BYTES:
        _check_values(body)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        what, path = split_validation(error)
        raise invalid_field(field_name(path), what) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


def split_validation(error: msgspec.ValidationError) -> tuple[str, str]:
    """The fault, in words, and the path of the field: ``$.messages[0].role``."""
    what, _, path = str(error).partition(" - at ")
    path = path.strip("`") or "$"
    quoted = what.split("`")
    if what.startswith("Object contains unknown field"):
        path = f"{path}.{quoted[1]}"
        return f"unknown field {field_name(path)!r}; GET /openapi.json lists the fields", path
    if what.startswith("Object missing required field"):
        path = f"{path}.{quoted[1]}"
        return f"the field {field_name(path)!r} is missing", path
    where = field_name(path)
    shown = what.replace("`", "")
    return (f"{where}: {shown}" if where else shown), path


def ignored_header(names: list[str]) -> dict[str, str]:
    """The header that lists fields without an effect; empty if there are none."""
    return {IGNORED_HEADER: ", ".join(names)} if names else {}


def _check_values(body: bytes) -> None:
    """Raises ApiError 413 if a body has more values than the event loop can decode in time.

    They are counted without a decoder, which would take as long as decoding itself.
    """
    # Without escaped quotes, every string is the text between two quotes.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    num_strings = plain.count(b'"') // 2
    if num_strings > MAX_STRINGS:
        raise _too_many(num_strings, "strings, names of fields included,", MAX_STRINGS)
    structure = b"".join(plain.split(b'"')[::2])
    num_values = len(structure) - len(structure.translate(None, _STRUCTURE))
    if num_values > MAX_VALUES:
        raise _too_many(num_values, "values", MAX_VALUES)


def _too_many(count: int, what: str, limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body has {count} {what} or more; the limit is {limit}; send fewer or longer texts",
        code="too_large",
    )


def _too_large(size: int, limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body has {size} bytes or more; the limit is {limit}",
        code="too_large",
    )
