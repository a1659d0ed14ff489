"""Random answers under the masks of a structure, and how parsers that are not ours read them.

The references are transformers' parser of responses, with the templates that describe a family's
answers to it, and Python's json for Llama's calls.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from tokenbus.clients.gateway.answer_forms import (
    DEEPSEEK,
    DEEPSEEK_FENCED,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_LIST,
    Family,
    Function,
    Wanted,
    structure_of,
)
from tokenbus.protocol.structure import Structure
from tokenbus.workers.controller.interface import Action, Constraint, Program
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary
from transformers.utils.chat_parsing import parse_response

from ..played import BYTES, EOS
from .llguidance_streams import host

PLACE = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 30}, "days": {"enum": [7, 12]}},
    "required": ["place"],
    "additionalProperties": False,
}
FUNCTIONS = [Function("weather", PLACE), Function("wet", {**PLACE, "required": []})]
FAMILIES: dict[str, Family] = {
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral, list": MISTRAL_LIST,
    "mistral": MISTRAL,
    "deepseek, fenced": DEEPSEEK_FENCED,
    "deepseek": DEEPSEEK,
    "harmony": HARMONY,
}
SPECIAL_NAMES = {
    "mistral, list": ["[TOOL_CALLS]"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
    "harmony": [
        f"<|{name}|>"
        for name in ("start", "end", "message", "channel", "constrain", "return", "call")
    ],
}
"""The markers that are special tokens of a family's vocabulary; all others are text."""

CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_SEP, _BEGIN, _END = DEEPSEEK.middle, DEEPSEEK.head, DEEPSEEK.tail
_OPEN, _CLOSE = DEEPSEEK.opening, DEEPSEEK.closing
_THINK = {"open": "<think>", "close": "</think>", "content": "text"}


def _template(calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    content = fields.pop("content", {"content": "text"})
    thinking = fields.pop("reasoning_content", _THINK)
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": "assistant:",
        "fields": {
            "reasoning_content": thinking,
            "tool_calls": {"content": "json", **calls},
            "content": content,
        },
    }


TEMPLATES: dict[str, dict[str, Any]] = {
    # As transformers has it for Qwen 2 and 3 (transformers.cli.serving.utils).
    "hermes": _template(
        {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        }
    ),
    "mistral, list": _template({"open": "[TOOL_CALLS]"}),
    "mistral": _template(
        {
            "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[]+)\[ARGS\]",
            "close_pattern": r"(?=\[TOOL_CALLS\])|$",
            "repeats": True,
            "transform": CALL,
        }
    ),
    "deepseek, fenced": _template(
        {
            "open_pattern": rf"\s*(?:{_OPEN})?{_BEGIN}function{_SEP}(?P<name>[^\n]+)\n```json\n",
            "close_pattern": rf"\n```{_END}(?:{_CLOSE})?",
            "repeats": True,
            "transform": CALL,
        }
    ),
    "deepseek": _template(
        {
            "open_pattern": rf"\s*(?:{_OPEN})?{_BEGIN}(?P<name>\w+){_SEP}",
            "close_pattern": rf"{_END}(?:{_CLOSE})?",
            "repeats": True,
            "transform": CALL,
        }
    ),
    "harmony": _template(
        {
            "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>commentary to=functions\."
            r"(?P<name>\w+) <\|constrain\|>json<\|message\|>",
            "close_pattern": r"<\|call\|>|$",
            "repeats": True,
            "transform": CALL,
        },
        reasoning_content={
            "open": "<|channel|>analysis<|message|>",
            "close": "<|end|>",
            "content": "text",
        },
        content={
            "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>final<\|message\|>",
            "close_pattern": r"<\|return\|>|$",
            "content": "text",
        },
    ),
}


class Read(NamedTuple):
    """An answer as somebody has read it; white space around texts is of no account."""

    reasoning: str
    text: str
    calls: list[tuple[str, Any]]


def reference(family: str, answer: str, begun: bool) -> Read:
    """How a parser that is not ours reads an answer; ``begun``: the prompt ends in thinking."""
    if family == "llama":
        return _llama(answer)
    prefix = "assistant:<think>\n" if begun else "assistant:"
    message = parse_response(answer, TEMPLATES[family], prefix=prefix)
    calls = message.get("tool_calls") or []
    functions = [call.get("function", call) for call in calls]
    return Read(
        message.get("reasoning_content", "").strip(),
        message.get("content", "").strip(),
        [(function["name"], function["arguments"]) for function in functions],
    )


def _llama(answer: str) -> Read:
    calls: list[tuple[str, Any]] = []
    at, decoder = 0, json.JSONDecoder()
    if not answer.startswith("{"):
        return Read("", answer.strip(), [])
    while at < len(answer):
        at += 2 * answer.startswith("; ", at)
        call, at = decoder.raw_decode(answer, at)
        calls.append((call["name"], call["parameters"]))
    return Read("", "", calls)


def vocabulary_for(family: str, structure: Structure) -> TokenizerVocabulary:
    """Bytes, markers and pieces of them, alone and with what may come before and after them."""
    names = SPECIAL_NAMES.get(family, [])
    tokens = [*BYTES]
    for tag in structure.tags:
        for text in (tag.begin[: tag.trigger or None], tag.end):
            if text and not any(name in text for name in names):
                pieces = [text, text[:-1], text[-3:], text[1:], text[:3], text[3:7]]
                pieces += ["x" + text, text + "\n", text + "\n{", text + " y", text[:-1] + "!"]
                tokens += [piece.encode() for piece in pieces if piece]
    tokens += [b'{"', b'": "', b'"}', b'"}}', b"place", b"hello", b" ", b"days", b"we", b"\n\n"]
    tokens = list(dict.fromkeys(tokens))
    special = {name: len(tokens) + i for i, name in enumerate(names)}
    tokens += [b""] * len(names)
    return TokenizerVocabulary.from_tokens(tokens, [EOS], f"{family} {len(tokens)}", special)


def wants(family: str) -> Iterator[Wanted]:
    """Kinds of answers: with thinking, with calls, with both."""
    yield Wanted(FUNCTIONS)
    yield Wanted(FUNCTIONS, None)
    if family not in ("llama",):
        yield Wanted(FUNCTIONS, thinking="first", max_thinking_tokens=12)
        yield Wanted(FUNCTIONS, None, thinking="first", max_thinking_tokens=8)
    if family not in ("llama", "harmony"):
        yield Wanted(FUNCTIONS, parallel=False, thinking="inside", max_thinking_tokens=6)


class Walk:
    """One random answer under the masks."""

    def __init__(
        self, program: Program, family: str, wanted: Wanted, seed: int, max_tokens: int = 400
    ) -> None:
        self.structure = structure_of(FAMILIES[family], wanted)
        self.vocabulary = vocabulary_for(family, self.structure)
        self.names = {number: name for name, number in self.vocabulary.special.items()}
        arg = msgspec.json.encode(self.structure)
        made = program.start(host(arg, self.vocabulary, 0, max_tokens))
        assert isinstance(made, Constraint)
        self.controller = made
        self.tokens: list[int] = []
        self._rng = random.Random(seed)
        self._mask = memoryview(bytearray(4 * -(-self.vocabulary.size // 32)))

    @property
    def text(self) -> str:
        """The answer, with the names of its special tokens."""
        data = (self.names.get(t, "").encode() or self.vocabulary.token(t) for t in self.tokens)
        return b"".join(data).decode("utf-8", "replace")

    def run(self) -> str:
        """Goes on to the end; how the answer ended."""
        while self.step():
            pass
        return self.controller.text_end()

    def step(self) -> bool:
        """One round; whether there is another."""
        answer = self.controller.mid_process((0,), self._mask)
        if answer.action is Action.STOP:
            return False
        tokens = list(answer.tokens) if answer.action is Action.SPLICE else [self._chosen()]
        if tokens[-1] == EOS:
            self.controller.post_process(tokens, 0)
            return False
        self.tokens += tokens
        self.controller.post_process(tokens, 0)
        return True

    def _chosen(self) -> int:
        """A token of the mask: mostly long or special ones, so that parts begin and end; never one
        beyond ASCII, which might leave a character unfinished."""
        bits = int.from_bytes(self._mask, "little")
        allowed = [t for t in range(self.vocabulary.size) if bits >> t & 1]
        plain = [t for t in allowed if not 129 <= t <= 256]
        long = [t for t in plain if t > 256]
        if long and self._rng.random() < 0.85:
            return self._rng.choice(long)
        return self._rng.choice([t for t in plain if t >= 33 or t == EOS] or plain or allowed)
