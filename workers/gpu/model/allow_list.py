"""Checks whether the setting ``allow`` permits a name: a model that a client requests, or a folder
with new weights. The setting is a list of patterns."""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase

from .. import embedded

GLOB = "*?["
"""The characters that begin a wildcard in a pattern."""


def is_allowed(name: str, patterns: Iterable[str]) -> bool:
    """Whether ``name``, a model or a folder that a client names, matches one of the patterns.

    If the name is a path on this machine, ``..`` and symbolic links in the path are resolved first.
    So the path cannot lead out of an allowed folder. In a pattern, the folders before its first
    wildcard are resolved too. Other names, such as ids of a hub, are compared unchanged.
    """
    if "\0" in name:
        return False
    is_path = os.path.isabs(name) or ".." in name.split("/") or os.path.exists(name)
    if name == embedded.NAME or not is_path:
        return any(fnmatchcase(name, pattern) for pattern in patterns)
    real = os.path.realpath(name)
    return any(fnmatchcase(real, _resolved(pattern)) for pattern in patterns)


def _resolved(pattern: str) -> str:
    """Resolves the fixed part of a pattern: the folders before its first wildcard, or the whole
    pattern if it has no wildcard."""
    first = min((at for at in map(pattern.find, GLOB) if at >= 0), default=-1)
    if first < 0:
        return os.path.realpath(pattern)
    folder, slash, _ = pattern[:first].rpartition("/")
    if not slash:
        # The pattern has no fixed folder: "*" allows every path, and "gpt*" allows only paths in
        # the current folder.
        return pattern if pattern.startswith("*") else f"{os.getcwd()}/{pattern}"
    return os.path.realpath(folder or "/").rstrip("/") + pattern[len(folder) :]
