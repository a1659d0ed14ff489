"""Conversations with LangChain's package for OpenAI, and the recipe for this package."""

from __future__ import annotations

from pathlib import Path

from .install import FOLDER
from .local import Local, check_conversation, conversations
from .recipes import recipe


def test_a_conversation_is_rendered_as_it_was_held(local: Local, tmp_path: Path) -> None:
    local.run_python("langchain", "langchain_openai_sdk.py", tmp_path)
    held = conversations(local.prompts)
    # The client does not send back the thinking of Chat Completions.
    for prompts, thinking in zip(held, (True, False), strict=True):
        check_conversation(prompts, thinking=thinking)


def test_the_recipe_runs_as_it_stands(local: Local, tmp_path: Path) -> None:
    program = tmp_path / "poem.py"
    program.write_text(recipe("LangChain", local.url))
    python = FOLDER / "langchain" / "bin" / "python"
    assert "Done: that is the answer." in local.run([python, program], tmp_path).stdout
