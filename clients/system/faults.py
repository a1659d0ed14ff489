"""Why a system cannot run: one line for the person who can act on it, and the exit code."""

from __future__ import annotations

FAILED = 1
"""Exit code: a process of the system failed."""
WRONG_SETTING = 2
"""Exit code: a flag, a variable or a file is wrong. Of a process: do not start it again."""
NOT_RUNNING = 3
"""Exit code: there is nothing to end."""


class SystemFault(Exception):
    """The system cannot start or go on; ``exit_code`` is what the command ends with."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code
