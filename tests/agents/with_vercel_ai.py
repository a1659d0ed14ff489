"""Conversations with the package ``ai`` through several providers, and the recipe for this
package."""

from __future__ import annotations

import shutil
from pathlib import Path

from .install import FOLDER
from .local import PROGRAMS, Local, check_conversation, conversations
from .recipes import recipe


def test_a_conversation_is_rendered_as_it_was_held(local: Local, tmp_path: Path) -> None:
    # Node looks for packages in the program's folder and in the folders above.
    program = shutil.copy(PROGRAMS / "vercel_ai.mjs", FOLDER / "vercel_ai")
    local.run(["node", program], tmp_path)
    held = conversations(local.prompts)
    # The provider for OpenAI's chat does not send back thinking. The provider for DeepSeek sends
    # back only the last thinking.
    for prompts, thinking in zip(held, (True, False, True, True, False), strict=True):
        check_conversation(prompts, thinking=thinking)


def test_the_recipe_runs_as_it_stands(local: Local, tmp_path: Path) -> None:
    program = FOLDER / "vercel_ai" / "poem.mjs"
    program.write_text(recipe("Vercel AI SDK", local.url))
    assert "Done: that is the answer." in local.run(["node", program], tmp_path).stdout
