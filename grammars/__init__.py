"""Grammars and the tables that constrain a stream to them.

``regex`` compiles regular expressions to automata over bytes, ``yacc`` LR(1) grammars to parse
tables and a lexer, ``substring`` texts to automata of their parts; ``combine`` builds automata of
several. ``guest`` is the engine that runs the tables in the sandbox.
"""
