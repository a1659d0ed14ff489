"""Conversations with OpenAI's Python package."""

from __future__ import annotations

from pathlib import Path

from .local import Local, check_conversation, conversations


def test_a_conversation_is_rendered_as_it_was_held(local: Local, tmp_path: Path) -> None:
    local.run_python("openai", "openai_sdk.py", tmp_path)
    held = conversations(local.prompts)
    assert len(held) == 2
    for prompts in held:
        check_conversation(prompts)
