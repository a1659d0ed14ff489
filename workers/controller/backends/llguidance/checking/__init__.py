"""Checks the values of a text under a schema that masks enforce only in a relaxed form."""
