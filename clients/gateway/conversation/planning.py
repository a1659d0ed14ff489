"""Prepares an answer: chooses its model, renders its prompt, and determines its constraint and
form."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from ....protocol.messages import Token
from ... import GeneratedSequence
from ..answer_forms import HARMONY, Function, Rest, Wanted, family_of, structure_of, thinking_of
from ..answer_parts import AnswerForm
from ..bodies.leniency import Ignored
from ..models import ServedModel
from ..templates.templates import Templates, template_of
from .answers import Answer
from .constraints import Constraint, Receipt
from .endings import receipt_of
from .growing import GrowingChoice
from .parts import AnswerRules, Conversation
from .rendering import Resources
from .schemas import Checked, Checks, enforced_schema
from .tools import Calling, calling
from .truncation import fitting_ids

WITH_PARTS = frozenset(
    ("json_schema", "lark", "regex", "yacc", "choice", "substring", "combination")
)
"""Built-in constraints that can apply to a part of an answer: its text outside thinking and
calls."""
PROMPT_END = 8
"""Number of tokens at the end of a prompt that are decoded to see whether the prompt ends with
``<think>``."""


@dataclass(frozen=True)
class Prepared:
    """A conversation that is ready to be answered."""

    model: ServedModel
    name: str
    """The model's name in the answer (``ServedModel.name_for``)."""
    ids: list[int]
    """The token ids of the prompt."""
    form: AnswerForm | None
    """The form of the answer, or None if the answer is one text."""
    constraint: Constraint | None
    checks: Checks

    def whole_text(self, sequence: GeneratedSequence) -> str:
        """The text of a sequence, as ``Answer.feed`` expects it."""
        if self.form is None:
            return sequence.text
        return self.form.whole_text(self.model, sequence)

    def answer_of(self, sequence: GeneratedSequence, call_prefix: str = "call_") -> Answer:
        """The parts of a finished sequence. ``call_prefix``: the beginning of the ids of calls."""
        answer = Answer(self.form, call_prefix)
        answer.feed(self.whole_text(sequence))
        answer.end()
        return answer

    def receipt_of(
        self, sequence: GeneratedSequence | GrowingChoice, end: Token | None = None
    ) -> Receipt | None:
        """The receipt of an ended sequence with the outcome of its checks; None if it would be
        empty. ``end``: as in ``endings.receipt_of``."""
        receipt = receipt_of(self.constraint, sequence, end)
        if receipt is not None:
            receipt.keywords = self.checks.outcomes.get(sequence.seq, {})
        return receipt


async def prepare(
    resources: Resources, name: str, conversation: Conversation, ignored: Ignored
) -> Prepared:
    """Renders a conversation for the model ``name``, and plans its answer. Raises ApiError or
    TokenbusError."""
    model = await resources.models.get(name)
    rules = conversation.rules
    called = calling(conversation.tools, rules.choice, rules.parallel)
    ids = await fitting_ids(resources, model, conversation, ignored)
    checked: dict[str, Checked] = {}
    if called is not None:
        strict = {tool.name for tool in conversation.tools if tool.strict}
        functions = [
            await _enforceable_function(
                resources.templates, model, function, function.name in strict, checked
            )
            for function in called.functions
        ]
        called = replace(called, functions=functions)
    own, checked_text = await _enforceable_constraint(resources.templates, model, rules.constraint)
    wanted = _wanted(rules, called, own)
    form, constraint = None, own
    if called is not None or own is None or own.controller in WITH_PARTS:
        form = _form(model, ids, conversation, wanted, ignored)
    if form is not None:
        constraint = _of_form(form, wanted, rules, own)
    checks = Checks(resources.templates, form, checked_text, checked)
    return Prepared(model, model.name_for(name), ids, form, constraint, checks)


async def _enforceable_function(
    templates: Templates,
    model: ServedModel,
    function: Function,
    strict: bool,
    checked: dict[str, Checked],
) -> Function:
    schema, check = await enforced_schema(templates, model, function.parameters, strict)
    if check is not None:
        checked[function.name] = check
    return Function(function.name, schema)


async def _enforceable_constraint(
    templates: Templates, model: ServedModel, own: Constraint | None
) -> tuple[Constraint | None, Checked | None]:
    if own is None or own.controller != "json_schema" or not isinstance(own.arg, dict):
        return own, None
    schema, check = await enforced_schema(templates, model, own.arg, own.strict)
    return replace(own, arg=schema), check


def _wanted(rules: AnswerRules, called: Calling | None, own: Constraint | None) -> Wanted:
    wanted = Wanted(max_thinking_tokens=rules.max_thinking_tokens)
    if called is not None:
        wanted.functions, wanted.parallel = called.functions, called.parallel
    if called is not None and called.required:
        wanted.rest = None
    elif own is not None:
        wanted.rest = Rest(own.controller, own.arg)
    return wanted


def _form(
    model: ServedModel,
    ids: list[int],
    conversation: Conversation,
    wanted: Wanted,
    ignored: Ignored,
) -> AnswerForm | None:
    """The form of the answer to the prompt ``ids``; None if the answer is one text. Sets the fields
    of ``wanted`` that describe thinking, as the chat template and the request determine."""
    rules, template = conversation.rules, conversation.rendering.chat_template
    template = template_of(model) if template is None else template
    family = family_of(template)
    if rules.separate_reasoning or family is HARMONY:
        wanted.thinking = thinking_of(template, model.decode(ids[-PROMPT_END:]))
    if wanted.max_thinking_tokens is not None and wanted.thinking == "none":
        name = rules.thinking_field
        (ignored if rules.thinking_is_optional else Ignored(strict=True)).leave_out(
            name,
            f"{name} is given, but the model's chat template does not support thinking; "
            f"leave {name} out",
        )
        wanted.max_thinking_tokens = None
    if wanted.thinking == "none" and not wanted.functions:
        return None
    return AnswerForm.of(model, structure_of(family, wanted))


def _of_form(
    form: AnswerForm, wanted: Wanted, rules: AnswerRules, own: Constraint | None
) -> Constraint | None:
    """The constraint that makes an answer have this form. None if the request does not ask for a
    constraint; the gateway then only splits the answer into its parts."""
    if wanted.functions:
        label, field = "tools", "tools"
    elif own is not None:
        label, field = own.label, own.field
    elif wanted.max_thinking_tokens is not None:
        label, field = "thinking", rules.thinking_field
    else:
        return None
    return Constraint(label, "structural", msgspec.to_builtins(form.automaton.structure), field)
