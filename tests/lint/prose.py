"""Extracts the sentences of pages, docstrings and comments.

Fenced blocks of a page and literal blocks of a docstring are left out. Text between backticks
counts as one word.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROW = re.compile(r"\S {2,}\S")
"""Matches a row of a table in a docstring, whose columns are separated by spaces."""
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")
CODE = re.compile(r"``[^`]+``|`[^`]+`")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
END = re.compile(r"(?<=[.!?])[)\"'*]*\s+(?=[A-Z0-9\"'(*\[«])")
ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|cf|vs|etc|p)\.\s")
DIRECTIVES = re.compile(r"#!|# (noqa|type:|ruff:|mypy:|fmt:|pragma|---)")


def sentences(text: str) -> list[str]:
    """The sentences of one paragraph, as single lines."""
    line = CODE.sub("code", " ".join(text.split()))
    line = re.sub(r"^code|(?<=[.!?] )code", "Code", line)
    line = ABBREVIATIONS.sub(r"\1 ", LINK.sub(r"\1", line))
    return [part for part in END.split(line) if re.search(r"\w", part)]


def paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Paragraphs and list items of plain text. A colon at the end of a line also ends a
    paragraph."""
    block: list[str] = []
    for line in [*lines, ""]:
        if not line.strip() or ITEM.match(line):
            yield " ".join(block)
            block = []
        if line.strip():
            block.append(ITEM.sub("", line))
        if line.rstrip().endswith(":"):
            yield " ".join(block)
            block = []


def of_page(text: str) -> list[str]:
    """The sentences of a Markdown page: text, headings and cells of tables."""
    plain: list[str] = []
    fenced = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
            plain.append("")
        elif fenced:
            plain.append("")
        elif line.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line):
                plain += ["", cell, ""]
        elif line.startswith("#"):
            plain += ["", line.lstrip("# "), ""]
        else:
            plain.append(line)
    return [one for part in paragraphs(plain) for one in sentences(part)]


def of_docstring(text: str) -> list[str]:
    """The sentences of a docstring. Left out as code: an indented block after ``::``, and lines
    that begin with ``>>>`` or ``|``."""
    plain: list[str] = []
    literal: int | None = None
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if literal is not None and line.strip() and indent <= literal:
            literal = None
        code = literal is not None or line.lstrip().startswith((">>>", "|"))
        row = ROW.search(line.strip())
        plain += ["", line, ""] if row and not code else ["" if code else line]
        if literal is None and line.rstrip().endswith("::"):
            literal = indent
    return [one for part in paragraphs(plain) for one in sentences(part)]


def docstrings(source: str) -> list[str]:
    """Every string that is a statement: docstrings of modules, classes, functions, attributes."""
    return [
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def comments(source: str) -> list[str]:
    """The comments of a module, without directives such as ``noqa``. Comments on consecutive lines
    are joined."""
    found: list[str] = []
    previous = -1, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or DIRECTIVES.match(token.string):
            continue
        text = token.string.lstrip("# ")
        line, column = token.start
        if found and (line - 1, column) == previous:
            found[-1] += "\n" + text
        else:
            found.append(text)
        previous = line, column
    return found


def of_file(path: Path, *, with_comments: bool = True) -> list[str]:
    """The sentences of a page or of a Python module."""
    text = path.read_text()
    if path.suffix == ".md":
        return of_page(text)
    found = [one for string in docstrings(text) for one in of_docstring(string)]
    if with_comments:
        found += [one for comment in comments(text) for one in of_docstring(comment)]
    return found
