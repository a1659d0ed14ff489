"""Regular expressions as deterministic automata over the bytes of UTF-8.

The way of a pattern, one file for each step:

    syntax       Python's own parser reads the pattern; every node keeps its place in the text
    tree         its nodes become characters, sequences, choices and repetitions; what no automaton
                 can do is refused by name
    charsets     what a class, a category or a case-insensitive letter stands for
    positions    Glushkov's automaton: which character may follow which
    subsets      the subset construction over classes of characters
    minimize     Valmari's minimisation
    utf8         characters become bytes: exactly the valid ones
    dfa          the table, and its binary form
    blame        which part of a pattern made too many states

``compile_regex``, ``compile_lexer`` and ``compile_choice`` are the whole of it; ``prepare`` spares
the first pattern with a category or ``(?i)`` a wait. The syntax, its limits and its speed are in
``docs/grammars.md``.
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
