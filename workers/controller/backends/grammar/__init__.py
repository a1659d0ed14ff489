"""Constraints that need no code: grammars and regular expressions, run by one guest for each."""
