"""Measures the overhead of our ``json_schema`` controller over llguidance alone."""

from __future__ import annotations

import json
import time
from itertools import compress
from typing import NamedTuple

from _masks_engines import LLGuidance
from _masks_world import TEXTS, World, steady_us
from llguidance import LLMatcher
from tokenbus.workers.controller.backends.llguidance.matchers import Matchers
from tokenbus.workers.controller.backends.llguidance.schema_and_lark import JsonSchemaProgram
from tokenbus.workers.controller.interface import Action, Controller

_clock = time.perf_counter

TEXT = {"type": "string"}
SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0},
        "name": {"type": "string", "maxLength": 60},
        "email": {"type": "string", "format": "email"},
        "born": {"type": "string", "format": "date"},
        "active": {"type": "boolean"},
        "balance": {"type": "number"},
        "tags": {
            "type": "array",
            "items": {"enum": ["crew", "guest", "harbour", "night", "pilot", "vip"]},
        },
        "address": {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "properties": {"street": TEXT, "city": TEXT, "zip": TEXT},
                    "required": ["street", "city", "zip"],
                    "additionalProperties": False,
                },
            ]
        },
    },
    "required": ["id", "name", "email", "born", "active", "balance", "tags", "address"],
    "additionalProperties": False,
}
"""The schema of a record of ``texts/records.json``."""


class Round(NamedTuple):
    """A round: tokens are appended, then a mask is requested."""

    appended: list[int]
    """The tokens to append: none in the first round, later one sampled token or forced tokens."""
    masked: bool
    """Whether the result is a mask. If not, further tokens are forced, or the text has ended."""


class Schemas:
    """Our controller and llguidance. Both process the same records."""

    def __init__(self, world: World) -> None:
        self._world = world
        records = json.loads((TEXTS / "records.json").read_text())
        self._texts = [json.dumps(record, ensure_ascii=False).encode() for record in records]
        self._host = world.host(json.dumps(SCHEMA))
        self._matchers = Matchers()
        self._program = JsonSchemaProgram(self._matchers)
        self._alone = LLGuidance(
            LLGuidance.tokenizer(world.vocabulary),
            world.vocabulary,
            LLMatcher.grammar_from_json_schema(
                json.dumps(SCHEMA),
                {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
            ),
        )

    def overhead(self, passes: int) -> dict[str, float]:
        """Ratio of our time to llguidance's time for a round. A round accepts the appended tokens
        and fills a mask. ``schema_overhead`` is measured over the rounds that end in a mask.
        ``schema_overhead_forced`` is measured over all rounds. It includes the time in which our
        controller computes forced tokens. The first pass fills caches. The figures are medians over
        all passes, so the first pass does not affect them."""
        texts = [self._rounds(text) for text in self._texts]
        masked = [one.masked for rounds in texts for one in rounds]
        ours: list[list[float]] = []
        alone: list[list[float]] = []
        for _ in range(passes):
            ours.append([step for rounds in texts for step in self._walk(rounds)])
            appended = [[one.appended for one in rounds] for rounds in texts]
            alone.append([step for one in appended for step in self._alone.walk_rounds(one)])
        self._matchers.close()
        of_masks = [steady_us([list(compress(one, masked)) for one in of]) for of in (ours, alone)]
        return {
            "schema_overhead": of_masks[0] / of_masks[1],
            "schema_overhead_forced": steady_us(ours) / steady_us(alone),
            "schema_us": of_masks[0],
            "schema_us_llguidance": of_masks[1],
        }

    def _rounds(self, text: bytes) -> list[Round]:
        """The rounds of a stream with this text. Forced tokens are appended in one round."""
        controller, mask = self._start(), self._world.mask()
        rounds: list[Round] = []
        appended: list[int] = []
        while True:
            controller.post_process(appended, 0)
            answer = controller.mid_process([0], mask)
            rounds.append(Round(appended, answer.masked))
            if answer.action is Action.STOP:
                return rounds
            tokens = self._world.vocabulary.tokenize(text)
            appended = list(answer.tokens) if answer.action is Action.SPLICE else tokens[:1]
            written = self._world.vocabulary.bytes_of(appended)
            if not written or not text.startswith(written):
                raise SystemExit(f"the schema forces {written!r}, but the text has {text!r}")
            text = text[len(written) :]

    def _walk(self, rounds: list[Round]) -> list[float]:
        controller, mask = self._start(), self._world.mask()
        group, seconds = [0], []
        for appended, _ in rounds:
            began = _clock()
            controller.post_process(appended, 0)
            controller.pre_process()
            controller.mid_process(group, mask)
            seconds.append(_clock() - began)
        controller.close()
        return seconds

    def _start(self) -> Controller:
        controller = self._program.start(self._host)
        controller.init_prompt([1, 2, 3])
        return controller
