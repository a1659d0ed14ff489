"""Finds the part of a grammar that makes llguidance refuse the grammar.

The parts are compiled one by one, the largest first, each in a fork of this process with a short
time limit. If a part fails in the same way as the whole grammar, the parts inside this part are
tried. So if a schema would take hours to compile, the error names the smallest expensive part. If a
schema has an unsupported key, the error names the place of the key.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import time
from collections.abc import Iterator
from typing import Any

from ..compiling.bounds import TOO_DEEP
from .trial import check

PART_SHARE = 1 / 12
"""Share of the search's CPU time that one part may take. A part that takes longer counts as too
expensive."""
MIN_S = 0.02
"""CPU time that one part may always take, in seconds, even if ``PART_SHARE`` allows less."""
MAX_PARTS = 32
"""Maximum number of parts of one schema that are tried, the largest first."""
MANY = 8
"""If a keyword of the faulty schema has more parts than this, the error gives their number."""
MAX_PATH_CHARACTERS = 160
"""Maximum characters of a path in an error message."""

_SUSPECTED = "took too much"
"""The outcome of a part whose process was killed."""
_TOO_MUCH = re.compile(
    "^compiling the grammar takes more|fuel exhausted|too large|too many|items; max"
    "|Unable to determine"
)
"""Matches error messages about excessive cost. Such an error is treated like a killed process,
because a part may exceed a limit of llguidance before the limit of its process."""

Schema = dict[str, Any]

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else")
_LOCAL = ("$defs", "definitions", "x-guidance")
_RULE = re.compile(r"^([a-zA-Z_]\w*)(?:\[[^\]\n]*\])?(?:\.\d+)?\s*:", re.MULTILINE)


def blamed(grammar: str, failed: str, cpu_s: float) -> str:
    """Returns `` (in PART)``, where PART is the part that caused the refusal with the reason
    ``failed``. Empty if the search does not find such a part in ``cpu_s`` seconds of CPU time."""
    search = _Search(failed, cpu_s)
    [given] = json.loads(grammar)["grammars"][:1] or [{}]
    if isinstance(given.get("json_schema"), dict):
        found = search.schema(given["json_schema"])
    elif isinstance(given.get("lark_grammar"), str):
        found = search.rule(given["lark_grammar"])
    else:
        found = ""
    return f" (in {found})" if found else ""


class _Search:
    def __init__(self, failed: str, cpu_s: float) -> None:
        self._failed = _kind(failed)
        self._part_s = max(MIN_S, cpu_s * PART_SHARE)
        self._end = _cpu_s() + cpu_s

    def schema(self, root: Schema) -> str:
        """The path of the smallest part that fails in the same way as the whole schema."""
        local = {key: root[key] for key in _LOCAL if key in root}
        path, node, seen = "$", root, {id(root)}
        while True:
            parts = sorted(_parts(root, path, node), key=_size, reverse=True)[:MAX_PARTS]
            for inner_path, inner in parts:
                if _cpu_s() > self._end:
                    return _named(path, node)
                if id(inner) not in seen and self._fails(_json_grammar({**local, **inner})):
                    seen.add(id(inner))
                    path, node = inner_path, inner
                    break
            else:
                return _named(path, node)

    def rule(self, text: str) -> str:
        """The rule or terminal of a Lark grammar that fails alone in the same way as the whole
        grammar."""
        rules = list(_RULE.finditer(text))
        ends = [rule.start() for rule in rules[1:]] + [len(text)]
        longest = sorted(zip(rules, ends, strict=True), key=lambda one: one[0].start() - one[1])[
            :MAX_PARTS
        ]
        for rule, _ in sorted(longest, key=lambda one: not one[0][1].isupper()):
            name = rule[1]
            if name == "start":
                continue
            if _cpu_s() > self._end:
                break
            alone = re.sub(r"(?m)^start(?=\W)", "whole_text", text) + f"\nstart: {name}\n"
            if self._fails(json.dumps({"grammars": [{"lark_grammar": alone}]})):
                return f"{name}, line {text.count(chr(10), 0, rule.start()) + 1}"
        return ""

    def _fails(self, grammar: str) -> bool:
        return _apart(grammar, self._part_s) == self._failed


def _parts(root: Schema, path: str, node: Schema) -> Iterator[tuple[str, Schema]]:
    """The schemas directly inside a schema, with their paths; a reference yields its target."""
    for key in _MAPS:
        inside = node.get(key)
        if isinstance(inside, dict) and (key not in _LOCAL):
            for name, inner in inside.items():
                if isinstance(inner, dict):
                    yield f"{path}.{key}.{name}", inner
    for key in _LISTS:
        inside = node.get(key)
        if isinstance(inside, list):
            for number, inner in enumerate(inside):
                if isinstance(inner, dict):
                    yield f"{path}.{key}[{number}]", inner
    for key in _SINGLE:
        inner = node.get(key)
        if isinstance(inner, dict):
            yield f"{path}.{key}", inner
    match str(node.get("$ref", "")).split("/"):
        case ["#", ("$defs" | "definitions") as key, name]:
            inner = root.get(key, {}).get(name)
            if isinstance(inner, dict):
                yield f"$.{key}.{name}", inner


def _size(part: tuple[str, Schema]) -> int:
    """An estimate of the cost of compiling a part: the length of its text plus the numbers in the
    text, which may be counts of repetitions."""
    text = json.dumps(part[1])
    return len(text) + sum(min(int(n), 10_000) for n in re.findall(r"\d{2,9}", text)[:1000])


def _named(path: str, node: Schema) -> str:
    if path == "$" and not any(_many(node)):
        return ""
    if len(path) > MAX_PATH_CHARACTERS:
        path = f"{path[: MAX_PATH_CHARACTERS // 2]}…{path[-MAX_PATH_CHARACTERS // 2 :]}"
    return path + "".join(_many(node))


def _many(node: Schema) -> Iterator[str]:
    for key in (*_MAPS, *_LISTS, "enum", "required"):
        inside = node.get(key)
        if isinstance(inside, dict | list) and len(inside) > MANY and key not in _LOCAL:
            yield f", its {len(inside)} {key}"


def _json_grammar(schema: Schema) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]})


def _kind(reason: str) -> str:
    """The kind of an outcome: its reason with each number replaced by 0, or ``_SUSPECTED``.
    Outcomes are compared by their kinds, because the numbers in a reason depend on the part."""
    if reason in (TOO_DEEP, _SUSPECTED) or _TOO_MUCH.search(reason):
        return _SUSPECTED
    return re.sub(r"\d+", "0", reason)


def _apart(grammar: str, cpu_s: float) -> str:
    """Compiles a grammar in a copy of this process, in at most ``cpu_s`` seconds of CPU time.
    Returns the kind of the outcome; "" if the grammar compiles."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            os.write(sending, check(grammar).encode())
        finally:
            os._exit(0)
    os.close(sending)
    with open(receiving, "rb") as pipe:
        reply = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return _kind(reply) if status == 0 else _SUSPECTED


def _cpu_s() -> float:
    """CPU time of this process and of its copies, in seconds."""
    copies = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + copies.ru_utime + copies.ru_stime
