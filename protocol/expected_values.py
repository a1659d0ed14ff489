"""Errors about a value, in the words of the command line."""

from __future__ import annotations

import re

import msgspec

_PLAIN = {
    r"\bint\b": "a whole number",
    r"\bfloat\b": "a number",
    r"\bstr\b": "a text",
    r"\bbool\b": "true or false",
    r"\barray\b": "a list",
    r"\bobject\b": "a JSON object",
    r" of length >= ": " with a length of at least ",
    r" >= ": " of at least ",
    r" <= ": " of at most ",
    r" > ": " above ",
    r" \| ": " or ",
}
"""Patterns of msgspec's terms, and plain words for them."""


def expected(error: msgspec.ValidationError, given: object) -> str:
    """Translates msgspec's error into plain words, and adds the faulty value."""
    return f"{plain(str(error).split(', got')[0])}, not {given!r}"


def plain(message: str) -> str:
    """Translates the message of msgspec's error into plain words, without its path."""
    wanted = message.split(" - at ")[0].replace("`", "").replace(", got ", ", not ")
    wanted = re.sub(r"^Object missing required field (\w+)", r"the field '\1' is missing", wanted)
    wanted = re.sub(r" ?\| ?null", "", wanted).replace("Expected ", "expected ", 1)
    for term, words in _PLAIN.items():
        wanted = re.sub(term, words, wanted)
    return wanted
