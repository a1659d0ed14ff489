"""Parsers of other projects, which read a model's answers for comparison.

They are the parsers that SGLang uses for each family of models; openai-harmony, with the vocabulary
of gpt-oss; and transformers' parser of responses. transformers' parser takes a template that
describes a family's answers. The template of Hermes is from transformers.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from llm_router_utils.sglang.srt.entrypoints.openai.protocol import Tool
from llm_router_utils.sglang.srt.function_call.base_format_detector import BaseFormatDetector
from llm_router_utils.sglang.srt.function_call.deepseekv3_detector import DeepSeekV3Detector
from llm_router_utils.sglang.srt.function_call.deepseekv31_detector import DeepSeekV31Detector
from llm_router_utils.sglang.srt.function_call.hermes_detector import HermesDetector
from llm_router_utils.sglang.srt.function_call.llama32_detector import Llama32Detector
from llm_router_utils.sglang.srt.function_call.mistral_detector import MistralDetector
from llm_router_utils.sglang.srt.function_call.qwen25_detector import Qwen25Detector
from llm_router_utils.sglang.srt.parser.reasoning_parser import ReasoningParser
from openai_harmony import HarmonyEncoding, HarmonyEncodingName, Role, load_harmony_encoding
from tokenbus.clients.gateway.answer_forms import DEEPSEEK, Function, Thinking
from transformers.utils.chat_parsing import parse_response

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
    # The template of transformers for Qwen 2 and 3 (transformers.cli.serving.utils).
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
SGLANG: dict[str, list[type[BaseFormatDetector]]] = {
    "hermes": [HermesDetector, Qwen25Detector],
    "llama": [Llama32Detector],
    "mistral, list": [MistralDetector],
    "mistral, spaced list": [MistralDetector],
    "mistral": [MistralDetector],
    "deepseek, fenced": [DeepSeekV3Detector],
    "deepseek": [DeepSeekV31Detector],
}
"""SGLang's parsers of the calls in a family's answers."""


class Read(NamedTuple):
    """An answer as a parser has read it. White space around texts is not compared."""

    reasoning: str
    text: str
    calls: list[tuple[str, Any]]


class Answer(NamedTuple):
    """An answer for the parsers."""

    family: str
    pieces: Sequence[tuple[str, bool]]
    """The texts and special tokens of the answer; True: a special token."""
    thinking: Thinking

    @property
    def text(self) -> str:
        """The text of the answer, with the names of its special tokens."""
        return "".join(piece for piece, _ in self.pieces)


def references(answer: Answer, functions: Sequence[Function]) -> Iterator[tuple[str, Read]]:
    """The name of each parser for the answer's family, and the answer as this parser reads it."""
    if answer.family == "harmony":
        yield "openai-harmony", _harmony(answer)
    for parser in SGLANG.get(answer.family, []):
        yield f"SGLang's {parser.__name__}", _sglang(answer, parser(), functions)
    if answer.family in TEMPLATES:
        yield "transformers", _transformers(answer)


def _sglang(answer: Answer, parser: BaseFormatDetector, functions: Sequence[Function]) -> Read:
    tools = [
        Tool.model_validate(
            {"type": "function", "function": {"name": each.name, "parameters": each.parameters}}
        )
        for each in functions
    ]
    reasoning, text = "", answer.text
    if answer.thinking != "none":
        kind = "deepseek-v3" if answer.family.startswith("deepseek") else "qwen3"
        thinking = ReasoningParser(kind, force_reasoning=answer.thinking == "inside")
        reasoning, text = thinking.parse_non_stream(text)
    if answer.family == "mistral, list":
        # SGLang's tokenizer of these models writes a space after the special token.
        text = text.replace("[TOOL_CALLS][", "[TOOL_CALLS] [")
    read = parser.detect_and_parse(text, tools)
    return Read(
        (reasoning or "").strip(),
        read.normal_text.strip(),
        [(call.name, json.loads(call.parameters)) for call in read.calls],
    )


def _transformers(answer: Answer) -> Read:
    prefix = "assistant:<think>\n" if answer.thinking == "inside" else "assistant:"
    message = parse_response(answer.text, TEMPLATES[answer.family], prefix=prefix)
    calls = message.get("tool_calls") or []
    functions = [call.get("function", call) for call in calls]
    return Read(
        message.get("reasoning_content", "").strip(),
        message.get("content", "").strip(),
        [(function["name"], function["arguments"]) for function in functions],
    )


@cache
def harmony_encoding() -> HarmonyEncoding:
    """The tokens of gpt-oss. The package bpe-openai has its vocabulary file, whose hash
    openai-harmony checks."""
    package = find_spec("bpe_openai")
    assert package is not None
    assert package.origin is not None
    with TemporaryDirectory() as folder:
        packed = (
            Path(package.origin).with_name("data").joinpath("o200k_base.tiktoken.gz").read_bytes()
        )
        Path(folder, "o200k_base.tiktoken").write_bytes(gzip.decompress(packed))
        os.environ["TIKTOKEN_ENCODINGS_BASE"] = folder
        try:
            return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
        finally:
            del os.environ["TIKTOKEN_ENCODINGS_BASE"]


def _harmony(answer: Answer) -> Read:
    encoding = harmony_encoding()
    tokens: list[int] = []
    for piece, special in answer.pieces:
        tokens += encoding.encode(
            piece, allowed_special="all" if special else set(), disallowed_special=()
        )
    reasoning, text, calls = "", "", []
    for message in encoding.parse_messages_from_completion_tokens(tokens, Role.ASSISTANT):
        content = "".join(part["text"] for part in message.to_dict()["content"])
        if message.recipient is not None:
            assert message.channel == "commentary"
            assert message.content_type == "<|constrain|>json"
            calls.append((message.recipient.removeprefix("functions."), json.loads(content)))
        elif message.channel == "analysis":
            reasoning += content
        else:
            assert message.channel == "final"
            text += content
    return Read(reasoning.strip(), text.strip(), calls)
