"""Reads the recipes of docs/recipes.md for tests that run them unchanged."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
ADDRESS = "http://127.0.0.1:8080"


def recipe(client: str, url: str) -> str:
    """The code block of a client's recipe, with ``url`` as the address of the gateway."""
    page, flags = PAGE.read_text(), re.MULTILINE | re.DOTALL
    [section] = re.findall(rf"^## {re.escape(client)}\n(.*?)(?=^## |\Z)", page, flags)
    [block] = re.findall(r"^```\w*\n(.*?)^```$", section, flags)
    assert ADDRESS in block
    return str(block).replace(ADDRESS, url)
