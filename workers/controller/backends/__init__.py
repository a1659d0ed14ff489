"""The built-in constraints, with two grammar backends: our own engine and llguidance."""
