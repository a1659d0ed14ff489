"""Compiles regular expressions to deterministic automata over the bytes of UTF-8.

A pattern is compiled in these steps, with one file for each step:

    syntax       Python's own parser reads the pattern; every node keeps its place in the text
    tree         the parser's nodes become characters, concatenations, alternations and repetitions;
                 a construct that an automaton cannot express is an error
    charsets     the characters of a class, a category or a case-insensitive letter
    positions    Glushkov's automaton: which character may follow which
    subsets      the subset construction over classes of characters
    minimize     Valmari's minimisation
    utf8         characters become bytes: exactly valid UTF-8
    dfa          the table, and its binary form
    blame        which part of a pattern needs too many states

The public functions are ``compile_regex``, ``compile_lexer``, ``compile_choice`` and ``prepare``.
The first pattern with a category or ``(?i)`` reads the Unicode tables, if ``prepare`` has not read
them before. ``docs/grammars.md`` describes the syntax, its limits and its speed.
"""

from .bounds import RegexError
from .charsets import prepare
from .compile import Lexeme, compile_choice, compile_lexer, compile_regex
from .dfa import Dfa, LexerDfa

__all__ = [
    "Dfa",
    "Lexeme",
    "LexerDfa",
    "RegexError",
    "compile_choice",
    "compile_lexer",
    "compile_regex",
    "prepare",
]
