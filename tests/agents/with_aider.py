"""A chat with Aider, which has no tools. Each question continues the chat in the history file. The
settings are those of the recipe for Aider."""

from __future__ import annotations

from pathlib import Path

from .install import FOLDER
from .local import INTERRUPTED, QUESTIONS, Local, plain
from .recipes import recipe

PROGRAM = FOLDER / "aider" / "bin" / "python"
QUIET = """\
restore-chat-history: true
analytics-disable: true
check-update: false
show-release-notes: false
show-model-warnings: false
git: false
yes-always: true
"""


def test_a_chat_is_rendered_as_it_was_held(local: Local, tmp_path: Path) -> None:
    (tmp_path / ".aider.conf.yml").write_text(recipe("aider", local.url) + QUIET)
    for number, question in enumerate(QUESTIONS):
        command: list[str | Path] = [PROGRAM, "-m", "aider", "--message", question]
        if number == INTERRUPTED:
            local.interrupt(command, tmp_path)
        else:
            assert "Done: that is the answer." in local.run(command, tmp_path).stdout
    text = plain(next(p for p in reversed(local.prompts) if QUESTIONS[-1] in p))
    assert plain(QUESTIONS[-1]) in text
    assert "Done:thatistheanswer." in text
