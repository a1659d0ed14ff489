"""Checks the values of a text if masks do not enforce the whole schema, but only a relaxed form of
the schema."""
