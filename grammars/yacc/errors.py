"""What is wrong with a grammar, and where."""

from __future__ import annotations


class GrammarError(ValueError):
    """A grammar that cannot be used.

    ``line`` and ``column`` count from 1, columns in characters; both are 0 when no one place is to
    blame. ``message`` says what was found and what would be right; ``str()`` has the place as well.
    """

    def __init__(self, message: str, line: int = 0, column: int = 0) -> None:
        super().__init__(f"line {line}, column {column}: {message}" if line else message)
        self.message = message
        self.line = line
        self.column = column


def error_at(text: str, offset: int, message: str) -> GrammarError:
    """The error for the place ``offset`` (in characters) of the grammar's text."""
    before = text.rfind("\n", 0, offset)
    return GrammarError(message, text.count("\n", 0, offset) + 1, offset - before)
