"""Constrains and reads the answer to a conversation: its thinking, text and tool calls."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ..answer_forms import Rest, Wanted
from ..answer_parts import AnswerForm
from ..answer_plan import answer_form
from ..models import ServedModel
from .constraints import Constraint
from .tools import Calling

WITH_PARTS = frozenset(
    ("json_schema", "lark", "regex", "yacc", "choice", "substring", "combination")
)
"""Names of constraints that apply to the text of an answer after its thinking."""


@dataclass(frozen=True)
class Answering:
    """The constraint and the form of one answer."""

    form: AnswerForm | None
    """The form of the answer; None: the answer is one text."""
    constraint: Constraint | None


def answering(
    model: ServedModel,
    template: str,
    ids: list[int],
    calling: Calling | None,
    own: Constraint | None,
    *,
    max_thinking_tokens: int | None = None,
    separate_reasoning: bool = True,
) -> Answering:
    """The form of the answer to a prompt, and its constraint.

    ``template`` made the prompt ``ids``. ``own`` is the constraint of the answer's text. An answer
    without a constraint is only split into its parts. Raises ApiError.
    """
    if calling is None and own is not None and own.controller not in WITH_PARTS:
        return Answering(None, own)
    wanted = Wanted(max_thinking_tokens=max_thinking_tokens)
    if calling is not None:
        wanted.functions, wanted.parallel = calling.functions, calling.parallel
    if calling is not None and calling.required:
        wanted.rest = None
    elif own is not None:
        wanted.rest = Rest(own.controller, own.arg)
    form = answer_form(model, template, ids, wanted, separate_reasoning=separate_reasoning)
    if form is None or (calling is None and own is None and max_thinking_tokens is None):
        return Answering(form, own)
    arg = msgspec.to_builtins(form.automaton.structure)
    if calling is not None:
        return Answering(form, Constraint("tools", "structural", arg, "tools"))
    if own is not None:
        return Answering(form, Constraint(own.label, "structural", arg, own.field))
    return Answering(form, Constraint("thinking", "structural", arg, "max_thinking_tokens"))
