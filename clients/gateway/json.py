"""JSON answers, encoded by msgspec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

_encoder = msgspec.json.Encoder()


def encode(value: Any) -> bytes:
    """Encodes structs, dicts, lists, texts and numbers as JSON."""
    return _encoder.encode(value)


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """An answer with ``value`` as its JSON body."""
    return Response(encode(value), status, headers, "application/json")
