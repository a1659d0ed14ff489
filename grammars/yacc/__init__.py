"""LR(1) grammars in AICI's format: from their text to tables, and a reference recognizer.

The way of a grammar, one file for each step:

    scan        its text as tokens
    source      rules and declarations as they were written, each with its place
    grammar     terminals, nonterminals and productions by number
    checks      what makes a grammar of no use: unused rules, rules without end, rules that are
                themselves again
    lr1         the LR(1) automaton, merged as Pager does
    tables      actions and gotos, conflicts resolved as yacc does
    conflicts   what no precedence decided, with an example of the input
    compile     all of that, and the lexer of ``grammars.regex``
    compiled    the result, and its binary form for the guest engine and for the disk
    parser, recognizer
                what the tables mean, in Python: the reference for the guest engine

``compile_grammar`` is the whole of it. The format is described in ``docs/grammars.md``.
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
