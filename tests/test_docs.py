"""The links, files and names in the documents exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "clients" / "typescript" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
GUIDES = [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md"]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@cache
def defined(path: Path) -> set[str]:
    """The classes, functions, methods and constants of a module, as ``name`` or ``Class.name``."""
    found: set[str] = set()

    def take(nodes: list[ast.stmt], prefix: str) -> None:
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                found.add(prefix + node.name)
                take(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + node.name)
            elif isinstance(node, ast.Assign):
                found.update(prefix + t.id for t in node.targets if isinstance(t, ast.Name))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(prefix + node.target.id)

    take(ast.parse(path.read_text()).body, "")
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_within_the_tree_leads_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_every_path_in_a_guide_exists(page: Path) -> None:
    """A path is relative to the root, or to the folder in the heading of its section."""
    missing = []
    for section in re.split(r"^(?=#)", page.read_text(), flags=re.MULTILINE):
        heading = re.match(r"#+ `([\w/]+)/`", section)
        folders = [ROOT, *([ROOT / heading[1]] if heading else [])]
        missing += [
            path
            for path in re.findall(r"`((?:[\w.-]+/)+[\w.*-]*)`", section)
            if not any(list(folder.glob(path.rstrip("/"))) for folder in folders)
        ]
    assert missing == []


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_every_name_that_a_guide_gives_with_its_file_is_there(page: Path) -> None:
    pairs = re.findall(r"`([\w/]+\.py)`\s+`([A-Za-z_][\w.]*)`", page.read_text())
    assert pairs
    assert [pair for pair in pairs if pair[1] not in defined(ROOT / pair[0])] == []
