"""The parts of the answer to a prompt, which follow from the template that made the prompt."""

from __future__ import annotations

from .answer_forms import HARMONY, Wanted, family_of, structure_of, thinking_of
from .answer_parts import AnswerForm
from .errors import invalid_field
from .models import ServedModel

PROMPT_END = 8
"""Tokens at the end of a prompt that are searched for the beginning of thinking."""


def answer_form(
    model: ServedModel,
    template: str,
    ids: list[int],
    wanted: Wanted,
    *,
    separate_reasoning: bool = True,
    thinking_field: str = "max_thinking_tokens",
) -> AnswerForm | None:
    """The parts of the answer to the prompt ``ids``, which ``template`` made; None: one text.

    ``separate_reasoning``: thinking is a part of its own, if the template supports thinking.
    ``thinking_field``: the field that bounds it. Raises ApiError 400 if the answer has no thinking
    that could be bounded.
    """
    family = family_of(template)
    if separate_reasoning or family is HARMONY:
        wanted.thinking = thinking_of(template, model.decode(ids[-PROMPT_END:]))
    if wanted.max_thinking_tokens is not None and wanted.thinking == "none":
        raise invalid_field(
            thinking_field,
            f"{thinking_field} is given, and the model's chat template has no thinking that could "
            "be bounded; leave it out",
        )
    if wanted.thinking == "none" and not wanted.functions:
        return None
    return AnswerForm.of(model, structure_of(family, wanted))
