"""The constraint ``combination``: its argument, parsed into a tree of parts.

A part is a literal text or an object of one of these forms:

    {"regex": PATTERN}  {"choice": [TEXT, ...]}  {"substring": TEXT}
    {"yacc": GRAMMAR}  {"json_schema": SCHEMA}  {"lark": GRAMMAR}
    {"sequence": [PART, ...]}  {"alternation": [PART, ...]}
    {"repetition": PART, "least": N, "most": N}   defaults: 0, and no upper bound
    {"stop_at": TEXT, "of": PART}                 default: of any text

``stop_at`` allows a text of the part ``of`` if the text ends with TEXT and does not contain TEXT
anywhere else.

Each object may have the field ``max_tokens``. Literal texts, ``regex``, ``choice`` and
``substring`` are *regular*. A part with inner parts is regular if all of them are regular and have
no ``max_tokens``. A regular part is compiled to one automaton. If a part with inner parts is not
regular, ``parts.py`` starts a controller for each inner part that the text reaches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from .....grammars import library
from .....grammars.combine import alternation, repetition, sequence, stop_at
from .....grammars.regex import Dfa, compile_choice, compile_regex
from .....grammars.substring import compile_substring
from .refusals import refusal

MAX_PARTS = 1_000
DEEPEST = 50

_FIELDS = {
    "regex": {"regex"},
    "choice": {"choice"},
    "substring": {"substring"},
    "yacc": {"yacc"},
    "json_schema": {"json_schema"},
    "lark": {"lark"},
    "sequence": {"sequence"},
    "alternation": {"alternation"},
    "repetition": {"repetition", "least", "most"},
    "stop_at": {"stop_at", "of"},
}
_OTHERS = {"yacc": str | dict, "json_schema": dict | str | bool, "lark": str}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an argument. ``place`` is its path in the argument, for error messages."""

    kind: str
    """A key of ``_FIELDS``, or "text"."""
    place: str
    value: Any = None
    parts: tuple[Part, ...] = ()
    least: int = 0
    most: int | None = None
    max_tokens: int | None = None

    @property
    def regular(self) -> bool:
        """Whether the part can be compiled to one automaton. The part's kind must allow this. Its
        inner parts must be regular and have no ``max_tokens``."""
        inside = all(part.regular and part.max_tokens is None for part in self.parts)
        return self.kind not in _OTHERS and inside


def read_combination(arg: bytes) -> Part:
    """The tree of an argument. Raises RequestError if the argument is not valid."""
    try:
        given = msgspec.json.decode(arg)
    except msgspec.DecodeError as error:
        raise refusal(f"the argument of combination is not valid JSON: {error}") from None
    return _Reading().part(given, "$", 0)


class _Reading:
    def __init__(self) -> None:
        self._parts = 0

    def part(self, given: Any, place: str, depth: int) -> Part:
        self._parts += 1
        if self._parts > MAX_PARTS or depth > DEEPEST:
            raise refusal(
                f"combination: {place} exceeds the bounds of a combination: it may have at most "
                f"{MAX_PARTS:,} parts, nested at most {DEEPEST} deep"
            )
        if isinstance(given, str):
            return Part("text", place, given)
        named = [name for name in _FIELDS if isinstance(given, dict) and name in given]
        if len(named) != 1:
            raise refusal(
                f"combination: {place} is {msgspec.json.encode(given).decode()[:100]}, which is "
                f"not a part; a part is a text or an object with exactly one of "
                f"{', '.join(_FIELDS)}"
            )
        [name] = named
        unknown = set(given) - _FIELDS[name] - {"max_tokens"}
        if unknown:
            known = ", ".join(sorted(_FIELDS[name] | {"max_tokens"}))
            raise refusal(
                f"combination: {place} has the unknown field {min(unknown)!r}; {name} takes {known}"
            )
        most = given.get("max_tokens")
        most = None if most is None else _number(most, f"{place}: max_tokens", 1)
        return self._of(name, given, f"{place}.{name}", depth + 1, most)

    def _of(
        self, name: str, given: dict[str, Any], place: str, depth: int, max_tokens: int | None
    ) -> Part:
        value = given[name]
        match name, value:
            case ("regex", {"library": str(word)}) if len(value) == 1:
                try:
                    pattern = library.regex(word)
                except KeyError as error:
                    raise refusal(f"combination: {place}: {error.args[0]}") from None
                return Part(name, place, pattern, max_tokens=max_tokens)
            case (("regex" | "substring"), str()):
                return Part(name, place, value, max_tokens=max_tokens)
            case "choice", list() if all(isinstance(text, str) for text in value):
                return Part(name, place, value, max_tokens=max_tokens)
            case (("yacc" | "json_schema" | "lark"), _) if isinstance(value, _OTHERS[name]):
                return Part(name, place, value, max_tokens=max_tokens)
            case (("sequence" | "alternation"), list()) if value:
                parts = tuple(self.part(p, f"{place}[{i}]", depth) for i, p in enumerate(value))
                return Part(name, place, parts=parts, max_tokens=max_tokens)
            case "repetition", _:
                least = _number(given.get("least", 0), f"{place}: least", 0)
                most = given.get("most")
                most = None if most is None else _number(most, f"{place}: most", max(least, 1))
                part = self.part(value, place, depth)
                return Part(name, place, None, (part,), least, most, max_tokens)
            case "stop_at", str():
                of = (self.part(given["of"], f"{place}.of", depth),) if "of" in given else ()
                if of and not (of[0].regular and of[0].max_tokens is None):
                    raise refusal(
                        f"combination: {place}.of is {of[0].kind}, which does not compile to one "
                        "automaton; it must be a text, a regex, a choice or a substring, or "
                        "consist of these, without max_tokens"
                    )
                return Part(name, place, value, of, max_tokens=max_tokens)
        wanted = "a list of texts" if name == "choice" else "a list of parts"
        if name not in ("choice", "sequence", "alternation"):
            wanted = "a schema" if name == "json_schema" else "a text"
        shown = msgspec.json.encode(value).decode()[:100]
        raise refusal(f"combination: {place} is {shown}; it must be {wanted}")


def automata(root: Part, seconds: float) -> dict[str, bytes]:
    """The tables of the outermost regular parts of a combination, by their paths.

    Raises RequestError if compiling all of them takes more than ``seconds`` of CPU time.
    """
    making = _Making(seconds)
    return {part.place: making.of(part).to_bytes() for part in _regular(root)}


def _regular(part: Part) -> list[Part]:
    if part.regular:
        return [part]
    return [regular for inner in part.parts for regular in _regular(inner)]


class _Making:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = time.thread_time() + seconds

    def of(self, part: Part) -> Dfa:
        parts = [self.of(inner) for inner in part.parts]
        value, place = part.value, part.place
        match part.kind:
            case "text":
                return self._made(place, lambda left: compile_choice([value], max_seconds=left))
            case "regex":
                return self._made(place, lambda left: compile_regex(value, max_seconds=left))
            case "choice":
                return self._made(place, lambda left: compile_choice(value, max_seconds=left))
            case "substring":
                return self._made(place, lambda left: compile_substring(value))
            case "sequence":
                return self._made(place, lambda left: sequence(parts, max_seconds=left))
            case "alternation":
                return self._made(place, lambda left: alternation(parts, max_seconds=left))
            case "repetition":
                least, most = part.least, part.most
                return self._made(
                    place, lambda left: repetition(parts[0], least, most, max_seconds=left)
                )
        inner = parts[0] if parts else None
        return self._made(place, lambda left: stop_at(inner, value, max_seconds=left))

    def _made(self, place: str, make: Callable[[float], Dfa]) -> Dfa:
        left = self._deadline - time.thread_time()
        if left <= 0:
            raise refusal(f"combination: {place}: compiling takes longer than {self._seconds:g} s")
        try:
            return make(left)
        except (ValueError, UnicodeEncodeError) as error:
            raise refusal(f"combination: {place}: {error}") from None


def _number(given: Any, what: str, least: int) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < least:
        raise refusal(
            f"combination: {what} is {given!r}; it must be an integer of at least {least}"
        )
    return given
