"""Compiles LR(1) grammars in AICI's format from their text to tables. The package also has a
reference recognizer.

A grammar is compiled in these steps, with one file for each step:

    scan        its text as tokens
    source      rules and declarations as they are written, each with its place
    grammar     terminals, nonterminals and productions by number
    checks      errors of a grammar that can be parsed: unused rules, rules that derive no finite
                text, rules that derive themselves
    lr1         the LR(1) automaton, merged as Pager does
    tables      actions and gotos, conflicts resolved as yacc does
    conflicts   conflicts that precedences do not decide, with an example of the input
    closing     the terminals that complete the rules of each parser state in few bytes
    compile     all of these steps, with the lexer of ``grammars.regex``
    compiled    the result, and its binary form for the guest engine and for the disk
    parser, recognizer
                an interpreter of the tables in Python: the reference for the guest engine

``compile_grammar`` runs all steps. ``docs/grammars.md`` describes the format.
"""

from .compile import Compilation, compile_grammar
from .compiled import CompiledGrammar
from .conflicts import Conflict
from .errors import GrammarError
from .parser import Parser
from .recognizer import Recognizer, Refusal, check_text

__all__ = [
    "Compilation",
    "CompiledGrammar",
    "Conflict",
    "GrammarError",
    "Parser",
    "Recognizer",
    "Refusal",
    "check_text",
    "compile_grammar",
]
