"""Compiles grammars to tables. The tables constrain the text of a stream to a grammar.

``regex`` compiles a regular expression to an automaton over bytes. ``yacc`` compiles an LR(1)
grammar to parse tables and a lexer. ``substring`` compiles a text to the automaton of its
substrings. ``combine`` combines several automata into one. ``guest`` is the engine that runs the
tables in the sandbox.
"""
