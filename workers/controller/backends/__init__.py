"""The built-in constraints, with two grammar backends: that of Tokenbus, and llguidance."""
