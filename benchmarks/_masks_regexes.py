"""Reads the regular expressions for ``masks.py`` and their texts from ``texts/regexes.toml``."""

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
"""The cases. Each case has a ratio of step times, and the figure ``regex_vs_llguidance`` is the
mean of these ratios."""
