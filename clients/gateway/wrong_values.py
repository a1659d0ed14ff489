"""Errors about the values of fields, in plain words."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator

import msgspec
from msgspec import inspect

from ...protocol.expected_values import plain
from .errors import ApiError, field_name, invalid_field
from .leniency import kinds_of

_STEP = re.compile(r"\.(\w+)|\[")
"""A step of a path: into a field, or into an element of a list."""


def refusal(error: msgspec.ValidationError, kind: Hashable) -> ApiError:
    """The error 400 for a wrong value in a body of the type ``kind``, with the path of its
    field."""
    what, _, path = str(error).partition(" - at ")
    path = path.removeprefix("`key` in ").strip("`") or "$"
    where = field_name(path)
    if what.startswith("Object missing required field"):
        where = field_name(f"{path}.{what.split('`')[1]}")
        return invalid_field(where, f"the field {where!r} is missing")
    given = re.fullmatch("Invalid (?:enum )?value (.*)", what, re.DOTALL)
    valid = dict.fromkeys(_valid(inspect.type_info(kind), path)) if given else ()
    shown = plain(what)
    if given and valid:
        wrong = given[1].lower() if given[1] in ("True", "False") else given[1]
        shown = f"expected {' or '.join(valid)}, not {wrong}"
    return invalid_field(where, f"{where}: {shown}" if where else shown)


def _valid(kind: inspect.Type, path: str) -> Iterator[str]:
    """The valid values at a place where only certain values are valid."""
    kinds = [kind]
    for step in _STEP.finditer(path):
        kinds = [inner for one in kinds for inner in _inner(one, step[1])]
    for one in (last for each in kinds for last in kinds_of(each)):
        if isinstance(one, inspect.LiteralType):
            yield from (repr(v) if isinstance(v, str) else json.dumps(v) for v in one.values)


def _inner(kind: inspect.Type, field: str | None) -> Iterator[inspect.Type]:
    """The types of a field, or of an element if ``field`` is None."""
    for one in kinds_of(kind):
        if field is None:
            if isinstance(one, inspect.ListType):
                yield one.item_type
        elif isinstance(one, inspect.StructType):
            if field == one.tag_field:
                yield inspect.LiteralType((one.tag,))
            yield from (each.type for each in one.fields if each.encode_name == field)
