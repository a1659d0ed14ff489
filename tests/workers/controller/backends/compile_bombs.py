"""51 schemas whose compilation takes long, or needs much memory or a deep stack.

The first schema is from https://github.com/vllm-project/vllm/issues/54003: nested ``oneOf``, 16
deep.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

Schema = dict[str, Any]
INTEGER: Schema = {"type": "integer"}
TEXT: Schema = {"type": "string"}


class Bomb(NamedTuple):
    """A schema, and its name in the ids of tests."""

    name: str
    schema: Schema


def nested(keyword: str, depth: int) -> Schema:
    """Nested alternatives. One alternative of each level is an object whose property contains the
    level below."""
    schema: Schema = {"type": "object", "properties": {"end": TEXT}, "required": ["end"]}
    for level in range(depth):
        inner = {"type": "object", "properties": {f"p{level}": schema}, "required": [f"p{level}"]}
        other = {"type": "object", "properties": {f"q{level}": INTEGER}, "required": [f"q{level}"]}
        schema = {keyword: [inner, other, {**other, "properties": {f"q{level}": TEXT}}]}
    return schema


def doubled(keyword: str, depth: int) -> Schema:
    """Each level has two alternatives, which both refer to the level below. Written out, the schema
    has 2 to the power of ``depth`` alternatives."""
    levels: Schema = {"level0": {"type": "object", "properties": {"end": TEXT}}}
    for level in range(depth):
        next_one = {"$ref": f"#/$defs/level{level}"}
        levels[f"level{level + 1}"] = {
            keyword: [
                {"type": "object", "properties": {name: next_one}, "required": [name]}
                for name in (f"p{level}", f"q{level}")
            ]
        }
    return {"$defs": levels, "$ref": f"#/$defs/level{depth}"}


def flat(keyword: str, depth: int) -> Schema:
    """Alternatives directly inside alternatives, without objects or references between them."""
    schema: Schema = {"type": "object", "properties": {"end": TEXT}}
    for level in range(depth):
        other = {"type": "object", "properties": {f"p{level}": INTEGER}}
        schema = (
            {keyword: [schema, other, {"allOf": [schema, other]}]}
            if level < 7
            else {keyword: [schema, other]}
        )
    return schema


def product(parts: int, wide: int) -> Schema:
    """``parts`` lists of ``wide`` alternatives. A value must match an alternative of each list."""
    return {
        "allOf": [
            {"anyOf": [{"properties": {f"p{i}_{j}": INTEGER}} for j in range(wide)]}
            for i in range(parts)
        ]
    }


def intersection(most: int, letters: str = "ab") -> Schema:
    """An object with a string that must match several patterns."""
    either = "|".join(letters)
    patterns = [{"pattern": f"^({either})*a({either}){{{n}}}c$"} for n in range(3, most)]
    return {"type": "object", "properties": {"deep": {"type": "string", "allOf": patterns}}}


def web(size: int, required: bool) -> Schema:
    """``size`` definitions, each of which refers to all definitions."""
    properties = {f"p{i}": {"$ref": f"#/$defs/d{i}"} for i in range(size)}
    part: Schema = {"type": "object", "properties": properties}
    if required:
        part = {"anyOf": [{**part, "required": list(properties)}, INTEGER]}
    return {"$defs": {f"d{i}": part for i in range(size)}, "$ref": "#/$defs/d0"}


def chain(keyword: str, length: int) -> Schema:
    """``length`` definitions, each of which refers to the next one twice."""
    links: Schema = {f"d{i}": {keyword: 2 * [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(length)}
    return {"$defs": {**links, f"d{length}": INTEGER}, "$ref": "#/$defs/d0"}


def deep(keyword: str, depth: int) -> Schema:
    """A schema with ``depth`` levels, each inside the next."""
    schema: Schema = INTEGER
    for _ in range(depth):
        match keyword:
            case "properties":
                schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
            case "items":
                schema = {"type": "array", "items": schema, "minItems": 2, "maxItems": 3}
            case _:
                schema = {"type": "object", "additionalProperties": schema, "minProperties": 1}
    return schema


def bombs() -> Iterator[Bomb]:
    """All bombs."""
    yield Bomb("oneOf, 16 deep", nested("oneOf", 16))
    for keyword in ("oneOf", "anyOf", "allOf"):
        yield Bomb(f"{keyword}, 24 deep", nested(keyword, 24))
        for depth in (8, 60):
            yield Bomb(f"{keyword}, doubled {depth} times", doubled(keyword, depth))
        yield Bomb(f"{keyword}, written out", flat(keyword, 9))
        yield Bomb(f"a chain of {keyword}", chain(keyword, 24))
    for parts, wide in ((8, 4), (10, 10), (16, 2), (30, 3)):
        yield Bomb(f"{wide} to the power of {parts}", product(parts, wide))
    for most in (12, 20, 30):
        yield Bomb(f"{most} patterns at once", intersection(most))
    yield Bomb("patterns of many letters", intersection(16, "abcdefgh"))
    for size in (20, 50, 100):
        yield Bomb(f"a web of {size}", web(size, required=False))
        yield Bomb(f"a web of {size}, required", web(size, required=True))
    values = [f"value {i} of {i * i}" for i in range(20_000)]
    yield Bomb("a huge enum", {"enum": values})
    yield Bomb("huge enums, both", {"allOf": [{"enum": values}, {"enum": values[::-1]}]})
    yield Bomb("enums of objects", {"enum": [{"a": value} for value in values]})
    array: Schema = {"type": "array", "items": TEXT}
    yield Bomb("minItems", {**array, "minItems": 10**6})
    yield Bomb("maxItems", {**array, "minItems": 10**4, "maxItems": 10**6})
    yield Bomb("arrays in arrays", deep("items", 20))
    yield Bomb("many prefixItems", {"type": "array", "prefixItems": [array] * 5_000})
    yield Bomb("minLength", {**TEXT, "minLength": 10**6, "maxLength": 10**7})
    text: Schema = {**TEXT, "minLength": 999}
    yield Bomb("a long pattern", {**text, "pattern": "^(.{1,9}x){1,99}$"})
    for pattern in (
        "^((a|b|ab){1,500}c){1,500}$",
        "^(a?){5000}a{5000}$",
        "^(([a-z]{1,100}){1,100}){1,100}$",
        "^(.*a.{30}|.*b.{31}|.*c.{32})$",
        r"^(\w{1,1000} ){1,1000}$",
        "(x+x+)+y" * 50,
    ):
        yield Bomb(f"the pattern {pattern[:20]}", {**TEXT, "pattern": pattern})
    many = {f"^{'[a-f]' * 10}{i}": INTEGER for i in range(300)}
    yield Bomb("patternProperties", {"type": "object", "patternProperties": many})
    yield Bomb("properties 60 deep", deep("properties", 60))
    yield Bomb("additionalProperties 60 deep", deep("additionalProperties", 60))
    several = {f"p{i}": {"type": "string", "maxLength": i} for i in range(5_000)}
    yield Bomb("5,000 properties", {"type": "object", "properties": several})
    yield Bomb("a large multiple", {"type": "integer", "multipleOf": 999_999_937})
    yield Bomb("large bounds", {"type": "number", "minimum": 1e-300, "maximum": 1.5e300})
