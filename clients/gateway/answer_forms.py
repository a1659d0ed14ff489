"""Structures for the forms in which models write thinking and tool calls.

Each *family* of models was trained on one form. The chat template of a model shows the form. A
*structure* (``protocol.structure``) describes an answer. The *tags* of a structure are marked
parts, such as a call. Its *phases* determine which text and tags may follow. The controller worker
computes masks from the structure. The gateway splits the answer into its parts with the same
structure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from ...protocol.structure import Phase, Structure, Tag

Schema = dict[str, Any]

THINK, THOUGHT = "<think>", "</think>"


def _mark(words: str) -> str:
    """A marker in DeepSeek's form: between fullwidth bars, with U+2581 instead of each space."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


_CALLS_BEGIN, _CALLS_END = _mark("tool calls begin"), _mark("tool calls end")
_CALL_BEGIN, _CALL_END = _mark("tool call begin"), _mark("tool call end")
_SEP = _mark("tool sep")


@dataclass(frozen=True)
class Family:
    """The form in which a family of models writes tool calls. ``opening`` precedes the calls,
    ``between`` separates them, and ``closing`` follows them. A call is ``head NAME middle ARGUMENTS
    tail``."""

    head: str
    middle: str
    tail: str
    between: str
    trigger: str
    """A prefix of ``opening + head``. If an answer has this text at a place where a call may begin,
    the rest of a call must follow."""
    opening: str = ""
    """Text before the first call."""
    closing: str = ""
    """Text after the last call."""
    first_only: bool = False
    """Whether calls may begin only at the beginning of the answer."""
    quoted: bool = True
    """Whether the name of the called function is written as a JSON string."""
    never: tuple[str, ...] = ()
    """Texts that free text and arguments may not contain, because parsers of this form search for
    them in the whole answer."""


HERMES = Family(
    head='<tool_call>\n{"name": ',
    middle=', "arguments": ',
    tail="}\n</tool_call>",
    between="\n",
    trigger="<tool_call>",
    never=("</tool_call>",),
)
"""The form of Hermes, Qwen and many others, and of the plain template."""
LLAMA = Family(
    head='{"name": ',
    middle=', "parameters": ',
    tail="}",
    between="; ",
    trigger="{",
    first_only=True,
)
"""Llama 3's form: the answer is a call if it begins with a brace."""
MISTRAL_LIST = Family(
    head='{"name": ',
    middle=', "arguments": ',
    tail="}",
    between=", ",
    trigger="[TOOL_CALLS]",
    opening="[TOOL_CALLS][",
    closing="]",
)
"""The form of Mistral's tokenizers before version 11."""
MISTRAL_SPACED_LIST = replace(MISTRAL_LIST, opening="[TOOL_CALLS] [")
"""``MISTRAL_LIST`` for SentencePiece tokenizers, which write a space after special tokens."""
MISTRAL = Family(
    head="[TOOL_CALLS]",
    middle="[ARGS]",
    tail="",
    between="",
    trigger="[TOOL_CALLS]",
    quoted=False,
    never=("[ARGS]",),
)
"""The form of Mistral's tokenizers since version 11."""
DEEPSEEK_FENCED = Family(
    head=_CALL_BEGIN + "function" + _SEP,
    middle="\n```json\n",
    tail="\n```" + _CALL_END,
    between="\n",
    trigger=_CALLS_BEGIN,
    opening=_CALLS_BEGIN,
    closing=_CALLS_END,
    quoted=False,
    never=(
        _CALL_BEGIN,
        _CALL_END,
        _CALLS_END,
        _SEP,
    ),
)
"""The form of DeepSeek V3 and R1."""
DEEPSEEK = replace(DEEPSEEK_FENCED, head=_CALL_BEGIN, middle=_SEP, tail=_CALL_END, between="")
"""The form of DeepSeek V3.1."""
HARMONY = Family(
    head="<|channel|>commentary to=functions.",
    middle=" <|constrain|>json<|message|>",
    tail="",
    between="",
    trigger="<|channel|>",
    quoted=False,
)
"""The form of gpt-oss: messages on channels."""


def family_of(chat_template: str) -> Family:
    """The family whose form of calls a chat template contains; ``HERMES`` if the template contains
    no other form."""
    if "<|channel|>" in chat_template and "<|message|>" in chat_template:
        return HARMONY
    if "[TOOL_CALLS]" in chat_template:
        if "[ARGS]" in chat_template:
            return MISTRAL
        return MISTRAL_SPACED_LIST if "[TOOL_CALLS] [" in chat_template else MISTRAL_LIST
    if _CALLS_BEGIN in chat_template:
        return DEEPSEEK_FENCED if "```json" in chat_template else DEEPSEEK
    if HERMES.trigger not in chat_template and '{"name": function name, "param' in chat_template:
        return LLAMA
    return HERMES


Thinking = Literal["none", "first", "inside"]
"""``none``: an answer has no thinking. ``first``: an answer may begin with thinking. ``inside``: an
answer continues thinking that the prompt has begun."""


def thinking_of(chat_template: str, prompt_end: str) -> Thinking:
    """Whether and where the answers of a model contain thinking. ``prompt_end``: the end of the
    prompt's text. The thinking may already begin there."""
    if family_of(chat_template) is HARMONY:
        return "first"
    if THOUGHT not in chat_template:
        return "none"
    return "inside" if prompt_end.rstrip("\n").endswith(THINK) else "first"


class Function(NamedTuple):
    """A function that can be called, and the schema of its arguments."""

    name: str
    parameters: Schema


@dataclass
class Rest:
    """The constraint on an answer's text outside thinking and calls."""

    controller: str = ""
    """The name of the built-in constraint. If it is empty, the text is free."""
    arg: str | dict[str, Any] | list[Any] | None = None
    """The argument of the built-in constraint."""


@dataclass
class Wanted:
    """The parts that an answer may have."""

    functions: Sequence[Function] = ()
    rest: Rest | None = field(default_factory=Rest)
    """The constraint on the text outside thinking and calls. If None, such text is not allowed."""
    parallel: bool = True
    """Whether several calls are allowed."""
    thinking: Thinking = "none"
    max_thinking_tokens: int | None = None


def structure_of(family: Family, wanted: Wanted) -> Structure:
    """The structure of an answer with the parts ``wanted``, in the form of a family."""
    return _Harmony(wanted).made() if family is HARMONY else _Building(family, wanted).made()


class _Building:
    """Builds a structure for any family except gpt-oss. The structure has five phases: the
    beginning, the answer after thinking, the part after a call, the end, and the empty line between
    thinking and a constrained text."""

    BEGIN, ANSWER, CALLED, END, SPACED = range(5)

    def __init__(self, family: Family, wanted: Wanted) -> None:
        self._family = family
        self._wanted = wanted
        self._tags: list[Tag] = []

    def made(self) -> Structure:
        wanted, family = self._wanted, self._family
        thinks = wanted.thinking != "none"
        constrained = wanted.rest is None or wanted.rest.controller != ""
        think = [self._think(self.SPACED if constrained else self.ANSWER)] if thinks else []
        answer = self._answer()
        begin = self._answer()
        if wanted.thinking == "first":
            begin.first = [*think, *begin.first]
        more = self._calls(family.between) if wanted.functions and wanted.parallel else []
        if family.closing and wanted.functions:
            more.append(self._tag(Tag(begin=family.closing, content="none", then=self.END)))
        called = Phase(first=more, may_end=not family.closing)
        # Some constraints do not allow an empty line at the beginning of the text. So the empty
        # line after thinking has its own tag.
        line = self._tag(Tag(begin="\n\n", content="none", then=self.ANSWER))
        phases = [begin, answer, called, Phase(may_end=True), Phase(first=[line])]
        inside = think[0] if wanted.thinking == "inside" else None
        return Structure(phases=phases, tags=self._tags, inside=inside)

    def _answer(self) -> Phase:
        wanted, family = self._wanted, self._family
        if wanted.rest is None:
            return Phase(first=self._calls(family.opening))
        if wanted.rest.controller:
            first = self._calls(family.opening, whole=True)
            rest = wanted.rest
            return Phase(controller=rest.controller, arg=rest.arg, first=first, may_end=True)
        calls = self._calls(family.opening)
        never = [*(family.never if wanted.functions else ()), *self._marks()]
        return Phase(
            text=True,
            tags=[] if family.first_only else calls,
            first=calls if family.first_only else [],
            excludes=never,
            may_end=True,
        )

    def _think(self, then: int) -> int:
        limit = self._wanted.max_thinking_tokens
        return self._tag(
            Tag(
                begin=f"{THINK}\n",
                trigger=len(THINK),
                end=THOUGHT,
                excludes=[THINK],
                kind="reasoning",
                max_tokens=limit,
                closing="\n",
                then=then,
            )
        )

    def _calls(self, before: str, whole: bool = False) -> list[int]:
        """Adds one tag for the calls of each function; returns the tags' indices. ``before``: the
        text before the call. A call begins with the prefix ``Family.trigger`` of this text. If
        ``whole`` is True, a call begins only with the whole text before the arguments. Answers with
        a constrained text need this, because such a text may contain the prefix."""
        family = self._family
        trigger = 0 if whole else len(family.trigger)
        if not whole and before == family.between:
            trigger = len(before) + (0 if family.opening else len(family.trigger))
        return [
            self._tag(
                Tag(
                    begin=before + family.head + self._name(function) + family.middle,
                    trigger=trigger,
                    content="json",
                    schema=function.parameters,
                    end=family.tail,
                    excludes=[*family.never, *self._marks()],
                    kind="call",
                    name=function.name,
                    then=self.CALLED,
                )
            )
            for function in self._wanted.functions
        ]

    def _marks(self) -> list[str]:
        """The markers of thinking; empty if the answer has no thinking. Free text and arguments
        must not contain them, because parsers search for them in the whole answer."""
        return [THINK, THOUGHT] if self._wanted.thinking != "none" else []

    def _name(self, function: Function) -> str:
        return json.dumps(function.name) if self._family.quoted else function.name

    def _tag(self, tag: Tag) -> int:
        self._tags.append(tag)
        return len(self._tags) - 1


class _Harmony:
    """Builds a structure for gpt-oss. The structure has four phases: the first message, a later
    message, the final text, and the end after a call."""

    FIRST, LATER, FINAL, CALLED = range(4)

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._tags: list[Tag] = []

    def made(self) -> Structure:
        wanted = self._wanted
        rest = wanted.rest or Rest()
        free = not rest.controller
        final = Phase(text=free, controller=rest.controller, arg=rest.arg, may_end=True)
        final.end = "<|return|>"
        phases = [
            Phase(first=[self._analysis(""), *self._others("")]),
            Phase(first=self._others("<|start|>assistant")),
            final,
            Phase(may_end=True, end="<|call|>"),
        ]
        return Structure(phases=phases, tags=self._tags)

    def _analysis(self, before: str) -> int:
        return self._tag(
            Tag(
                begin=f"{before}<|channel|>analysis<|message|>",
                end="<|end|>",
                kind="reasoning",
                max_tokens=self._wanted.max_thinking_tokens,
                then=self.LATER,
            )
        )

    def _others(self, before: str) -> list[int]:
        """Adds one tag for the beginning of the final text, and one for the calls of each function;
        returns the tags' indices. ``before``: the text before the message."""
        found = []
        if self._wanted.rest is not None:
            begin = f"{before}<|channel|>final<|message|>"
            found.append(self._tag(Tag(begin=begin, content="none", then=self.FINAL)))
        for function in self._wanted.functions:
            tag = Tag(
                begin=before + HARMONY.head + function.name + HARMONY.middle,
                content="json",
                schema=function.parameters,
                kind="call",
                name=function.name,
                then=self.CALLED,
            )
            found.append(self._tag(tag))
        return found

    def _tag(self, tag: Tag) -> int:
        self._tags.append(tag)
        return len(self._tags) - 1
