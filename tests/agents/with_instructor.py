"""Instructor requests typed values with forced calls and with a JSON schema."""

from __future__ import annotations

from pathlib import Path

from .local import QUESTIONS, Local, conversations, plain


def test_values_come_back_in_the_next_prompts(local: Local, tmp_path: Path) -> None:
    local.run_python("instructor", "instructor_sdk.py", tmp_path)
    held = conversations(local.prompts)
    assert len(held) == 2
    for prompts in held:
        text = plain(prompts[-1])
        places = [text.index(plain(question)) for question in QUESTIONS]
        assert places == sorted(places)
        assert text.count('"place":"","days":0') == 3
