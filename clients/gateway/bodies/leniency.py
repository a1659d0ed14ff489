"""Decides which fields of a request have no effect, and which fields are refused.

Programs send fields that this gateway does not implement. By default, unknown fields are ignored.
The header ``x-tokenbus-ignored`` of the answer names the unknown fields at the top level, except
fields that are null or false. A list may have elements of an unknown ``type``, such as hosted
tools. These elements are left out, and the header names them. With the setting ``strict_fields``,
unknown fields and elements are refused, except fields in ``WITHOUT_EFFECT``.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator
from functools import cache, cached_property
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct, inspect

from ....protocol.decoders import convert, json_decoder
from ....protocol.expected_values import kinds_of, type_of
from ..errors import invalid_field

IGNORED_HEADER = "x-tokenbus-ignored"
"""The header that lists the request's fields that have no effect."""
MAX_NAMES = 32
"""Maximum number of names in the header."""
MAX_NAME_CHARS = 80
"""Maximum number of characters of a name in the header."""

_OPENAI = {
    "user",
    "metadata",
    "store",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
    "verbosity",
    "reasoning",
    "max_tool_calls",
    "stream_options",
    "include_obfuscation",
    "client_metadata",
}
_SENT_BACK = {
    "annotations",
    "parsed",
    "parsed_arguments",
    "logprobs",
    "id",
    "status",
    "phase",
    "encrypted_content",
}
"""Fields in OpenAI's messages and items, which clients send back as they received them."""
_ANTHROPIC = {
    "cache_control",
    "citations",
    "caller",
    "toolset_name",
    "signature",
    "display",
    "speed",
    "user_profile_id",
    "workspace_id",
    "diagnostics",
    "inference_geo",
    "allowed_callers",
    "defer_loading",
    "eager_input_streaming",
    "input_examples",
    "strict",
}
"""Fields of Anthropic's interface. ``cache_control`` has no effect, because prefixes are always
cached."""
WITHOUT_EFFECT = frozenset(_OPENAI | _SENT_BACK | _ANTHROPIC)
"""Fields of other servers. If a body has such a field, and its struct does not declare the field,
the field does not change the answer. ``strict_fields`` accepts these fields."""
CHANGES_ANSWER = {
    "prompt": "prompts are not stored; send the messages",
    "prompt_embeds": "prompts are text or token ids",
    "use_beam_search": "sequences are sampled; leave use_beam_search out",
}
"""Unknown fields at the top level that are always refused, even without ``strict_fields``. If the
gateway ignored such a field, the answer would not be the requested answer. The value is the end of
the error message for the field."""
REFERENCES = frozenset({"item_reference"})
"""Types of elements that stand for parts of the conversation, and are never left out. If an
interface does not support such a type, it refuses the request."""


class Ignored:
    """Collects the names of the parts of one request that have no effect. With ``strict_fields``,
    refuses these parts."""

    def __init__(self, strict: bool = False, accepted: frozenset[str] = WITHOUT_EFFECT) -> None:
        """``strict``: unknown fields are refused, except those in ``accepted``."""
        self.strict = strict
        self.accepted = accepted
        self.names: dict[str, None] = {}

    def add(self, name: str) -> None:
        """Records a field that has no effect."""
        self.names[name] = None

    def leave_out(self, name: str, message: str) -> None:
        """Records a part that is left out. With ``strict_fields``, raises ApiError 400 with
        ``message``."""
        if self.strict:
            raise invalid_field(name, message)
        self.add(name)

    @property
    def headers(self) -> dict[str, str]:
        """The header that lists the collected names; empty if no name was collected."""
        names = [_printable(name) for name in list(self.names)[:MAX_NAMES]]
        if len(self.names) > MAX_NAMES:
            names.append(f"and {len(self.names) - MAX_NAMES} more")
        return {IGNORED_HEADER: ", ".join(names)} if names else {}


def _printable(name: str) -> str:
    """A name that a client chose, shortened and with only characters that a header may have."""
    shown = name[:MAX_NAME_CHARS].encode("ascii", "backslashreplace").decode()
    return "".join(c if " " <= c <= "~" and c != "," else "?" for c in shown)


K = TypeVar("K", bound=Struct)


def decode(data: bytes, kind: type[K], ignored: Ignored) -> K:
    """Decodes a JSON body as a ``kind``. Raises ApiError 400 if a field is refused, and
    msgspec.DecodeError or ValidationError if the body is not valid."""
    try:
        return decode_valid(data, kind, ignored)
    except msgspec.ValidationError:
        return _repaired(data, kind, ignored)


def decode_valid(data: bytes, kind: type[K], ignored: Ignored) -> K:
    """Decodes a JSON body that needs no repair. Raises msgspec.ValidationError if elements must be
    left out, if the body is not a valid ``kind``, or if unknown fields are refused (``decode``
    searches for them)."""
    if ignored.strict:
        raise msgspec.ValidationError("the body must be searched for unknown fields")
    given = json_decoder(dict[str, Raw]).decode(data)
    known = _fields(kind)
    for name, value in given.items():
        if name in known or bytes(value) in (b"null", b"false"):
            continue
        if name in CHANGES_ANSWER:
            raise invalid_field(name, f"{name} is not supported: {CHANGES_ANSWER[name]}")
        ignored.add(name)
    return json_decoder(kind).decode(data)


def declared_fields(value: dict[str, Any], kind: Hashable) -> dict[str, Any]:
    """Returns an object without its unknown elements and fields, at any depth. ``kind``: the struct
    that declares the fields, or a union of structs. The result is empty if the type of the object
    is unknown."""
    info = type_of(kind)
    if _shape_of(info).struct_of(value) is None:
        return {}
    found: dict[str, Any] = _walk(value, info, "", Ignored())
    return found


@cache
def _fields(kind: Hashable) -> frozenset[str]:
    """The names of the fields that the struct of a body declares."""
    info = type_of(kind)
    assert isinstance(info, inspect.StructType)
    return frozenset(field.encode_name for field in info.fields)


def _repaired(data: bytes, kind: type[K], ignored: Ignored) -> K:
    """Decodes a body after its unknown elements and fields have been removed or refused."""
    value = _walk(msgspec.json.decode(data), type_of(kind), "", ignored)
    return convert(value, kind, str_keys=True)


class _Shape:
    """The properties of a declared type that ``_walk`` uses. A body may have thousands of values of
    the type, so these properties are computed only once."""

    def __init__(self, kind: inspect.Type) -> None:
        self.kind = kind
        kinds = kinds_of(kind)
        types = {type(one) for one in kinds}
        self.is_int = inspect.IntType in types and inspect.FloatType not in types
        """Whether a number such as ``1.0`` becomes an int."""
        self.structs = [one for one in kinds if isinstance(one, inspect.StructType)]
        items = [one.item_type for one in kinds if isinstance(one, inspect.ListType)]
        elements = [one for item in items for one in kinds_of(item)]
        structs = [one for one in elements if isinstance(one, inspect.StructType)]
        self.element = items[0] if structs else None
        """The type of a list's elements; None if no element is decoded to a struct."""
        types_of_elements = frozenset(_types(structs))
        self.types = types_of_elements | REFERENCES if types_of_elements else frozenset()
        """The values of ``type`` that an element of a list may have; empty if every value is
        allowed."""

    @cached_property
    def fields(self) -> dict[str, inspect.Type]:
        """The types of the fields of a struct by their names."""
        return {field.encode_name: field.type for one in self.structs for field in one.fields}

    def struct_of(self, value: dict[str, Any]) -> inspect.StructType | None:
        """The struct to which ``value`` is decoded; None if it is not decoded to a struct."""
        structs = self.structs
        if len(structs) != 1:
            return next((one for one in structs if value.get(one.tag_field or "") == one.tag), None)
        [only] = structs
        if only.tag_field is None or value.get(only.tag_field, only.tag) == only.tag:
            return only
        return None


_shapes: dict[int, _Shape] = {}
"""The shapes of declared types. The types cannot be hashed, so the key is ``id`` of the type. A
shape has a reference to its type, so that no other type gets the same id."""


def _shape_of(kind: inspect.Type) -> _Shape:
    shape = _shapes.get(id(kind))
    if shape is None:
        shape = _shapes[id(kind)] = _Shape(kind)
    return shape


def _walk(value: Any, kind: inspect.Type, path: str, ignored: Ignored) -> Any:
    """A value without its unknown elements and fields. ``kind``: the declared type of the value.
    ``path``: the place of the value in the body. A number such as ``1.0`` becomes an int if the
    declared type is int."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value) if _shape_of(kind).is_int else value
    if isinstance(value, list):
        return _walk_list(value, _shape_of(kind), path, ignored)
    struct = _shape_of(kind).struct_of(value) if isinstance(value, dict) else None
    if struct is None:
        return value
    fields = _shape_of(struct).fields
    found = {}
    for name, inner in value.items():
        if name in fields:
            if isinstance(inner, str):
                found[name] = inner
            else:
                found[name] = _walk(inner, fields[name], _below(path, name), ignored)
        elif name == struct.tag_field:
            found[name] = inner
        elif ignored.strict and name in ignored.accepted:
            ignored.add(_anywhere(_below(path, name)))
        elif ignored.strict:
            place = _below(path, name)
            what = f"unknown field {place!r}; GET /openapi.json lists the fields"
            raise invalid_field(place, what)
    return found


def _below(path: str, name: str) -> str:
    """The place of a field of the object at ``path``."""
    return f"{path}.{name}" if path else name


def _walk_list(value: list[Any], shape: _Shape, path: str, ignored: Ignored) -> list[Any]:
    item, types = shape.element, shape.types
    if item is None:
        return value
    found = []
    for number, element in enumerate(value):
        # Only objects with fields need the slower code below. A body may have a million numbers and
        # empty objects, but at most ``MAX_STRINGS`` fields.
        if not isinstance(element, dict) or not element:
            found.append(element)
            continue
        place = f"{path}[{number}]"
        given = element.get("type")
        if isinstance(given, str) and types and given not in types and not ignored.strict:
            ignored.add(f"{place} ({given})")
        else:
            found.append(_walk(element, item, place, ignored))
    return found


def _types(structs: Iterable[inspect.StructType]) -> Iterator[str]:
    """The values of ``type`` that the elements of a list may have."""
    for struct in structs:
        if struct.tag_field == "type":
            yield str(struct.tag)
        for field in struct.fields:
            if field.name == "type":
                for kind in kinds_of(field.type):
                    if isinstance(kind, inspect.LiteralType):
                        yield from map(str, kind.values)


def _anywhere(place: str) -> str:
    """A place without the indices of elements, for example ``messages[].id``."""
    return re.sub(r"\[\d+\]", "[]", place)
