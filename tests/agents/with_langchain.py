"""Conversations with LangChain's package for OpenAI."""

from __future__ import annotations

from pathlib import Path

from .local import Local, check_conversation, conversations


def test_a_conversation_is_rendered_as_it_was_held(local: Local, tmp_path: Path) -> None:
    local.run_python("langchain", "langchain_openai_sdk.py", tmp_path)
    held = conversations(local.prompts)
    # The client does not send back the thinking of Chat Completions.
    for prompts, thinking in zip(held, (True, False), strict=True):
        check_conversation(prompts, thinking=thinking)
