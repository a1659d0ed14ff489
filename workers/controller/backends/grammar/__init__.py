"""The grammar backend of Tokenbus, for regular expressions, yacc grammars and combinations. One
Wasm guest computes the masks of each of them."""
