"""Parses and compares JSON values with exact numbers."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

HUGE = 10**400
"""Replaces a number that is too large for a float."""


def identity(value: Any) -> Any:
    """The *identity* of a JSON value. Two values have equal identities if and only if the values
    are equal."""
    if isinstance(value, list):
        return tuple(map(identity, value))
    if isinstance(value, dict):
        return frozenset((name, identity(one)) for name, one in value.items())
    return ("", value) if isinstance(value, bool) else value


def exact(text: str | bytes) -> Any:
    """Parses JSON with exact decimal numbers, because the float 0.07 is not a multiple of 0.01."""
    return json.loads(text, parse_float=_number)


def _number(text: str) -> int | Decimal:
    number = float(text)
    if math.isinf(number):
        return int(math.copysign(1, number)) * HUGE
    return int(number) if number.is_integer() else Decimal(text)
