"""Finds lines and columns in a text, and shows a line with a caret under a column."""

from __future__ import annotations

from bisect import bisect_right

from rich.cells import cell_len

SHOWN = 100
"""Maximum number of characters of a line that are shown."""
_BEFORE = 60
"""If a line is cut on both sides, this number of characters before the caret is shown."""
_INDENT = "    "


class Lines:
    """The lines of a text. Lines and columns are numbered from 1. A column is a character."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._starts = [0]
        at = text.find(b"\n")
        while at >= 0:
            self._starts.append(at + 1)
            at = text.find(b"\n", at + 1)

    @property
    def count(self) -> int:
        """The number of lines. Text after the last line end counts as a line."""
        return len(self._starts) - (self._starts[-1] == len(self._text))

    def place(self, offset: int) -> tuple[int, int]:
        """The line and the column of the byte at ``offset``."""
        line = bisect_right(self._starts, offset)
        before = self._text[self._starts[line - 1] : offset]
        return line, len(before.decode(errors="replace")) + 1

    def pointed(self, line: int, column: int) -> str:
        """Shows the line ``line``, and a caret below its column ``column``. The result begins with
        a line break. If the line is empty, the result is empty. Long lines are cut."""
        start = self._starts[line - 1]
        end = self._starts[line] if line < len(self._starts) else len(self._text)
        shown = printable(self._text[start:end].decode(errors="replace").rstrip("\r\n"))
        if not shown:
            return ""
        first = 0
        if len(shown) > SHOWN:
            first = max(0, min(column - 1 - _BEFORE, len(shown) - SHOWN))
        left, right = "…" * (first > 0), "…" * (len(shown) - first > SHOWN)
        before = left + shown[first : column - 1]
        under = "".join("\t" if c == "\t" else " " * cell_len(c) for c in before)
        return f"\n{_INDENT}{left}{shown[first : first + SHOWN]}{right}\n{_INDENT}{under}^"


def printable(text: str) -> str:
    """``text`` with a dot for every character that is neither printable nor a tab."""
    return "".join(c if c.isprintable() or c == "\t" else "·" for c in text)
