"""Tool calls in generated text: the form that a model writes, its grammar, and its parts as they
arrive.

A model writes a call in the form that its chat template teaches. Under ``auto`` it writes text,
and from the moment that a call begins a grammar holds it to that form and to the schema of the
function's arguments. Under ``required``, and where one function is named, it writes calls only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Schema = dict[str, Any]

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""That of ``json.dumps``, so that a model cannot write endless white space."""


@dataclass(frozen=True)
class CallForm:
    """How calls are written: ``opening "NAME" middle ARGUMENTS closing``."""

    trigger: str
    """What begins a call; a beginning of ``opening``."""
    opening: str
    middle: str
    closing: str
    between: str
    """Between two calls."""
    first_only: bool
    """A call begins at the start of the answer, or there is none."""


HERMES = CallForm(
    trigger="<tool_call>",
    opening='<tool_call>\n{"name": ',
    middle=', "arguments": ',
    closing="}\n</tool_call>",
    between="\n",
    first_only=False,
)
"""Of Hermes, Qwen and many others, and of the plain template."""
LLAMA = CallForm(
    trigger="{",
    opening='{"name": ',
    middle=', "parameters": ',
    closing="}",
    between="; ",
    first_only=True,
)
"""Of Llama 3: the answer is a call if it begins with a brace."""


def form_of(chat_template: str) -> CallForm:
    """The form that a template teaches; Hermes's if it is not clear."""
    if HERMES.trigger not in chat_template and '{"name": function name, "param' in chat_template:
        return LLAMA
    return HERMES


class Function(NamedTuple):
    """A function that can be called, and the schema of its arguments."""

    name: str
    parameters: Schema


def tool_grammar(
    form: CallForm,
    functions: Sequence[Function],
    *,
    text: bool,
    parallel: bool,
    answer: Schema | None = None,
) -> str:
    """A grammar, for the constraint ``lark``, of answers that call ``functions``.

    ``text``: an answer without a call is allowed too; it is any text, or a value of the schema
    ``answer``. ``parallel``: several calls are allowed.
    """
    rules = [
        f"call_{i}: {_quoted(json.dumps(name) + form.middle)} %json {_json(schema)}"
        for i, (name, schema) in enumerate(functions)
    ]
    rest = _quoted(form.opening[len(form.trigger) :])
    any_call = " | ".join(f"call_{i}" for i in range(len(functions)))
    rules += [
        f"body: {rest} ({any_call}) {_quoted(form.closing)}",
        f"more: {_quoted(form.between + form.trigger)} body",
        f"calls: body {'more*' if parallel else ''}",
    ]
    trigger = _quoted(form.trigger)
    if not text:
        rules.append(f"start: {trigger} calls")
    elif answer is not None:
        rules += [f"start: answer | {trigger} calls", f"answer: %json {_json(answer)}"]
    elif form.first_only:
        rules += [f"start: TEXT | {trigger} calls", f"TEXT: /([^{form.trigger}](.|\\n)*)?/"]
    else:
        # The shortest text that ends with the trigger is followed by a call.
        rules += [
            "start: TEXT | begun calls",
            f"begun[lazy]: TEXT {trigger}",
            "TEXT: /(.|\\n)*/",
        ]
    return "\n".join(rules) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text)


def _json(schema: Schema) -> str:
    return json.dumps({**schema, "x-guidance": _SPACING})


class Text(NamedTuple):
    """A piece of text outside calls."""

    text: str


class CallBegin(NamedTuple):
    """A call of the function ``name`` begins; its arguments follow."""

    number: int
    name: str


class Arguments(NamedTuple):
    """A piece of the arguments of call ``number``, as JSON text."""

    number: int
    text: str


Part = Text | CallBegin | Arguments


class CallReader:
    """Splits an answer that was generated under ``tool_grammar`` into text and calls."""

    def __init__(self, form: CallForm) -> None:
        self._form = form
        self._kept = ""
        """Text that has arrived and whose meaning is not certain yet."""
        self._number = -1
        self._state = "text"
        self._spoke = False
        """There was text other than white space; white space alone before a call is no text."""
        self._plain = False
        """The rest is text, as no call began where one could."""
        self._value = _ValueEnd()

    @property
    def called(self) -> bool:
        """Whether a call has begun."""
        return self._number >= 0

    def feed(self, text: str) -> list[Part]:
        """The parts that ``text`` completes."""
        self._kept += text
        parts: list[Part] = []
        while self._advance(parts):
            pass
        return parts

    def end(self) -> list[Part]:
        """What is left where the answer ends: text that could have been the beginning of a call."""
        kept, self._kept = self._kept, ""
        return [Text(kept)] if kept and self._state == "text" and not self.called else []

    def _advance(self, parts: list[Part]) -> bool:
        """One transition; whether there may be another one."""
        if not self._kept:
            return False
        match self._state:
            case "text":
                return self._text(parts)
            case "head":
                return self._head(parts)
            case "arguments":
                return self._arguments(parts)
            case _:
                return self._closing()

    def _text(self, parts: list[Part]) -> bool:
        if self.called or self._form.first_only:
            return self._first(parts)
        trigger, kept = self._form.trigger, self._kept
        place = kept.find(trigger)
        cut = place if place >= 0 else len(kept) - _overlap(kept, trigger)
        if not self._spoke and kept[:cut].isspace() and place < 0:
            return False
        if cut and (self._spoke or not kept[:cut].isspace()):
            parts.append(Text(kept[:cut]))
            self._spoke = True
        self._kept = kept[cut:]
        if place >= 0:
            self._state = "head"
        return place >= 0

    def _first(self, parts: list[Part]) -> bool:
        """Where a call can only begin right here."""
        opening, kept = self._form.opening, self._kept
        if not self._plain:
            if len(kept) < len(opening) and opening.startswith(kept):
                return False
            if kept.startswith(opening):
                self._state = "head"
                return True
            self._plain = True
        parts.append(Text(kept))
        self._kept = ""
        return False

    def _head(self, parts: list[Part]) -> bool:
        opening, middle = self._form.opening, self._form.middle
        end = self._kept.find(middle, len(opening))
        if end < 0:
            return False
        name = json.loads(self._kept[len(opening) : end])
        self._number += 1
        parts.append(CallBegin(self._number, name))
        self._kept = self._kept[end + len(middle) :]
        self._state, self._value = "arguments", _ValueEnd()
        return True

    def _arguments(self, parts: list[Part]) -> bool:
        end = self._value.find(self._kept)
        parts.append(Arguments(self._number, self._kept[:end]))
        self._kept = self._kept[end:]
        if self._value.ended:
            self._state = "closing"
        return self._value.ended

    def _closing(self) -> bool:
        whole = self._form.closing + self._form.between
        if not self._kept.startswith(whole):
            return False
        self._kept = self._kept[len(whole) :]
        self._state = "text"
        return True


class _ValueEnd:
    """Finds where a JSON object ends, over several pieces of its text."""

    def __init__(self) -> None:
        self.ended = False
        self._depth = 0
        self._in_string = self._escaped = False

    def find(self, text: str) -> int:
        """The length of the part of ``text`` that belongs to the object."""
        for at, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = letter == "\\"
                self._in_string = letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.ended = True
                    return at + 1
        return len(text)


def _overlap(text: str, trigger: str) -> int:
    """The length of the longest end of ``text`` that is a beginning of ``trigger``."""
    for length in range(min(len(text), len(trigger) - 1), 0, -1):
        if trigger.startswith(text[-length:]):
            return length
    return 0
