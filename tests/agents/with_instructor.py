"""Instructor requests typed values with forced calls and with a JSON schema."""

from __future__ import annotations

from pathlib import Path

from .local import INTERRUPTED, QUESTIONS, Local, conversations, plain

ANSWERED = [number for number in range(len(QUESTIONS)) if number != INTERRUPTED]


def test_values_come_back_in_the_next_prompts(local: Local, tmp_path: Path) -> None:
    values = local.run_python("instructor", "instructor_sdk.py", tmp_path).split("\n")
    held = conversations(local.prompts)
    assert len(held) == 2
    for prompts in held:
        received, values = values[: len(ANSWERED)], values[len(ANSWERED) :]
        text = plain(prompts[-1])
        place = 0
        for number, question in enumerate(QUESTIONS):
            place = text.index(plain(question), place)
            if number in ANSWERED[:-1]:
                place = text.index(plain(received[ANSWERED.index(number)]), place)
