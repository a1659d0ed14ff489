"""The command and the environment with which a Python module runs in a process of its own."""

from __future__ import annotations

import os
import sys

PASSED = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "TMPDIR", "LANG")
"""The only environment variables that are passed to processes that read or run data of clients.
Other variables may contain keys."""


def plain_environment() -> dict[str, str]:
    """The variables of this process that are in ``PASSED``."""
    return {name: os.environ[name] for name in PASSED if name in os.environ}


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module with this interpreter.

    With ``-P``, Python does not import files of the current folder. A user's ``json.py`` there
    would otherwise replace Python's own module.
    """
    return [sys.executable, "-P", "-m", module, *arguments]
