"""Checks whether llguidance can compile a grammar, and defines the bounds that llguidance applies
to each grammar.

llguidance's own bounds do not limit its time and memory completely. So a new grammar is first
compiled in a separate process with bounded time and memory (``compiling.processes``), for a
vocabulary of bytes. This process also begins a text with the first tokens that the grammar allows.
Plain schemas (``plain.py``) are compiled without this check.
"""

from __future__ import annotations

import re
from functools import cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_LEXER_STATES = 100_000
"""Maximum number of lexer states of one grammar, which all its sequences share. A state has about
0.5 kB. A string of bounded length takes about 5 states per character."""
PLAIN_FUEL = 200_000
"""llguidance's fuel for building the lexer of a plain schema: about 4 ms of CPU time."""
PLAIN_SIZE = 100_000
"""Maximum symbols in the productions of a plain schema."""
SHOWN = 400
"""Maximum characters of a reason in an error message."""
UNSATISFIABLE = "Unsatisfiable schema"
"""The beginning of llguidance's message about a part of a schema that allows no value."""
_TARGET = re.compile(r"^ +while processing [^\s#]*(#/\S+)$", re.MULTILINE)


def parser_limits() -> LLParserLimits:
    """The bounds on llguidance's lexer and parser, for every grammar."""
    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def plain_limits() -> LLParserLimits:
    """The bounds for a schema that is compiled in the worker itself."""
    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        initial_lexer_fuel=PLAIN_FUEL,
        max_grammar_size=PLAIN_SIZE,
        verbose_errors=False,
    )


def reason(error: str) -> str:
    """llguidance's message on one line, without the stack trace and the indented lines, which quote
    the grammar. If the target of a reference allows no value, the message ends with the
    reference."""
    message = error.split("\n<", 1)[0]
    lines = [line for line in message.splitlines() if line and not line[0].isspace()]
    text = " ".join(line.removeprefix("error: ") for line in lines)
    if text.startswith("NoExtension"):
        text = "the grammar does not allow any text"
    text = text if len(text) <= SHOWN else text[:SHOWN] + "…"
    target = _TARGET.search(message) if text.startswith(UNSATISFIABLE) else None
    return text if target is None else f"{text}, at the reference {target[1]}"


def compiled(grammar: str) -> tuple[LLMatcher, str]:
    """Compiles a grammar over bytes, and appends its first tokens. Returns the matcher, and the
    error of these two steps, which is empty if both succeed."""
    made = LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=parser_limits())
    matcher = made if made.is_error() else made.deep_copy()
    if not matcher.is_error():
        matcher.consume_tokens(matcher.compute_ff_tokens())
    if not matcher.is_stopped():
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        token = (mask & -mask).bit_length() - 1
        if not matcher.is_error() and token != byte_tokenizer().eos_token:
            matcher.consume_token(token)
    return made, reason(matcher.get_error()) if matcher.is_error() else ""


def step_error(made: LLMatcher) -> bool:
    """Whether compiling a grammar has failed, or computing its first mask fails."""
    if made.is_error():
        return True
    matcher = made.deep_copy()
    matcher.consume_tokens(matcher.compute_ff_tokens())
    if not matcher.is_stopped():
        matcher.compute_bitmask()
    return matcher.is_error()


def check(grammar: str) -> str:
    """The error that ``compiled`` returns for a grammar; empty if the grammar is valid."""
    return compiled(grammar)[1]


@cache
def byte_tokenizer() -> LLTokenizer:
    """A tokenizer whose tokens are the 256 bytes."""
    return LLTokenizer("byte")
