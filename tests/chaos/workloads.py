"""Requests of every kind, at least one hundred in all. Their outcomes do not depend on races.

The outcome must not depend on the order of appends to a variable, on the number of attempts of a
compare-and-set, or on the number of times that a suspended sequence is woken.

The last bits of logits depend on the shape of the batch, and could decide between two equally
likely tokens. The requests avoid such places (``close_calls.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from ..workers.controller.wasm.aici_guests import compile_rust, puppet
from ..workers.controller.wasm.guests import SDK, compile_guest
from .scripts import AICI, INPUTS, scripts

VARIANTS: dict[str, int] = {}
"""For requests whose tokens would depend on the last bits of logits: a number that changes the
prompt and the seed."""

Door = Literal["bus", "score", "completions", "chat"]
GUESTS = Path(__file__).parent / "guests"
PREFACE = "preface"
"""The name of the buffer that each client has."""
PREFACE_TEXT = "# The module of the day.\n\n"

PROMPTS = [
    "def add(a, b):",
    "import os\nimport ",
    "class Stack:\n    def ",
    '{"name": "',
    "for line in ",
    "    raise ValueError(",
    '    """Return the ',
    "[1, 2, 3, ",
    "if __name__ == ",
    "The date is ",
]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SUMS = """
start: line+
line: sum " = " NUMBER "\\n"
sum: NUMBER (" + " NUMBER)+
NUMBER: /[1-9][0-9]{0,2}/
"""
COMBINATION = {
    "sequence": [
        "the ",
        {"repetition": {"choice": ["cat ", "dog ", "bird "]}, "least": 2, "most": 6},
        {"alternation": [{"regex": "[0-9]{4}"}, {"stop_at": "!", "of": {"regex": "[a-z!]{5,30}"}}]},
    ]
}


@dataclass
class Workload:
    """One request, and the interface through which it is sent."""

    name: str
    """The kind of the request and a number."""
    door: Door = "bus"
    options: dict[str, Any] = field(default_factory=dict)
    """The options of ``generate``, or further fields of the body over HTTP."""
    prompt: str = ""
    inputs: tuple[str, ...] = ()
    """The inputs that the client sends to the program."""

    @property
    def kind(self) -> str:
        """The kind in the name, for example ``plain``."""
        return self.name.partition(" ")[0]


def modules() -> dict[str, bytes]:
    """The Wasm modules and the scripts that the requests name, by their tags."""
    found = {
        path.stem: compile_guest(path)
        for path in [*(SDK / "examples").glob("*.c"), *GUESTS.glob("*.c")]
        if path.stem != "choice"
    }
    found["choice_in_c"] = compile_guest(SDK / "examples/choice.c")
    found["puppet"] = puppet()
    try:
        found["rust"] = compile_rust("choice")
    except pytest.skip.Exception:
        # Without Rust for WASI, this module is left out. The module ``puppet`` has the same
        # interface.
        found["rust"] = b""
    return {tag: wasm for tag, wasm in found.items() if wasm} | scripts()


def workloads(tags: set[str]) -> list[Workload]:
    """All requests. Those of the module ``rust`` are left out if its tag is not in ``tags``."""
    made = [*_plain(), *_constrained(), *_wasm(), *_aici(tags), *_python(), *_http(), *_scripts()]
    assert len(made) >= 100
    for i, one in enumerate(made):
        variant = VARIANTS.get(one.name, 0)
        one.prompt = PROMPTS[(i + variant) % len(PROMPTS)]
        if one.door != "score":
            one.options["seed"] = 1000 * i + variant
    return made


def _some(kind: str, count: int, **options: Any) -> Iterator[Workload]:
    """Requests that differ in prompt and seed."""
    for i in range(count):
        given = {"max_tokens": 120, "ignore_eos": True, **options}
        yield Workload(f"{kind} {i}", "bus", given)


def _plain() -> Iterator[Workload]:
    yield from _some("greedy", 6, max_tokens=200, text=False, top_logprobs=3)
    yield from _some("greedy-text", 4, max_tokens=200)
    yield from _some("sampled", 6, max_tokens=200, temperature=1.0)
    yield from _some("nucleus", 3, temperature=0.8, top_p=0.9, repetition_penalty=1.2)
    yield from _some("penalised", 3, temperature=1.1, top_k=20, min_p=0.02, presence_penalty=0.5)
    yield from _some("biased", 2, logit_bias={11: 2.0, 12: -100.0}, frequency_penalty=0.4)
    yield from _some("several", 5, temperature=1.0, n=3)
    yield from _some("stop", 4, temperature=0.9, stop=["return", ".\n", "):"])
    yield from _some("end", 3, temperature=1.0, ignore_eos=False, max_tokens=250)
    yield from _some("buffer", 2, buffers=[PREFACE], max_tokens=100)
    for i in range(3):
        scored = "return a + b\n\n\ndef sub(a, b):\n    return a - b\n" * (i + 1)
        options = {"scored": scored, "top_logprobs": 2}
        yield Workload(f"score {i}", "score", options)


def _constrained() -> Iterator[Workload]:
    sampled = {"temperature": 0.9, "top_k": 20, "ignore_eos": False, "max_tokens": 150}
    words = "([A-Z][a-z]{2,9} ){12,20}[0-9]{4}-[0-9]{2}-[0-9]{2}"
    yield from _some("regex", 6, controller="regex", controller_arg=words, **sampled)
    yield from _some("json_schema", 6, controller="json_schema", controller_arg=PERSON, **sampled)
    yield from _some("yacc", 4, controller="yacc", controller_arg="json", **sampled)
    yield from _some("arithmetic", 2, controller="yacc", controller_arg="arithmetic", **sampled)
    yield from _some("lark", 4, controller="lark", controller_arg=SUMS, **sampled)
    lines = ["a long line that is one of the choices", "a longer line that is one of them", "no"]
    yield from _some("choice", 3, controller="choice", controller_arg=lines, **sampled)
    yield from _some("several-regex", 2, n=3, controller="regex", controller_arg=words, **sampled)
    text = "Nothing that was promised is lost, and nothing of it is sent twice. " * 4
    yield from _some("substring", 2, controller="substring", controller_arg=text, **sampled)
    combined = {"controller": "combination", "controller_arg": COMBINATION}
    yield from _some("combination", 3, **combined, **sampled)


def _wasm() -> Iterator[Workload]:
    drawn = {"temperature": 1.0, "top_k": 20}
    yield from _some("upper4", 4, controller="upper4", temperature=0.9, top_k=20)
    for i, best in enumerate(("4 30 longest", "5 24 e", "3 40 shortest")):
        name = f"best_of-{i}"
        yield from _some(name, 1, controller="best_of", controller_arg=best, **drawn)
    yield from _some("backtrack", 3, controller="backtrack", controller_arg="e=E", **drawn)
    yield from _some("talk", 3, controller="talk", controller_arg="# it said:", **drawn)
    choices = ["several words that begin alike", "several words that do not", "none"]
    yield from _some("choice_in_c", 2, controller="choice_in_c", controller_arg=choices)
    yield from _some("barrier", 4, controller="barrier", controller_arg="4 3 16", **drawn)
    yield from _some("tree", 3, controller="tree", controller_arg="3 10")


def _aici(tags: set[str]) -> Iterator[Workload]:
    fork = 'pre = {"attention_masks":[[],[]],"suspend":false,"ff_tokens":[]}'
    suspend = 'pre = {"attention_masks":[[]],"suspend":true,"ff_tokens":[]}'
    write = {"WriteVar": {"name": "word", "value": "7468", "op": "Append", "when_version_is": None}}
    rounds = [
        line for i in range(30) for line in (f"post log round {i}", "post arg", "pre log pre")
    ]
    writes = ["post log writes", f"post storage {json.dumps(write)}", 'post = {"stop":false}'] * 6
    splice = ["post log drops", 'mid = {"Splice":{"backtrack":3,"ff_tokens":[300,301,302]}}']
    scripts = {
        "logs": rounds,
        "writes": ["pre = {}".replace("{}", '{"attention_masks":[[]]}'), *writes],
        "splices": [*["post log samples", 'post = {"stop":false}'] * 4, *splice],
        "forks": [*["post log before", 'post = {"stop":false}'] * 5, fork, "mid seq"],
        "suspends": [
            fork,
            *["post log both", 'post = {"stop":false}'] * 3,
            f"post only 1 storage {json.dumps(write)}",
            'post = {"stop":false}',
            suspend.replace("pre =", "pre only 0 ="),
            "pre log woken",
        ],
    }
    for name, lines in scripts.items():
        puppet_arg = {"controller": "puppet", "controller_arg": "\n".join(lines)}
        drawn = {"max_tokens": 100, "temperature": 0.9, "top_k": 20}
        yield from _some(f"puppet-{name}", 1, **puppet_arg, **drawn)
    if "rust" in tags:
        # The request has one sequence, because several sequences would vote in order of arrival.
        texts = ["yes, of course it is", "yes, but never in the morning", "no"]
        arg: dict[str, Any] = {
            "controller": "rust",
            "controller_arg": {"choices": texts, "forks": 1},
        }
        yield from _some("rust", 2, **arg, temperature=1.0, top_k=20)


def _python() -> Iterator[Workload]:
    yield from _some("alternating", 3, controller="alternating", controller_arg="60")
    yield from _some("pair", 2, controller="pair", temperature=0.9, top_k=20)
    yield from _some("survey", 3, controller="survey", temperature=0.9, top_k=20, max_tokens=200)
    yield from _some("meeting", 2, controller="meeting", temperature=0.9, top_k=20, max_tokens=150)


def _http() -> Iterator[Workload]:
    """Requests through the OpenAI interface. With log-probabilities, each token has its own
    chunk."""

    def body(**fields: Any) -> dict[str, Any]:
        common = {"model": "embedded", "stream": True, "max_tokens": 120, "temperature": 0.9}
        return {**common, "top_k": 20, **fields}

    words = {"regex": "([A-Z][a-z]{2,9} ){12,20}[0-9]{4}"}
    schema = {"name": "person", "schema": PERSON, "strict": True}
    formatted = {"response_format": {"type": "json_schema", "json_schema": schema}}
    bodies: list[tuple[str, int, Door, dict[str, Any]]] = [
        ("text", 4, "completions", {"ignore_eos": True, "stream_options": {"include_usage": True}}),
        ("logprobs", 3, "completions", {"ignore_eos": True, "logprobs": 2}),
        ("several", 1, "completions", {"ignore_eos": True, "n": 3}),
        ("regex", 2, "completions", {"structured_outputs": words}),
        ("json_schema", 2, "chat", formatted),
        ("chat", 2, "chat", {}),
    ]  # fmt: skip
    for name, count, door, fields in bodies:
        for i in range(count):
            yield Workload(f"sse-{name} {i}", door, body(**fields))


def _scripts() -> Iterator[Workload]:
    drawn = {"temperature": 0.9, "top_k": 20}
    for tag in ("tool-calls", "forks"):
        yield from _some(tag, 3, controller=tag, **drawn)
    for number in range(2):
        context = {"controller": "contexts", "controller_arg": f"context {number}"}
        yield from _some(f"contexts-{number}", 1, **context, **drawn)
    texts = {"controller_arg": json.dumps({"n": 3, "tokens": 12}), "max_tokens": 300}
    yield from _some("likeliest", 3, controller="likeliest", **texts, **drawn)
    yield from _some("pyctrl", 2, controller="pyctrl-latest", controller_arg=AICI, **drawn)
    for workload in _some("dialogue", 3, controller="dialogue", **drawn):
        workload.inputs = INPUTS
        yield workload
