"""The error that reports why a system cannot run, and the exit codes of the commands."""

from __future__ import annotations

FAILED = 1
"""Exit code: a process of the system failed, or the fault has no other code."""
WRONG_SETTING = 2
"""Exit code: a flag, a variable or a file is not valid, or a needed package is not installed.
supervisord does not restart a process with this exit code."""
NOT_RUNNING = 3
"""Exit code: no system runs."""


class SystemFault(Exception):
    """The system cannot start or continue. The message is one line for the operator; ``exit_code``
    is the exit code of the command."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code
