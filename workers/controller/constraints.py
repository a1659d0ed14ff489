"""Built-in constraints whose argument is compiled before their guest gets it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ...grammars.regex import RegexError, compile_regex
from ...protocol.errors import Code, RequestError
from .host import Host
from .interface import Controller, Program

COMPILE_S = 1.0
"""How long a pattern may take to compile, in seconds: other rounds share the interpreter."""
KEPT = 256
"""Patterns whose automata are kept."""


class RegexProgram:
    """The built-in ``regex``: its argument is the pattern, its guest is given the automaton."""

    def __init__(self, guest: Program) -> None:
        self._guest = guest

    def start(self, host: Host) -> Controller:
        """Raises RequestError where the argument is no regular expression that can be compiled."""
        try:
            pattern = host.arg.decode()
        except UnicodeDecodeError as error:
            raise _refusal(
                f"the argument of regex is text, and this is not UTF-8: {error}"
            ) from None
        if not pattern:
            raise _refusal("regex needs a regular expression as its argument")
        return self._guest.start(replace(host, arg=_automaton(pattern)))


@lru_cache(maxsize=KEPT)
def _automaton(pattern: str) -> bytes:
    try:
        return compile_regex(pattern, max_seconds=COMPILE_S).to_bytes()
    except RegexError as error:
        raise _refusal(f"regex: {error}") from None


def _refusal(message: str) -> RequestError:
    return RequestError(Code.INVALID_FIELD, message, path="$.controller_arg")
