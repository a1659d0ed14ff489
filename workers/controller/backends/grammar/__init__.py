"""The grammar backend of Tokenbus, for regular expressions, yacc grammars and combinations. Guests
of one Wasm module (``grammars/guest``) compute the masks of all of them."""
