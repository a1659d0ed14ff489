"""Conversations with Pydantic AI."""

from __future__ import annotations

from pathlib import Path

from .local import Local, check_conversation, conversations


def test_a_conversation_is_rendered_as_it_was_held(local: Local, tmp_path: Path) -> None:
    local.run_python("pydantic_ai", "pydantic_ai_sdk.py", tmp_path)
    held = conversations(local.prompts)
    assert len(held) == 3
    for prompts in held:
        check_conversation(prompts)
