"""Counts sentences with patterns that the house style forbids. Fails if a folder exceeds its
ceiling, or if ``docs/`` has too many words.

``python -m tests.lint.sentences`` is part of ``make lint``. ``--show FOLDER`` prints the sentences
of a folder. ``--lower`` writes smaller counts as new ceilings; a ceiling never rises.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from .prose import of_file

ROOT = Path(__file__).parents[2]
CEILINGS = Path(__file__).with_name("ceilings.json")
GOALS = {"openings": 20, "dialect": 10, "long": 100}
"""Target for the number of sentences of each kind in all folders together."""
MAX_WORDS = 32
MAX_DOCS_WORDS = 40_000
"""Maximum number of words in all pages of ``docs/``, including tables and examples."""

OPENING = re.compile(r"^[\"'*(]*(What|Of|So (many|few|much|long))\b")
DIALECT = re.compile(
    r"\bso (many|few)\b|\bthe same of\b|\bof (before|then)\b|\bgone on with\b"
    r"|(?<!there )\bis none\b"
    r"|\b(is|are|was|were|be|been|being) told\b"
    r"|(?<!there )(?<!There )\b(is|are|was|were) no "
    r"(?!longer|more|less|fewer|different|better|worse|later|one)[a-z]"
    r"|\bMOST_\w+"
    r"|\bhears\b|\bof late\b|\b(one|right) behind (it|the|another)\b"
)
PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md", "benchmarks/*.md", "clients/*/README.md")
FOLDERS = ("protocol", "transport", "broker", "workers", "clients", "grammars", "inprocess")


def kinds(sentence: str) -> list[str]:
    """The kinds of ``GOALS`` that a sentence counts towards."""
    found = []
    if OPENING.match(sentence) and not sentence.rstrip(")\"'*").endswith("?"):
        found.append("openings")
    if DIALECT.search(sentence):
        found.append("dialect")
    if num_words(sentence) > MAX_WORDS:
        found.append("long")
    return found


def num_words(text: str) -> int:
    """The number of words. Bars of tables and other signs are not words."""
    return sum(any(c.isalnum() for c in word) for word in text.split())


def folder_of(name: str) -> str:
    """The folder in which a file is counted: ``docs`` for pages, ``workers/NAME`` and
    ``clients/NAME`` for their modules, and otherwise the top folder."""
    parts = name.split("/")[:-1]
    if not parts or name.endswith(".md"):
        return "docs"
    return "/".join(parts[:2] if parts[0] in ("workers", "clients") else parts[:1])


def files() -> Iterator[Path]:
    """All pages and modules that are counted."""
    for pattern in PAGES:
        yield from sorted(ROOT.glob(pattern))
    for folder in (*FOLDERS, "tests", "benchmarks"):
        yield from sorted(ROOT.joinpath(folder).rglob("*.py"))


def marked() -> Iterator[tuple[str, str, str, str]]:
    """Folder, file, kind and text of each counted sentence. In tests, only docstrings count."""
    for path in files():
        name = str(path.relative_to(ROOT))
        if "node_modules" in name:
            continue
        for sentence in of_file(path, with_comments=not name.startswith("tests/")):
            for kind in kinds(sentence):
                yield folder_of(name), name, kind, sentence


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", metavar="FOLDER", help="print the sentences of a folder or file")
    parser.add_argument("--lower", action="store_true", help="write smaller counts as new ceilings")
    options = parser.parse_args()
    found = list(marked())
    for folder, name, kind, sentence in found:
        if options.show and options.show in (folder, name, "all"):
            print(f"{name}: {kind}: {sentence}")
    counts = Counter(f"{folder} {kind}" for folder, _, kind, _ in found)
    ceilings = json.loads(CEILINGS.read_text())
    if options.lower:
        lower = {key: min(most, counts[key]) for key, most in ceilings.items()}
        ceilings = {key: most for key, most in lower.items() if most}
        CEILINGS.write_text(json.dumps(ceilings, indent=1, sort_keys=True) + "\n")
    above = [key for key, count in sorted(counts.items()) if count > ceilings.get(key, 0)]
    for key in above:
        folder = key.split()[0]
        print(f"{key}: {counts[key]} sentences, expected at most {ceilings.get(key, 0)}; "
              f"python -m tests.lint.sentences --show {folder} prints them")  # fmt: skip
    totals = Counter(kind for _, _, kind, _ in found)
    print(", ".join(f"{kind} {totals[kind]} (goal {goal})" for kind, goal in GOALS.items()))
    words = sum(num_words(page.read_text()) for page in ROOT.glob("docs/*.md"))
    print(f"docs: {words:,} words (at most {MAX_DOCS_WORDS:,})")
    return 1 if above or words > MAX_DOCS_WORDS else 0


if __name__ == "__main__":
    sys.exit(main())
