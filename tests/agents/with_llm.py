"""A conversation with the package llm, which does not send back thinking."""

from __future__ import annotations

from pathlib import Path

from .local import Local, check_conversation, conversations


def test_a_conversation_is_rendered_as_it_was_held(local: Local, tmp_path: Path) -> None:
    local.run_python("llm", "llm_cli.py", tmp_path)
    held = conversations(local.prompts)
    assert len(held) == 1
    for prompts in held:
        check_conversation(prompts, thinking=False)
