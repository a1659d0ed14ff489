"""Random regular expressions, and all short texts over some letters, for checks of automata."""

from __future__ import annotations

import re
from itertools import product

from hypothesis import strategies as st

LETTERS = "abkAK1_ \nsßéÉ\u017f\u212a\u0130\u03c3\u03c2漢\U0001f600"
"""Characters of one to four bytes, letters of one to three cases, and the newline, which ``.``
excludes."""
TEXTS = st.text(st.sampled_from(LETTERS), max_size=7)
CLASSES = st.sampled_from(
    ["[ab]", "[^a]", "[a-z]", "[^\\W\\d]", "[É-漢]", "[\\s_]", "[\\w-]", "[^\\n\\s]", "[k-\u0130]"]
)
LEAVES = (
    st.sampled_from(LETTERS).map(re.escape)
    | CLASSES
    | st.sampled_from([".", "\\w", "\\W", "\\d", "\\D", "\\s", "\\S", "", "\\x61", "\\u00e9"])
)
FEW = LEAVES | st.sampled_from(["a", "b", "ab", "[ab]"])
COUNTS = st.sampled_from(
    ["*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{0,2}?", "{2,}", "{,2}"]
)


def _larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    groups = st.sampled_from(["(?:{})", "({})", "(?i:{})", "(?s:{})", "(?a:{})", "(?-i:{})"])
    group = st.builds(lambda shape, one: shape.replace("{}", one), groups, inner)
    return (
        st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.lists(inner, min_size=2, max_size=3).map(lambda some: f"(?:{'|'.join(some)})")
        | group
        | st.builds(lambda one, count: f"(?:{one}){count}", inner, COUNTS)
    )


PATTERNS = st.builds(
    lambda flags, one: flags + one,
    st.sampled_from(["", "", "(?i)", "(?s)", "(?a)", "(?ai)"]),
    st.recursive(FEW, _larger, max_leaves=7),
)


def narrow_patterns(letters: str) -> st.SearchStrategy[str]:
    """Small patterns with few positions, whose texts have only the given letters."""
    leaves = st.lists(st.sampled_from(letters), min_size=1, max_size=2, unique=True).map(
        lambda few: few[0] if len(few) == 1 else f"[{''.join(few)}]"
    )

    def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        counts = st.sampled_from(["*", "+", "?", "{2}", "{1,2}"])
        return (
            st.lists(inner, min_size=2, max_size=3).map("".join)
            | st.lists(inner, min_size=2, max_size=2).map(lambda two: f"(?:{'|'.join(two)})")
            | st.builds(lambda one, count: f"(?:{one}){count}", inner, counts)
        )

    return st.recursive(leaves, larger, max_leaves=4)


def texts_over(letters: str, longest: int) -> list[str]:
    """All texts that have at most ``longest`` letters, each of them from ``letters``."""
    return ["".join(one) for size in range(longest + 1) for one in product(letters, repeat=size)]


def prefixes(texts: list[str]) -> set[bytes]:
    """All prefixes, in bytes, of the UTF-8 of the texts."""
    return {text.encode()[:size] for text in texts for size in range(len(text.encode()) + 1)}
