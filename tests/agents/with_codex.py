"""A session of Codex without a terminal. Each question resumes the last session."""

from __future__ import annotations

import subprocess
from pathlib import Path

from .install import FOLDER
from .local import INTERRUPTED, QUESTIONS, Local, check_turns
from .recipes import recipe

PROGRAM = FOLDER / "codex" / "node_modules" / ".bin" / "codex"
QUIET = """\
check_for_update_on_startup = false
analytics.enabled = false
"""


def test_a_session_is_rendered_as_it_was_held(local: Local, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(QUIET + recipe("Codex", local.url))
    for number, question in enumerate(QUESTIONS):
        again = ["resume", "--last"] if number else []
        command: list[str | Path] = [PROGRAM, "exec", *again, question]
        if number == INTERRUPTED:
            local.interrupt(command, tmp_path)
        else:
            assert "Done: that is the answer." in local.run(command, tmp_path).stdout
    check_turns(local.prompts[-1])
