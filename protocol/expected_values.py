"""Translates msgspec's errors about a value into plain words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterator
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

_PLAIN = {
    r"\bint\b": "a whole number",
    r"\bfloat\b": "a number",
    r"\bstr\b": "a text",
    r"\bbool\b": "true or false",
    r"\barray\b": "a list",
    r"\bobject\b": "a JSON object",
    r" of length >= ": " with a length of at least ",
    r" of length <= ": " with a length of at most ",
    r" >= ": " of at least ",
    r" <= ": " of at most ",
    r" > ": " above ",
    r" \| ": " or ",
}
"""Patterns that match msgspec's terms, and the plain words that replace these terms."""
_WRONG = re.compile("Invalid (?:enum )?value (.*)", re.DOTALL)
"""Matches msgspec's error about a field for which only certain values are valid."""
_STEP = re.compile(r"\.(\w+)|\[(\d*)")
"""Matches one part of a path: the name of a field, or the index of an element of a list. For a
value of a dict, the index is empty."""
_BOUND = re.compile(r" [<>]=? | matching regex ")
"""Matches msgspec's error about a number or a length that is out of bounds, or about a text that
does not match a pattern."""
_NAME = re.compile(r"a text matching regex '\^\[([^\]]+)\]\{(\d+),(\d+)\}\$'")
"""Matches the error about a name that is not valid. The groups are the valid characters, and the
bounds of the name's length."""
MAX_SHOWN_NAME = 64
"""Maximum number of characters of a wrong name that are shown."""
MAX_SHOWN = 256
"""Maximum number of characters of msgspec's error that are shown. The error repeats the client's
invalid text, which may have any length."""
MAX_REPEATED_BYTES = 65_536
"""To find the wrong value that an error message shows, up to this number of bytes are decoded
again, from the beginning of the body."""


def expected(error: msgspec.ValidationError, given: object) -> str:
    """Translates msgspec's error into plain words, and adds the value that is wrong."""
    return f"{plain(str(error).split(', got')[0])}, not {given!r}"


def parted(error: msgspec.MsgspecError) -> tuple[str, str]:
    """Divides the text of msgspec's error into the message and the path of the value. The path of
    an error at the root is ``$``."""
    # The invalid text in the message may contain " - at " too. The path follows the last " - at ".
    message, _, path = str(error).rpartition(" - at ")
    if not message:
        message, path = path, "$"
    if len(message) > MAX_SHOWN:
        message = f"{message[:MAX_SHOWN]}…"
    return message, path.removeprefix("`key` in ").strip("`")


def plain(message: str) -> str:
    """Translates the message of msgspec's error into plain words, without its path."""
    wanted = message.split(" - at ")[0].replace("`", "").replace(", got ", ", not ")
    wanted = re.sub(r"^Object missing required field (\w+)", r"the field '\1' is missing", wanted)
    wanted = re.sub(r" ?\| ?null", "", wanted).replace("Expected ", "expected ", 1)
    for term, words in _PLAIN.items():
        wanted = re.sub(term, words, wanted)
    return _NAME.sub(r"\2 to \3 of the characters \1", wanted)


def out_of_bounds(message: str, path: str, body: Callable[[], Any]) -> str:
    """The wrong value, as the end of an error's text, such as ``, not -5``. Empty unless the error
    is about a number that is out of bounds, or about a name that is not valid.

    ``message``: msgspec's error without its path. ``body``: returns the value that contains the
    number or the name at ``path``.
    """
    if not _BOUND.search(message):
        return ""
    try:
        value = body()
        for step in _STEP.finditer(path):
            value = value[step[1] or int(step[2])]
    except (LookupError, TypeError, ValueError, RecursionError):
        # The value cannot be found: the body is malformed or longer than the decoded part, or the
        # path leads through a dict, whose keys msgspec does not report.
        return ""
    if isinstance(value, str) and " matching regex " in message:
        return f", not {value[:MAX_SHOWN_NAME]!r}" + "…" * (len(value) > MAX_SHOWN_NAME)
    return f", not {value}" if isinstance(value, (int, float)) else ""


def named_values(message: str, kind: Hashable, path: str) -> str | None:
    """An error text that lists the valid values of the field at ``path`` in a body of type
    ``kind``. None if the valid values cannot be listed. ``message``: msgspec's error without its
    path."""
    given = _WRONG.fullmatch(message)
    valid = dict.fromkeys(_valid(type_of(kind), path)) if given else {}
    if given is None or not valid:
        return None
    wrong = given[1].lower() if given[1] in ("True", "False") else given[1]
    return f"expected {' or '.join(valid)}, not {wrong}"


def kinds_of(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    """The types of a union. If ``kind`` is not a union, only this type. Bounds are removed from the
    types."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if not isinstance(kind, inspect.UnionType):
        return (kind,)
    return tuple(inner for one in kind.types for inner in kinds_of(one))


@cache
def type_of(kind: Hashable) -> inspect.Type:
    """msgspec's description of a type, for example of a body. Making the description takes up to 10
    ms."""
    return inspect.type_info(kind)


def _valid(kind: inspect.Type, path: str) -> Iterator[str]:
    """Yields the valid values at a path; yields nothing if any value of the right type is valid."""
    kinds = [kind]
    for step in _STEP.finditer(path):
        kinds = [inner for one in kinds for inner in _inner(one, step[1])]
    for one in (last for each in kinds for last in kinds_of(each)):
        if isinstance(one, inspect.LiteralType):
            yield from (repr(v) if isinstance(v, str) else json.dumps(v) for v in one.values)


def _inner(kind: inspect.Type, field: str | None) -> Iterator[inspect.Type]:
    """The types of the field ``field`` of a struct. If ``field`` is None, the type of the elements
    of a list."""
    for one in kinds_of(kind):
        if field is None:
            if isinstance(one, inspect.ListType):
                yield one.item_type
        elif isinstance(one, inspect.StructType):
            if field == one.tag_field:
                yield inspect.LiteralType((one.tag,))
            yield from (each.type for each in one.fields if each.encode_name == field)
