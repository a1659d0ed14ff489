"""A session of Continue without a terminal, which does not send back thinking. Each question
resumes the last session."""

from __future__ import annotations

from pathlib import Path

from .install import FOLDER
from .local import INTERRUPTED, QUESTIONS, Local, check_turns
from .recipes import recipe

PROGRAM = FOLDER / "continue" / "node_modules" / ".bin" / "cn"
WITHOUT_ANTHROPIC = ["env", "-u", "ANTHROPIC_API_KEY"]
"""With this key, Continue adds models of Anthropic to the configuration."""
WITHOUT_ENDS = ["--exclude", "Exit", "--exclude", "AskQuestion"]
"""The model calls any tool. Without a terminal, these tools end Continue."""


def test_a_session_is_rendered_as_it_was_held(local: Local, tmp_path: Path) -> None:
    (tmp_path / ".continue").mkdir()
    (tmp_path / ".continue" / "config.yaml").write_text(recipe("Continue", local.url))
    for number, question in enumerate(QUESTIONS):
        again = ["--resume"] if number else []
        cn: list[str | Path] = [PROGRAM, "-p", question, *again, *WITHOUT_ENDS]
        command = [*WITHOUT_ANTHROPIC, *cn]
        if number == INTERRUPTED:
            local.interrupt(command, tmp_path)
        else:
            assert "Done: that is the answer." in local.run(command, tmp_path).stdout
    check_turns(local.prompts[-1], thinking=False)
