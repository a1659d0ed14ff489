"""The constraint ``combination``: parts put together, as one automaton.

An argument is a part. A part is a text, taken as it is, or an object of one of these:

    {"regex": PATTERN}  {"choice": [TEXT, ...]}  {"substring": TEXT}
    {"sequence": [PART, ...]}  {"alternation": [PART, ...]}
    {"repetition": PART, "least": N, "most": N}   "least" is 0 and "most" any number where left out
    {"stop_at": TEXT, "of": PART}                 of any text where left out

and ``max_tokens`` beside it in the outermost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from ....grammars.combine import alternation, repetition, sequence, stop_at
from ....grammars.regex import Dfa, compile_choice, compile_regex
from ....grammars.substring import compile_substring
from .refusals import refusal

COMBINE_S = 2.0
"""How long an argument may take in all, in seconds: other rounds share the interpreter."""
KEPT = 64
"""Tables of combinations that are kept in memory; one may have a megabyte and more."""
MOST_PARTS = 1_000
DEEPEST = 50

_FIELDS = {
    "regex": {"regex"},
    "choice": {"choice"},
    "substring": {"substring"},
    "sequence": {"sequence"},
    "alternation": {"alternation"},
    "repetition": {"repetition", "least", "most"},
    "stop_at": {"stop_at", "of"},
}


class Combination(NamedTuple):
    """Tables, and how many tokens the text may have; None: as many as the request has."""

    tables: bytes
    max_tokens: int | None


@lru_cache(maxsize=KEPT)
def combine(arg: bytes) -> Combination:
    """Of the JSON of a part. Raises RequestError where it is wrong or grows too large."""
    try:
        given = msgspec.json.decode(arg)
    except msgspec.DecodeError as error:
        raise refusal(f"the argument of combination is JSON, and this is not: {error}") from None
    most = None
    if isinstance(given, dict) and "max_tokens" in given:
        most = _number(given.pop("max_tokens"), "max_tokens", 1)
    return Combination(_Combining().part(given, "$", 0).to_bytes(), most)


class _Combining:
    """One argument on its way to an automaton."""

    def __init__(self) -> None:
        self._deadline = time.thread_time() + COMBINE_S
        self._parts = 0

    def part(self, given: Any, place: str, depth: int) -> Dfa:
        """``place``: where it stands in the argument, for messages."""
        self._parts += 1
        if self._parts > MOST_PARTS or depth > DEEPEST:
            raise refusal(
                f"combination: at most {MOST_PARTS:,} parts, {DEEPEST} deep, are taken ({place})"
            )
        if isinstance(given, str):
            return self._made(place, lambda left: compile_choice([given], max_seconds=left))
        named = [name for name in _FIELDS if isinstance(given, dict) and name in given]
        if len(named) != 1 or set(given) - _FIELDS[named[0]]:
            raise refusal(
                f"combination: {place} is a text or an object of one of {', '.join(_FIELDS)}; this "
                f"is {msgspec.json.encode(given).decode()[:100]}"
            )
        return self._of(named[0], given, f"{place}.{named[0]}", depth + 1)

    def _of(self, name: str, given: dict[str, Any], place: str, depth: int) -> Dfa:
        value = given[name]
        match name, value:
            case "regex", str():
                return self._made(place, lambda left: compile_regex(value, max_seconds=left))
            case "substring", str():
                return self._made(place, lambda left: compile_substring(value))
            case "choice", list() if all(isinstance(text, str) for text in value):
                return self._made(place, lambda left: compile_choice(value, max_seconds=left))
            case (("sequence" | "alternation"), list()):
                parts = [self.part(p, f"{place}[{i}]", depth) for i, p in enumerate(value)]
                join = sequence if name == "sequence" else alternation
                return self._made(place, lambda left: join(parts, max_seconds=left))
            case "repetition", _:
                least = _number(given.get("least", 0), f"{place}: least", 0)
                most = given.get("most")
                most = None if most is None else _number(most, f"{place}: most", least)
                part = self.part(value, place, depth)
                return self._made(
                    place, lambda left: repetition(part, least, most, max_seconds=left)
                )
            case "stop_at", str():
                of = self.part(given["of"], f"{place}.of", depth) if "of" in given else None
                return self._made(place, lambda left: stop_at(of, value, max_seconds=left))
        wanted = "a text" if name in ("regex", "substring", "stop_at") else "a list"
        raise refusal(f"combination: {place} is {wanted}")

    def _made(self, place: str, make: Callable[[float], Dfa]) -> Dfa:
        left = self._deadline - time.thread_time()
        if left <= 0:
            raise refusal(f"combination: it takes more than {COMBINE_S:g} s, at {place}")
        try:
            return make(left)
        except (ValueError, UnicodeEncodeError) as error:
            raise refusal(f"combination: {place}: {error}") from None


def _number(given: Any, what: str, least: int) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < least:
        raise refusal(f"combination: {what} is a whole number from {least} on, not {given!r}")
    return given
