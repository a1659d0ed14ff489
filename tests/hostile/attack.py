"""One row of the table of attacks, and the outcome that is expected."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an attack, as its client sees it."""

    code: str = ""
    """The code of the error; empty after a normal end."""
    text: str = ""
    """The message of the error; after a normal end, the logs of the first sequence."""
    tokens: int = 0
    """Number of tokens of the first sequence."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The outcomes that are right."""

    codes: tuple[str, ...] = ("",)
    """The codes that are right; an empty code stands for a normal end."""
    says: str = ""
    """A regular expression that must match a part of the outcome's text."""

    def problem(self, outcome: Outcome) -> str:
        """A text that says how an outcome differs from the right outcomes; empty if it is right."""
        if outcome.code not in self.codes:
            return f"expected one of {self.codes}, not {outcome}"
        if not re.search(self.says, outcome.text):
            return f"expected the text {self.says!r}, not {outcome}"
        return ""


ENDS = Expected()
TIMEOUT = Expected(("controller_timeout",))


def fails(says: str = "", *codes: str) -> Expected:
    """Expects the error ``controller_failed``, or an error with one of ``codes``, whose text
    matches ``says``."""
    return Expected(codes or ("controller_failed",), says)


def refused(says: str = "", *codes: str) -> Expected:
    """Expects that the upload or the request is refused with ``invalid_field``, or with one of
    ``codes``, and with a text that matches ``says``."""
    return Expected(codes or ("invalid_field",), says)


@dataclass(frozen=True, slots=True)
class Attack:
    """A hostile request, or several at the same time."""

    name: str
    tries: str
    """The action of the attacker, as a text that begins with a verb."""
    expected: Expected
    source: Callable[[], bytes] | str
    """A function that makes the module that the attacker uploads, or the name of a built-in
    constraint."""
    arg: str | dict[str, Any] | list[Any] = ""
    """The controller's argument."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request."""
    requests: int = 1
    """Number of simultaneous requests."""
