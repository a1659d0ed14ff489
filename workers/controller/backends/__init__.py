"""The built-in constraints. They use two grammar backends: Tokenbus's own and llguidance."""
