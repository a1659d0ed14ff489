"""The grammar backends: built-in constraints by our own grammar engine and by llguidance."""
