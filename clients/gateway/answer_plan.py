"""Determines the parts of an answer from the chat template that made its prompt."""

from __future__ import annotations

from .answer_forms import HARMONY, Wanted, family_of, structure_of, thinking_of
from .answer_parts import AnswerForm
from .leniency import Ignored
from .models import ServedModel

PROMPT_END = 8
"""Number of tokens at the end of a prompt that are searched for the beginning of thinking."""


def answer_form(
    model: ServedModel,
    template: str,
    ids: list[int],
    wanted: Wanted,
    *,
    separate_reasoning: bool = True,
    thinking_field: str,
    ignored: Ignored,
) -> AnswerForm | None:
    """The form of the answer to the prompt ``ids``, which ``template`` made; None if the answer is
    one text.

    ``separate_reasoning``: thinking is a separate part if the template supports thinking.
    ``thinking_field``: name of the field that bounds thinking, for errors. If the
    template does not support thinking, ``ignored`` names or refuses the field.
    """
    family = family_of(template)
    if separate_reasoning or family is HARMONY:
        wanted.thinking = thinking_of(template, model.decode(ids[-PROMPT_END:]))
    if wanted.max_thinking_tokens is not None and wanted.thinking == "none":
        ignored.leave_out(
            thinking_field,
            f"{thinking_field} is given, but the model's chat template does not support thinking; "
            f"leave {thinking_field} out",
        )
        wanted.max_thinking_tokens = None
    if wanted.thinking == "none" and not wanted.functions:
        return None
    return AnswerForm.of(model, structure_of(family, wanted))
