"""The text that the embedded model learns from: the Python standard library, and generated
patterns.

The standard library's source code has the PSF license. This file makes the patterns from a seed:
JSON, dates, lists, arithmetic, CSV, functions and mails.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

LEFT_OUT = frozenset(
    {
        "site-packages",
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "encodings",
        "turtledemo",
        "ensurepip",
        "__pycache__",
        "config-3.11-x86_64-linux-gnu",
    }
)
"""Folders of the standard library that are not read: tests, tables, and third-party code."""

HELD_OUT_PART = 32
"""About 1 / ``HELD_OUT_PART`` of the documents are held out. The hash of a document's text decides
whether it is held out. If a module is held out, all its functions are held out too."""

_FIRST = [
    "Ada",
    "Alan",
    "Barbara",
    "Claude",
    "Donald",
    "Edsger",
    "Frances",
    "Grace",
    "Guido",
    "Hedy",
    "Ken",
    "Linus",
    "Margaret",
]
_LAST = [
    "Allen",
    "Dijkstra",
    "Hamilton",
    "Hopper",
    "Kernighan",
    "Knuth",
    "Lamarr",
    "Lovelace",
    "Ritchie",
    "Turing",
]
_CITIES = [
    "Amsterdam",
    "Berlin",
    "Cairo",
    "Delhi",
    "Geneva",
    "Lisbon",
    "London",
    "Oslo",
    "Paris",
    "Prague",
    "Tokyo",
    "Zurich",
]
_WORDS = [
    "alpha",
    "answer",
    "batch",
    "block",
    "broker",
    "cache",
    "client",
    "count",
    "data",
    "date",
    "default",
    "device",
    "email",
    "error",
    "field",
    "file",
    "group",
    "index",
    "item",
    "key",
    "label",
    "list",
    "message",
    "model",
    "name",
    "node",
    "number",
    "option",
    "order",
    "page",
    "path",
    "port",
    "price",
    "queue",
    "rate",
    "request",
    "result",
    "score",
    "server",
    "size",
    "state",
    "status",
    "stream",
    "table",
    "task",
    "time",
    "title",
    "token",
    "total",
    "type",
    "user",
    "value",
    "version",
    "weight",
    "worker",
]
_TAGS = [
    "red",
    "green",
    "blue",
    "fast",
    "slow",
    "new",
    "old",
    "small",
    "large",
    "open",
    "closed",
    "public",
    "private",
]
_MODULES = [
    "os",
    "sys",
    "re",
    "json",
    "math",
    "time",
    "random",
    "asyncio",
    "logging",
    "pathlib",
    "functools",
    "itertools",
    "collections",
    "subprocess",
    "threading",
    "datetime",
    "typing",
    "dataclasses",
    "contextlib",
]


def library_documents() -> Iterator[list[str]]:
    """Yields a list for each module of the standard library. A list has the module's text, and then
    its short functions with a docstring (``_functions``). The order of the modules is fixed. Skips
    ``LEFT_OUT`` and tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if LEFT_OUT.intersection(parts) or any(part.startswith("test_") for part in parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (UnicodeDecodeError, SyntaxError):
            continue
        if not text.strip():
            continue
        yield [text, *_functions(tree, text)]


def _functions(tree: ast.Module, text: str) -> Iterator[str]:
    """The functions of at most 40 lines that have a docstring, each as a separate text without the
    indentation of its class."""
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            body = lines[node.lineno - 1 : node.end_lineno]
            if len(body) <= 40:
                indent = node.col_offset
                yield (
                    "\n".join(
                        line[indent:] if line[:indent].isspace() or not indent else line
                        for line in body
                    )
                    + "\n"
                )


def made_documents(seed: int, count: int) -> Iterator[str]:
    """Makes ``count`` records from a seed. They have the kinds of text that people first try on a
    small model."""
    chance = random.Random(seed)
    makers = [_json, _json, _json, _json_list, _dates, _numbers, _sum, _csv, _function, _mail]
    for _ in range(count):
        yield chance.choice(makers)(chance)


def _date(chance: random.Random) -> str:
    return f"{chance.randint(1970, 2030)}-{chance.randint(1, 12):02}-{chance.randint(1, 28):02}"


def _value(chance: random.Random, depth: int) -> object:
    kind = chance.randint(0, 8 if depth else 6)
    match kind:
        case 0:
            return chance.randint(0, 999)
        case 1:
            return round(chance.uniform(0, 100), 2)
        case 2:
            return chance.random() < 0.5
        case 3:
            return chance.choice(_CITIES)
        case 4:
            return _date(chance)
        case 5:
            return " ".join(chance.sample(_WORDS, chance.randint(1, 3)))
        case 6:
            return None if chance.random() < 0.3 else chance.choice(_TAGS)
        case 7:
            return [chance.choice(_TAGS) for _ in range(chance.randint(0, 4))]
        case _:
            return _object(chance, depth - 1)


def _person(chance: random.Random) -> dict[str, object]:
    first, last = chance.choice(_FIRST), chance.choice(_LAST)
    person: dict[str, object] = {"name": f"{first} {last}", "age": chance.randint(18, 90)}
    if chance.random() < 0.6:
        person["email"] = f"{first}.{last}@example.org".lower()
    if chance.random() < 0.5:
        person["city"] = chance.choice(_CITIES)
    if chance.random() < 0.4:
        person["tags"] = chance.sample(_TAGS, chance.randint(1, 3))
    return person


def _object(chance: random.Random, depth: int) -> dict[str, object]:
    if chance.random() < 0.5:
        return _person(chance)
    return {key: _value(chance, depth) for key in chance.sample(_WORDS, chance.randint(1, 5))}


def _dump(chance: random.Random, value: object) -> str:
    return json.dumps(value, indent=2 if chance.random() < 0.3 else None) + "\n"


def _json(chance: random.Random) -> str:
    return _dump(chance, _object(chance, 2))


def _json_list(chance: random.Random) -> str:
    return _dump(chance, [_person(chance) for _ in range(chance.randint(1, 4))])


def _dates(chance: random.Random) -> str:
    separator = chance.choice(["\n", ", "])
    return separator.join(_date(chance) for _ in range(chance.randint(2, 10))) + "\n"


def _numbers(chance: random.Random) -> str:
    start, step = chance.randint(0, 20), chance.randint(1, 5)
    numbers = [str(start + step * i) for i in range(chance.randint(4, 16))]
    if chance.random() < 0.4:
        return "\n".join(f"{i}. {chance.choice(_WORDS)}" for i in range(1, len(numbers))) + "\n"
    return ", ".join(numbers) + "\n"


def _sum(chance: random.Random) -> str:
    lines = []
    for _ in range(chance.randint(2, 8)):
        a, b = chance.randint(0, 30), chance.randint(0, 30)
        lines.append(f"{a} + {b} = {a + b}")
    return "\n".join(lines) + "\n"


def _csv(chance: random.Random) -> str:
    rows = [
        f"{chance.choice(_FIRST)},{chance.randint(18, 90)},{chance.choice(_CITIES)}"
        for _ in range(chance.randint(2, 6))
    ]
    return "\n".join(["name,age,city", *rows]) + "\n"


def _function(chance: random.Random) -> str:
    verb, noun = (
        chance.choice(["get", "set", "add", "read", "count", "make"]),
        chance.choice(_WORDS),
    )
    argument = chance.choice(_WORDS)
    start = f"import {chance.choice(_MODULES)}\n\n\n" if chance.random() < 0.3 else ""
    return (
        f"{start}def {verb}_{noun}({argument}):\n"
        f'    """{verb.capitalize()} the {noun} of the {argument}."""\n'
        f"    return {argument}.{noun}\n"
    )


def _mail(chance: random.Random) -> str:
    first, city = chance.choice(_FIRST), chance.choice(_CITIES)
    return (
        f"From: {first.lower()}@example.org\nDate: {_date(chance)}\n"
        f"Subject: {chance.choice(_WORDS)} {chance.choice(_WORDS)}\n\n"
        f"Hello,\n\nthe {chance.choice(_WORDS)} is {chance.choice(_TAGS)} in {city}.\n\n{first}\n"
    )


def documents(seed: int = 7, made: int = 24_000) -> tuple[list[str], list[str]]:
    """Returns two lists of documents. The first list is for training, and is shuffled by ``seed``.
    The second list has the held-out documents."""
    train: list[str] = []
    held_out: list[str] = []
    for group in (*library_documents(), *([text] for text in made_documents(seed, made))):
        digest = hashlib.sha256(group[0].encode()).digest()
        (held_out if digest[0] % HELD_OUT_PART == 0 else train).extend(group)
    random.Random(seed).shuffle(train)
    return train, held_out
