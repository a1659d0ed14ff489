"""Converts msgspec's errors about wrong values of fields to errors in plain words."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import msgspec

from ....protocol.expected_values import named_values, out_of_bounds, parted, plain
from ..errors import ApiError, field_name, invalid_field


def refusal(error: msgspec.ValidationError, kind: Hashable, body: Callable[[], Any]) -> ApiError:
    """The error 400 for a wrong value in a body of the type ``kind``, with the path of its field.

    ``body`` returns the body, decoded without its type.
    """
    what, path = parted(error)
    where = field_name(path)
    if what.startswith("Object missing required field"):
        where = field_name(f"{path}.{what.split('`')[1]}")
        return invalid_field(where, f"the field {where!r} is missing")
    shown = named_values(what, kind, path) or plain(what)
    shown += out_of_bounds(what, path, body)
    return invalid_field(where, f"{where}: {shown}" if where else shown)
