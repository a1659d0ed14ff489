"""Functions that the rewriting of schemas shares: the drafts of JSON Schema, unions and
intersections of schemas, and comparisons of JSON values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

TYPES = ("null", "boolean", "number", "string", "array", "object")
"""The types of JSON values. An integer is of type ``number``."""
DRAFTS = {"draft-04": 4, "draft-06": 6, "draft-07": 7, "2019-09": 2019}
"""The number of each draft, by a text in ``$schema``. If ``$schema`` has none of these texts, the
schema is of draft 2020-12."""
_FIRST = {
    "const": 6,
    "contains": 6,
    "propertyNames": 6,
    "if": 7,
    "then": 7,
    "else": 7,
    "dependentRequired": 2019,
    "dependentSchemas": 2019,
    "unevaluatedProperties": 2019,
    "unevaluatedItems": 2019,
    "minContains": 2019,
    "maxContains": 2019,
    "prefixItems": 2020,
}
"""By keyword: the first draft that has the keyword. Earlier drafts ignore it."""
_LAST = {"additionalItems": 2019}
"""By keyword: the last draft that has the keyword. ``dependencies`` is not listed, because
llguidance implements it in all drafts."""


MAX_NAMES = 64
"""Maximum number of names of an object's properties that ``names_of`` returns."""


class Unsupported(Exception):
    """A keyword cannot be rewritten."""


def draft_of(root: Any) -> int:
    """The draft of a schema: 3, 4, 6, 7, 2019 or 2020."""
    name = root.get("$schema") if isinstance(root, dict) else None
    if not isinstance(name, str):
        return 2020
    if "draft-03" in name:
        return 3
    return next((draft for part, draft in DRAFTS.items() if part in name), 2020)


def knows(draft: int, keyword: str) -> bool:
    """Whether a draft has a keyword."""
    return _FIRST.get(keyword, 0) <= draft <= _LAST.get(keyword, draft)


def any_of(schemas: Iterable[Any]) -> Any:
    """A schema of the values that match at least one of the schemas."""
    found = [schema for schema in schemas if schema is not False]
    if any(schema is True or schema == {} for schema in found):
        return True
    if len(found) < 2:
        return found[0] if found else False
    return {"anyOf": found}


def all_of(schemas: Iterable[Any]) -> Any:
    """A schema of the values that match all of the schemas."""
    found = [schema for schema in schemas if schema is not True and schema != {}]
    if any(schema is False for schema in found):
        return False
    if len(found) < 2:
        return found[0] if found else True
    return {"allOf": found}


def target(root: Any, reference: Any) -> Any:
    """The target of a reference into the same schema. Raises Unsupported if the schema does not
    have this target."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise Unsupported
    found = root
    for name in unquote(reference).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            raise Unsupported
    return found


def type_of(value: Any) -> str:
    """The type of a JSON value, one of ``TYPES``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def canonical(value: Any) -> str:
    """The canonical text of a JSON value. Two values have the same text if and only if they are
    equal. 1 and 1.0 are equal."""
    return json.dumps(_integral(value), sort_keys=True)


def _integral(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_integral(one) for one in value]
    if isinstance(value, dict):
        return {name: _integral(one) for name, one in value.items()}
    return value


def values_of(schema: Schema) -> list[Any] | None:
    """The values that ``const`` and ``enum`` of a schema allow; None without these keywords."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def objects(value: Any) -> Iterator[Schema]:
    """Yields the JSON objects in a value. An object that occurs at several places is yielded
    once."""
    left, seen = [value], set[int]()
    while left:
        one = left.pop()
        if not isinstance(one, dict | list) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, dict):
            yield one
            left += one.values()
        else:
            left += one


def names_of(root: Any, schema: Any, step: Callable[[int], None], depth: int = 6) -> list[str]:
    """The names of the properties that a schema declares or requires. The target of its reference
    and the members of ``allOf``, ``anyOf`` and ``oneOf`` are included, up to a depth. ``step``
    counts the visited schemas. Raises Unsupported if a reference has no target."""
    step(1)
    if not isinstance(schema, dict) or depth < 0:
        return []
    found = dict.fromkeys([*schema.get("properties", ()), *schema.get("required", ())])
    inner = [one for key in ("allOf", "anyOf", "oneOf") for one in schema.get(key, ())]
    if "$ref" in schema:
        inner.append(target(root, schema["$ref"]))
    for one in inner:
        found |= dict.fromkeys(names_of(root, one, step, depth - 1))
        if len(found) > MAX_NAMES:
            raise Unsupported
    return list(found)


def types_of(schema: Schema) -> list[str]:
    """The value of ``type`` as a list; all types without this keyword."""
    kinds = schema.get("type", TYPES)
    return [kinds] if isinstance(kinds, str) else list(kinds)


def excluding(words: Sequence[str]) -> str:
    """A pattern of all strings except these words."""
    return f"^{_after(sorted(set(words)), 0)}$"


def _after(words: list[str], at: int) -> str:
    """A pattern of the rest of a string after its first ``at`` characters. The string is not one of
    ``words``, but its first ``at`` characters are those of all ``words``."""
    longer = [word for word in words if len(word) > at]
    firsts = sorted({word[at] for word in longer})
    others = f"[^{''.join(map(written, firsts))}]" if firsts else "(?s:.)"
    options = [f"{others}(?s:.)*"]
    for first in firsts:
        rest = _after([word for word in longer if word[at] == first], at + 1)
        options.append(written(first) + rest)
    ends = "" if len(longer) < len(words) else "?"
    return f"(?:{'|'.join(options)}){ends}"


def written(character: str) -> str:
    """A pattern that matches only this character. It can be used inside a character class too."""
    if character.isascii() and not character.isalnum():
        return f"\\x{ord(character):02x}"
    return character
