"""Prepares an answer: chooses its model, renders its prompt, and determines its constraint and
form."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from ..answer_forms import Function, Rest, Wanted
from ..answer_parts import AnswerForm
from ..answer_plan import answer_form
from ..context import Gateway
from ..leniency import Ignored
from ..models import ServedModel
from ..templates import template_of
from .constraints import Constraint
from .parts import Conversation
from .rendering import prompt_ids
from .schemas import Checked, Checks, enforceable
from .tools import Calling, calling

WITH_PARTS = frozenset(
    ("json_schema", "lark", "regex", "yacc", "choice", "substring", "combination")
)
"""Names of constraints that apply to the text of an answer after its thinking."""


@dataclass(frozen=True)
class Prepared:
    """A conversation that is ready to be answered."""

    model: ServedModel
    ids: list[int]
    """The token ids of the prompt."""
    form: AnswerForm | None
    """The form of the answer; None: the answer is one text."""
    constraint: Constraint | None
    checks: Checks


async def prepare(
    gateway: Gateway, name: str, conversation: Conversation, ignored: Ignored
) -> Prepared:
    """Renders a conversation for the model ``name``, and plans its answer. Raises ApiError."""
    model = await gateway.models.get(name)
    rules = conversation.rules
    called = calling(conversation.tools, rules.choice, rules.parallel)
    ids = await prompt_ids(gateway, model, conversation, ignored)
    checks = Checks(gateway.templates, None)
    if called is not None:
        loose = {tool.name for tool in conversation.tools if not tool.strict}
        called.functions[:] = [
            _enforceable_function(function, checks) if function.name in loose else function
            for function in called.functions
        ]
    own = rules.constraint
    if own is not None and not own.strict and isinstance(own.arg, dict):
        arg, keywords = enforceable(own.arg)
        if keywords:
            checks.text = Checked(own.arg, keywords)
            rules.constraint = replace(own, arg=arg)
    form, constraint = _plan(model, ids, conversation, called, ignored)
    checks.form = form
    return Prepared(model, ids, form, constraint, checks)


def _enforceable_function(function: Function, checks: Checks) -> Function:
    parameters, keywords = enforceable(function.parameters)
    if keywords:
        checks.functions[function.name] = Checked(function.parameters, keywords)
    return Function(function.name, parameters)


def _plan(
    model: ServedModel,
    ids: list[int],
    conversation: Conversation,
    called: Calling | None,
    ignored: Ignored,
) -> tuple[AnswerForm | None, Constraint | None]:
    """The form of the answer to the prompt ``ids``, and its constraint. An answer without a
    constraint is only split into its parts."""
    rules = conversation.rules
    own = rules.constraint
    if called is None and own is not None and own.controller not in WITH_PARTS:
        return None, own
    wanted = Wanted(max_thinking_tokens=rules.max_thinking_tokens)
    if called is not None:
        wanted.functions, wanted.parallel = called.functions, called.parallel
    if called is not None and called.required:
        wanted.rest = None
    elif own is not None:
        wanted.rest = Rest(own.controller, own.arg)
    template = conversation.rendering.chat_template
    form = answer_form(
        model,
        template_of(model) if template is None else template,
        ids,
        wanted,
        separate_reasoning=rules.separate_reasoning,
        thinking_field=rules.thinking_field,
        ignored=ignored if rules.thinking_is_optional else Ignored(strict=True),
    )
    if form is None or (called is None and own is None and wanted.max_thinking_tokens is None):
        return form, own
    arg = msgspec.to_builtins(form.automaton.structure)
    if called is not None:
        return form, Constraint("tools", "structural", arg, "tools")
    if own is not None:
        return form, Constraint(own.label, "structural", arg, own.field)
    return form, Constraint("thinking", "structural", arg, rules.thinking_field)
