"""Reads the regular expressions of ``masks.py``, and the texts that they match, from
``texts/regexes.toml``."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass

from _masks_world import TEXTS


@dataclass(frozen=True, slots=True)
class Case:
    """A pattern, and texts that it matches in full."""

    name: str
    pattern: str
    texts: list[str]
    others: bool = True
    """Whether xgrammar and outlines-core are measured too."""


CASES = [Case(**case) for case in tomllib.loads((TEXTS / "regexes.toml").read_text())["case"]]
"""The cases. Each case has a ratio: the time of our step divided by the time of llguidance's step.
The figure ``regex_vs_llguidance`` is the mean of these ratios."""
