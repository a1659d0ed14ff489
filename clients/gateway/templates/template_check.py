"""Renders example conversations to show the effect of a model's chat template. Some conversations
have an unusual order of messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenizers import Tokenizer
from tokenizers.models import BPE

from ....protocol.messages import ModelInfo, TokenizerFiles
from ..answer_forms import thinking_of
from ..bodies.leniency import Ignored
from ..conversation.order import without_developers
from ..conversation.parts import Call, Conversation, Result, Role, Text, Thinking, Turn
from ..conversation.rendering import rendered
from ..conversation.tools import Tool
from ..errors import ApiError
from ..models import ServedModel
from .templates import Templates, template_of

TOOL = Tool("get_weather", "The weather", {"type": "object", "properties": {}})
THOUGHT = "a-thought"


def _turn(role: Role, text: str) -> Turn:
    return Turn(role, [Text(text)])


_BRIEF, _ASK, _ANSWER = (
    _turn("system", "Be kind."),
    _turn("user", "Hello"),
    _turn("assistant", "Hi"),
)
_CALLED = Turn("assistant", [Call("1", TOOL.name, "{}")])
_RESULT = Turn("user", [Result("1", [Text("sunny")])])
CASES: dict[str, list[Turn]] = {
    "system message first": [_BRIEF, _ASK],
    "system message in the middle": [_ASK, _ANSWER, _BRIEF, _turn("user", "Next")],
    "developer message": [_turn("developer", "Be kind."), _ASK],
    "two system messages": [_BRIEF, _turn("system", "Be brief."), _ASK],
    "two user messages in a row": [_ASK, _turn("user", "Next")],
    "tools": [_ASK],
    "call and result": [_ASK, _CALLED, _RESULT],
    "text after a result": [_ASK, _CALLED, Turn("user", [*_RESULT.parts, Text("Next")])],
    "thinking of a call": [_ASK, Turn("assistant", [Thinking(THOUGHT), *_CALLED.parts]), _RESULT],
    "thinking of an earlier answer": [
        _ASK,
        Turn("assistant", [Thinking(THOUGHT), *_ANSWER.parts]),
        _turn("user", "Next"),
    ],
}
"""The conversations by their names."""
WITH_TOOL = frozenset({"tools", "call and result", "text after a result", "thinking of a call"})
"""The conversations whose request has ``TOOL``."""


@dataclass
class Finding:
    """The effect of a template on one conversation."""

    case: str
    effects: list[str] = field(default_factory=list)
    """The effects, in plain words."""
    text: str = ""
    """The rendered prompt; empty if the template refuses the conversation."""
    refused: str = ""
    """The error of the template."""


async def findings(files: TokenizerFiles) -> list[Finding]:
    """The effects of a model's template on all cases."""
    info = ModelInfo(
        name="model", vocab_size=1, context_length=1, eos_token_ids=[0], fingerprint="model"
    )
    model = ServedModel(info, files, Tokenizer(BPE()))
    templates = Templates()
    try:
        return [await _finding(templates, model, case) for case in CASES]
    finally:
        await templates.close()


async def _finding(templates: Templates, model: ServedModel, case: str) -> Finding:
    turns = CASES[case]
    conversation = Conversation(turns, [TOOL] if case in WITH_TOOL else [])
    try:
        text, arranged = await rendered(templates, model, conversation, Ignored())
    except ApiError as error:
        return Finding(case, ["refused"], refused=error.message)
    found = Finding(case, text=text)
    if "developer" in [turn.role for turn in turns] and arranged != turns:
        found.effects.append("developer messages become system messages")
        turns = without_developers(turns)
    if arranged == turns:
        found.effects.append("rendered in this order")
    else:
        roles = ", ".join(turn.role for turn in arranged)
        found.effects.append(f"the template refuses this order; rendered as: {roles}")
    if case == "tools":
        shown = TOOL.name in text
        found.effects.append("the tools are shown" if shown else "the template hides the tools")
        found.effects.append(_THINKING[thinking_of(template_of(model), text)])
    if "thinking" in case:
        shown = THOUGHT in text
        found.effects.append("thinking is shown" if shown else "the template hides this thinking")
    return found


_THINKING = {
    "none": "answers have no thinking",
    "first": "an answer may begin with thinking",
    "inside": "the prompt ends inside thinking",
}
"""The kinds of thinking in plain words."""
