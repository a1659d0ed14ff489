"""Texts that the worker generates for a script (``scripts.controller``), under the worker's
built-in constraints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from ....protocol.errors import Code, ControllerError
from ..biases import Bias
from ..host import Host
from ..interface import Action, Answer
from ..scripts.generation import Generate
from .generated_text import GeneratedBytes
from .operations import Operation
from .transcript import Question

KINDS = ("regex", "choice", "json_schema", "lark", "yacc", "substring")
"""The constraints of ``gen``. A text has at most one of them."""
TEXTS = ("regex", "lark", "yacc", "substring")
"""The constraints whose arguments are texts."""


class Delegated(Operation):
    """A text that the worker generates. The answer is the text, as bytes, or as ``GeneratedBytes``
    if the script asks for log-probabilities. If the constraint is refused, the answer is the
    reason, as str."""

    def __init__(self, question: Question, host: Host, text: Generate, bias: Bias | None) -> None:
        super().__init__(question)
        self._host = host
        generate = msgspec.json.encode(text)
        self._answer = Answer(Action.GENERATE, bias=bias, generate=generate)
        self._asks = text.logprobs

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer | None:
        """Requests the text from the worker."""
        return self._answer

    def post_process(self, tokens: Sequence[int]) -> None:
        """Finishes the operation. ``tokens`` are the tokens of the whole text."""
        host = self._host
        text = b"".join(map(host.vocabulary.token, tokens))
        scored = GeneratedBytes(text, tuple(tokens), tuple(host.logprobs))
        self._finish(host.refusal or (scored if self._asks else text))


def text_of_options(options: dict[str, Any], place: str = "") -> Generate:
    """The text that arguments of ``gen`` describe; ``options`` has the arguments that are not None.
    Raises ControllerError for a wrong argument. ``place``: the position of the call in the script,
    for errors."""
    given = dict(options)
    stops, most = given.pop("stop_at", None), given.pop("max_tokens", None)
    end, logprobs = given.pop("substring_end", None), given.pop("logprobs", False)
    stops = [stops] if isinstance(stops, str) else list(stops or ())
    if any(not isinstance(stop, str) or not stop for stop in stops):
        raise _wrong(f"gen(stop_at={stops!r}); expected text that is not empty")
    if most is not None and (not isinstance(most, int) or most < 1):
        raise _wrong(f"gen(max_tokens={most!r}); expected a number, at least 1")
    if not isinstance(logprobs, bool):
        raise _wrong(f"gen(logprobs={logprobs!r}); expected True or False")
    unknown = [name for name in given if name not in KINDS]
    if unknown:
        others = "allow", "stop_at", "max_tokens", "bias", "logprobs", "substring_end"
        known = ", ".join((*KINDS, *others))
        raise _wrong(f"gen({unknown[0]}) is unknown; expected {known}")
    if len(given) > 1:
        raise _wrong(f"gen({', '.join(given)}): only one of these is allowed at a time")
    if end is not None and "substring" not in given:
        raise _wrong("gen(substring_end=…) without substring; expected both")
    for kind, value in given.items():
        if kind in TEXTS and not isinstance(value, str):
            raise _wrong(f"gen({kind}={value!r}); expected text")
        if kind == "substring" and end is not None:
            kind, value = "combination", {"sequence": [{"substring": value}, end]}
        elif kind == "substring":
            value = {"text": value}
        argument = value if isinstance(value, str) else json.dumps(value)
        return Generate(kind, argument, stops, most, place, logprobs)  # type: ignore[arg-type]
    return Generate(None, "", stops, most, place, logprobs)


def _wrong(message: str) -> ControllerError:
    return ControllerError(Code.CONTROLLER_FAILED, message)
