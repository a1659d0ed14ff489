"""The error of a grammar that cannot be used, with the place of the fault."""

from __future__ import annotations


class GrammarError(ValueError):
    """A grammar that cannot be used.

    ``line`` and ``column`` count from 1, and columns count characters. Both are 0 if the error does
    not have a single place. ``message`` says what was found and what would be right; ``str()``
    includes the place.
    """

    def __init__(self, message: str, line: int = 0, column: int = 0) -> None:
        super().__init__(f"line {line}, column {column}: {message}" if line else message)
        self.message = message
        self.line = line
        self.column = column


def error_at(text: str, offset: int, message: str) -> GrammarError:
    """The error for a fault at ``offset``, which counts characters of the grammar's text."""
    before = text.rfind("\n", 0, offset)
    return GrammarError(message, text.count("\n", 0, offset) + 1, offset - before)
