"""The lint of sentences finds the patterns that the house style forbids, and reads only prose."""

from __future__ import annotations

import json

import pytest

from . import prose
from .sentences import CEILINGS, kinds


@pytest.mark.parametrize(
    ("sentence", "found"),
    [
        ("What it costs.", ["openings"]),
        ("What does it cost?", []),
        ("Of these the last one counts.", ["openings"]),
        ("So many rows memory decides about.", ["openings"]),
        ("It keeps so many rows.", ["dialect"]),
        ("The worker is told the count.", ["dialect"]),
        ("The body is no list.", ["dialect"]),
        ("It is no longer there, and there is no worker.", []),
        ("At most MOST_ROWS of them.", ["dialect"]),
        ("The client hears of it.", ["dialect"]),
        ("Tokens that were routed of late.", ["dialect"]),
        ("Bodies, one behind the other.", ["dialect"]),
        (" ".join(["word"] * 32), []),
        (" ".join(["word"] * 33), ["long"]),
    ],
)
def test_a_sentence_counts_towards_its_kinds(sentence: str, found: list[str]) -> None:
    assert kinds(sentence) == found


def test_code_of_a_page_is_no_prose() -> None:
    page = "# A heading\n\nOne. Two has\n`code. Here`:\n\n```\nWhat x = 1\n```\n\n| a | What b |\n"
    assert prose.of_page(page) == ["A heading", "One.", "Two has code:", "a", "What b"]


def test_literal_blocks_of_a_docstring_are_no_prose() -> None:
    text = "First. Second::\n\n    What a = 1\n\n- an item\n- another\n  line\n"
    assert prose.of_docstring(text) == ["First.", "Second::", "an item", "another line"]


def test_docstrings_of_attributes_and_comments_on_several_lines_are_read() -> None:
    source = '"""Module."""\nX = 1\n"""Attribute."""\n# A comment\n# goes on.\ny = 2  # alone\n'
    assert prose.docstrings(source) == ["Module.", "Attribute."]
    assert prose.comments(source) == ["A comment\ngoes on.", "alone"]


def test_every_ceiling_is_a_count() -> None:
    ceilings = json.loads(CEILINGS.read_text())
    assert all(isinstance(most, int) and most > 0 for most in ceilings.values())
