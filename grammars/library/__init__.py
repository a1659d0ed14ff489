"""Grammars and regular expressions that come with Tokenbus, by name.

``NAME.y`` is a grammar, and ``NAME.rx`` a regular expression. ``NAME.md`` is its page, with samples
that the tests run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files

_BLOCK = re.compile(r"^```(lines|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = "▲"
"""In a rejected sample, this mark precedes the character that cannot follow. If a rejected sample
does not have the mark, its text is not complete."""


def names(kind: str = "y") -> list[str]:
    """The sorted names of the grammars (``y``) or regular expressions (``rx``)."""
    ends = f".{kind}"
    found = (entry.name for entry in files(__name__).iterdir())
    return sorted(name.removesuffix(ends) for name in found if name.endswith(ends))


def grammar(name: str) -> str:
    """The text of a grammar. If the name is unknown, raises KeyError with the known names."""
    return _read(name, "y")


def regex(name: str) -> str:
    """A regular expression. The lines of its file are joined, without the blanks at the beginning
    and the end of each line. Lines that begin with ``#`` are comments. If the name is unknown,
    raises KeyError with the known names."""
    lines = (line.strip() for line in _read(name, "rx").splitlines())
    return "".join(line for line in lines if not line.startswith("#"))


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a page. A rejected sample has ``MARK`` before the character that cannot
    follow. If a rejected sample has no ``MARK``, its text is not complete."""

    accepted: tuple[str, ...]
    rejected: tuple[str, ...]


def samples(name: str) -> Samples:
    """The samples of the page of a grammar or regular expression. They are in the fenced blocks
    under the headings Accepted and Rejected. Each line of a block ``lines`` is a sample. A block
    ``text`` is one sample."""
    page = (files(__name__) / f"{name}.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    return Samples(_blocks(sections["Accepted"]), _blocks(sections["Rejected"]))


def _blocks(section: str) -> tuple[str, ...]:
    found: list[str] = []
    for kind, body in _BLOCK.findall(section):
        found.extend(body.splitlines() if kind == "lines" else [body])
    return tuple(found)


def _read(name: str, kind: str) -> str:
    if name not in names(kind):
        raise KeyError(
            f"{name!r} is not in the library; it must be one of {', '.join(names(kind))}"
        )
    return (files(__name__) / f"{name}.{kind}").read_text(encoding="utf-8")
