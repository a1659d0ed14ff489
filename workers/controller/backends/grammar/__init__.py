"""Our grammar backend: regular expressions, grammars and combinations, each run by one Wasm
guest."""
