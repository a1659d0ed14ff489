"""Bounds the white space of JSON under a schema, so that a model cannot use up its tokens with
white space."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from .....grammars.regex import Dfa, RegexError, compile_regex
from ..compiling.bounds import RefusedGrammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

OPTIONS = "x-guidance"
"""The key of a schema that holds llguidance's options and our option ``indent``."""
FLEXIBLE = r" |\n(?: {0,64}|\t{0,32})"
"""The white space between lexemes if a schema sets ``whitespace_flexible`` and does not set
``whitespace_pattern``. It is one space, or a line end and an indentation. llguidance does not allow
two matches of this pattern in a row, so the white space is bounded."""
MAX_INDENT = 16
"""Maximum spaces of one level of ``indent``."""

_DUMPED: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""The white space of Python's ``json.dumps``. It is the default because most of the text between
values is then forced."""
_FLEXIBLE: JsonCompileOptions = {
    "whitespace_flexible": True,
    "item_separator": ",",
    "key_separator": ":",
}
"""llguidance's default, which applies to a schema inside a Lark grammar."""

_LEXEME = re.compile(
    r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
    r"|/(?!/)[^/\\]*(?:\\.[^/\\]*)*/"
    r"|(?:\#|//)[^\n]*"
    r"|(?P<json>%json\s*(?=\{))",
    re.DOTALL,
)
"""Matches ``%json`` before a schema in a Lark grammar. Also matches strings, regular expressions
and comments, so that ``%json`` inside them is skipped."""
_DECODER = json.JSONDecoder()


def spaced_schema(schema: str) -> tuple[str, JsonCompileOptions]:
    """A schema without its ``x-guidance``, and the options to compile it with.

    Raises RefusedGrammar if the options are not valid or allow unbounded white space, and
    ValueError if a text that contains ``x-guidance`` is not JSON.
    """
    if f'"{OPTIONS}"' not in schema:
        return schema, _DUMPED
    read = json.loads(schema)
    if not isinstance(read, dict) or OPTIONS not in read:
        return schema, _DUMPED
    options = _bounded(read.pop(OPTIONS), _DUMPED)
    return json.dumps(read), options


def spaced_lark(text: str) -> str:
    """A Lark grammar in which the white space of each embedded schema (``%json``) is bounded.

    Raises RefusedGrammar if an ``x-guidance`` in it allows unbounded white space.
    """
    if "%json" not in text:
        return text
    parts, at = [], 0
    while (lexeme := _LEXEME.search(text, at)) is not None:
        parts.append(text[at : lexeme.end()])
        at = lexeme.end()
        if lexeme["json"] is None:
            continue
        try:
            schema, end = _DECODER.raw_decode(text, at)
        except ValueError:
            continue  # llguidance reports this error.
        options = _bounded(schema.pop(OPTIONS, {}), _FLEXIBLE)
        lines = "\n" * text.count("\n", at, end)
        parts.append(json.dumps({**schema, OPTIONS: options}) + lines)
        at = end
    return "".join([*parts, text[at:]])


def _bounded(given: Any, defaults: JsonCompileOptions) -> JsonCompileOptions:
    if not isinstance(given, dict):
        raise RefusedGrammar(f"{OPTIONS} is {_shown(given)}; it must be an object")
    asked = dict(given)
    indent = asked.pop("indent", None)
    if asked.get("whitespace_flexible") and not defaults["whitespace_flexible"]:
        defaults = _FLEXIBLE
    options: dict[str, Any] = {**defaults, **asked}
    if indent is not None:
        if type(indent) is not int or not 1 <= indent <= MAX_INDENT:
            raise RefusedGrammar(
                f"indent of {OPTIONS} is {_shown(indent)}; it must be from 1 to {MAX_INDENT}"
            )
        options |= {"whitespace_flexible": True, "item_separator": ",", "key_separator": ": "}
        options["whitespace_pattern"] = rf"\n(?: {{{indent}}}){{0,{64 // indent}}}"
    elif options.get("whitespace_flexible") and options.get("whitespace_pattern") is None:
        options["whitespace_pattern"] = FLEXIBLE
    for name in ("whitespace_pattern", "item_separator", "key_separator"):
        if isinstance(pattern := options.get(name), str):
            _check(name, pattern)
    return options  # type: ignore[return-value]


def _check(name: str, pattern: str) -> None:
    try:
        bounded = _is_finite(compile_regex(pattern))
    except RegexError as error:
        raise RefusedGrammar(f"{name} of {OPTIONS}: {error}") from None
    if not bounded:
        raise RefusedGrammar(
            f"{name} of {OPTIONS} is {_shown(pattern)}, which matches texts of any length; "
            f"it needs a bound, as {_shown(FLEXIBLE)} has"
        )


def _is_finite(automaton: Dfa) -> bool:
    """Whether the automaton's language is finite. All states of the automaton are live, so the
    language is finite if no state can be reached from itself."""
    following = [
        {automaton.step(state, byte) for byte in range(256)} - {0}
        for state in range(automaton.num_states)
    ]
    left = [0] * automaton.num_states
    for targets in following:
        for target in targets:
            left[target] += 1
    # Kahn's algorithm repeatedly removes a state without incoming transitions. The states of a
    # cycle are never removed.
    removed, free = 0, [state for state in range(automaton.num_states) if not left[state]]
    while free:
        removed += 1
        for target in following[free.pop()]:
            left[target] -= 1
            if not left[target]:
                free.append(target)
    return removed == automaton.num_states


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:80] + "…"
