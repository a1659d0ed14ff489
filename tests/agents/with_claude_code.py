"""A session of Claude Code without a terminal. Each question continues the folder's session."""

from __future__ import annotations

from pathlib import Path

from .install import FOLDER
from .local import INTERRUPTED, QUESTIONS, Local, check_turns

PROGRAM = FOLDER / "claude_code" / "node_modules" / ".bin" / "claude"
STREAM = ["--output-format", "stream-json", "--verbose"]


def test_a_session_is_rendered_as_it_was_held(local: Local, tmp_path: Path) -> None:
    for number, question in enumerate(QUESTIONS):
        again = ["--continue"] if number else []
        command: list[str | Path] = [PROGRAM, "-p", question, *STREAM, *again]
        if number == INTERRUPTED:
            local.interrupt(command, tmp_path)
        else:
            assert "Done: that is the answer." in local.run(command, tmp_path).stdout
    check_turns(local.prompts[-1])
