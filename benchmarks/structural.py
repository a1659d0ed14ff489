"""Measures the constraint ``structural``, under which an answer has several parts.

The answers have the form of Hermes. They begin with free text, in which eight functions may be
called, or with thinking. The vocabulary is Tekken's, with 131,072 tokens. A step is a controller's
work for one token: it accepts the token and fills the next mask. A step in free text is compared
with a step under a regex that allows any text. It is also compared with a step of llguidance alone,
under structural tags with the same triggers. A step in the arguments of a call is compared with a
step of the constraint ``json_schema``. Figures with ``first`` are from the first pass, in which the
engines compute their masks. All other figures are from later passes over the same text. Everything
runs on one thread.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Sequence

import msgspec
from _masks_engines import LLGuidance
from _masks_schema import SCHEMA
from _masks_world import MICRO, ROOT, TEXTS, World, steady_us
from _report import arguments, report
from llguidance import StructTag
from tokenbus.clients.gateway.answer_forms import HERMES, Function, Wanted, structure_of
from tokenbus.workers.controller.backends.constraints import Constraints
from tokenbus.workers.controller.interface import Action, Controller

FUNCTIONS = [Function(f"save_{number}", SCHEMA) for number in range(8)]
PARTS = ("text", "thinking")
_clock = time.perf_counter


class Steps:
    """Walks texts under a constraint, with the calls that a worker makes."""

    def __init__(self, world: World, constraints: Constraints) -> None:
        self._world, self._constraints = world, constraints
        self._mask = world.mask()

    def start(self, name: str, arg: str) -> Controller:
        """Starts the controller of a new sequence."""
        program = self._constraints.get(name)
        assert program is not None
        controller = program.start(self._world.host(arg))
        controller.init_prompt([1, 2, 3])
        return controller

    def free(self, name: str, arg: str, tokens: Sequence[int]) -> list[float]:
        """Seconds of each step of a text. All tokens of the text are sampled."""
        controller, mask, group = self.start(name, arg), self._mask, [0]
        controller.mid_process(group, mask)
        seconds = []
        for token in tokens:
            began = _clock()
            controller.post_process([token], 0)
            controller.pre_process()
            answer = controller.mid_process(group, mask)
            seconds.append(_clock() - began)
            assert answer.masked
        controller.close()
        return seconds

    def value(self, name: str, arg: str, text: bytes, value: bytes) -> list[float]:
        """Seconds of the steps inside ``value``, which is the end of ``text``. Steps that end with
        forced tokens are not measured."""
        controller, mask, group = self.start(name, arg), self._mask, [0]
        seconds: list[float] = []
        appended: list[int] = []
        while True:
            began = _clock()
            controller.post_process(appended, 0)
            controller.pre_process()
            answer = controller.mid_process(group, mask)
            took = _clock() - began
            if answer.action is Action.STOP or not text:
                controller.close()
                return seconds
            # Under ``structural``, free text may follow the value, and the value's last token may
            # also contain a part of this text.
            if answer.masked and len(text) < len(value):
                seconds.append(took)
            tokens = self._world.vocabulary.tokenize(text)[:1]
            appended = list(answer.tokens) if answer.action is Action.SPLICE else tokens
            written = self._world.vocabulary.bytes_of(appended)
            assert text.startswith(written), f"forced {written!r}, but the text has {text!r}"
            text = text[len(written) :]


def structures() -> dict[str, str]:
    """The arguments of the constraint ``structural``. A key is the part with which the answer
    begins."""
    text = structure_of(HERMES, Wanted(FUNCTIONS))
    thinking = structure_of(HERMES, Wanted(FUNCTIONS, thinking="inside"))
    return {
        "text": msgspec.json.encode(text).decode(),
        "thinking": msgspec.json.encode(thinking).decode(),
    }


def structural_tags() -> str:
    """The grammar of the calls as structural tags of llguidance."""
    return StructTag.to_grammar(
        [
            StructTag(
                trigger=HERMES.trigger,
                begin=f'{HERMES.head}"{each.name}"{HERMES.middle}',
                grammar=each.parameters,
                end=HERMES.tail,
            )
            for each in FUNCTIONS
        ],
        assume_special=False,
    )


def main() -> None:
    """Runs all measurements and reports the figures."""
    given = arguments(__doc__)
    passes = 3 if given.quick else 9
    world = World.make()
    constraints = Constraints(world.engine, None)
    steps = Steps(world, constraints)
    words = world.tokens((ROOT / "docs" / "architecture.md").read_text().replace("<", "("))[:1000]
    theirs = LLGuidance(LLGuidance.tokenizer(world.vocabulary), world.vocabulary, structural_tags())
    args = structures()
    record = json.dumps(json.loads((TEXTS / "records.json").read_text())[0], ensure_ascii=False)
    call = f'{HERMES.head}"save_0"{HERMES.middle}{record}'.encode()
    results: dict[str, float] = {}
    gc.disable()
    for part in PARTS:
        first = steps.free("structural", args[part], words)
        results[f"{part}_first_us"] = statistics.mean(first) * MICRO
    times: dict[str, list[list[float]]] = {}
    for _ in range(passes):
        for part in PARTS:
            times.setdefault(part, []).append(steps.free("structural", args[part], words))
        times.setdefault("regex", []).append(steps.free("regex", "(?s:.*)", words))
        times.setdefault("llguidance", []).append(theirs.walk(words)[1:])
        inside = steps.value("structural", args["text"], call, record.encode())
        times.setdefault("call", []).append(inside)
        alone = steps.value("json_schema", json.dumps(SCHEMA), record.encode(), record.encode())
        times.setdefault("schema", []).append(alone)
    constraints.close()
    for name, passed in times.items():
        results[f"{name}_us"] = steady_us(passed)
    results["text_vs_regex"] = results["text_us"] / results["regex_us"]
    results["text_vs_llguidance"] = results["text_us"] / results["llguidance_us"]
    results["thinking_vs_regex"] = results["thinking_us"] / results["regex_us"]
    results["call_vs_schema"] = results["call_us"] / results["schema_us"]
    notes = {
        "text_vs_regex": "time of a step in free text, divided by that under a regex for any "
        "text; at most 1.2",
        "text_vs_llguidance": "time of a step in free text, divided by that of llguidance alone; "
        "at most 1.0",
        "thinking_vs_regex": "time of a step in thinking, divided by that under a regex for any "
        "text; at most 1.2",
        "call_vs_schema": "time of a step in the arguments of a call, divided by that under "
        "json_schema; at most 2.0",
        "text_us": "microseconds of a step in free text",
        "text_first_us": "microseconds of a step in free text in the first pass, in which the "
        "masks are computed",
    }
    report(results, notes, given.json)


if __name__ == "__main__":
    main()
