"""Tokenbus's own grammar backend, for regular expressions, yacc grammars and combinations. The Wasm
module ``grammars/guest`` computes the masks."""
