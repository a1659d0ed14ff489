"""The command that runs a Python module in a process of its own."""

from __future__ import annotations

import sys


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module with this interpreter.

    With ``-P``, Python does not import files of the current folder. A user's ``json.py`` there
    would otherwise replace Python's own module.
    """
    return [sys.executable, "-P", "-m", module, *arguments]
