"""A session of Claude Code without a terminal. Each question continues the folder's session. The
shell runs the recipe for Claude Code first."""

from __future__ import annotations

from pathlib import Path

from .install import FOLDER
from .local import INTERRUPTED, QUESTIONS, Local, check_turns
from .recipes import recipe

PROGRAM = FOLDER / "claude_code" / "node_modules" / ".bin" / "claude"
STREAM = ["--output-format", "stream-json", "--verbose"]


def test_a_session_is_rendered_as_it_was_held(local: Local, tmp_path: Path) -> None:
    script = recipe("Claude Code", local.url) + 'exec "$@"\n'
    for number, question in enumerate(QUESTIONS):
        again = ["--continue"] if number else []
        claude: list[str | Path] = [PROGRAM, "-p", question, *STREAM, *again]
        command = ["sh", "-c", script, "sh", *claude]
        if number == INTERRUPTED:
            local.interrupt(command, tmp_path)
        else:
            assert "Done: that is the answer." in local.run(command, tmp_path).stdout
    check_turns(local.prompts[-1])
