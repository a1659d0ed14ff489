"""Conversations with OpenAI's Agents SDK."""

from __future__ import annotations

from pathlib import Path

from .local import Local, check_conversation, conversations


def test_a_conversation_is_rendered_as_it_was_held(local: Local, tmp_path: Path) -> None:
    local.run_python("openai_agents", "openai_agents.py", tmp_path)
    held = conversations(local.prompts)
    # The client does not send back the thinking of Chat Completions.
    for prompts, thinking in zip(held, (False, True), strict=True):
        check_conversation(prompts, thinking=thinking)
