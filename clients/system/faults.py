"""Why a system cannot run: a one-line message for the operator, and the exit code."""

from __future__ import annotations

FAILED = 1
"""Exit code: a process of the system failed."""
WRONG_SETTING = 2
"""Exit code: a flag, a variable or a file is not valid. A process is not restarted then."""
NOT_RUNNING = 3
"""Exit code: no system runs."""


class SystemFault(Exception):
    """The system cannot start or continue; ``exit_code`` is that of the command."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code
