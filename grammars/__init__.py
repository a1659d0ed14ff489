"""Grammars and the tables that constrain a stream to them.

``regex`` turns regular expressions into automata over bytes; what else is here builds on it.
"""
