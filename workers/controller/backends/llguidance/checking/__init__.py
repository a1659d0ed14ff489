"""Checks the values of a text under a schema of which masks enforce only a relaxed form."""
