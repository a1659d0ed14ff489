"""Schemas by our controller and by llguidance alone: what they accept, and what masks cost."""

from __future__ import annotations

import json
import statistics
import time
from itertools import compress
from typing import Any, NamedTuple

from _masks_engines import LLGuidance
from _masks_world import EOS, MICRO, World
from _schemas_cases import Case
from llguidance import LLMatcher, LLTokenizer
from tokenbus.protocol.errors import TokenbusError
from tokenbus.workers.controller.backends.llguidance.schema_and_lark import JsonSchemaProgram
from tokenbus.workers.controller.backends.llguidance.spacing import spaced_schema
from tokenbus.workers.controller.interface import Action, Controller

_clock = time.perf_counter


class Judged(NamedTuple):
    """What became of the texts of one schema in one engine."""

    compiled: bool
    refused_valid: int = 0
    accepted_invalid: int = 0

    @property
    def passing(self) -> bool:
        """Whether all of its texts are judged as the case says."""
        return self.compiled and not self.refused_valid and not self.accepted_invalid


class Masks:
    """Both over one case after another."""

    def __init__(self, world: World, program: JsonSchemaProgram) -> None:
        self._world = world
        self._program = program
        self._tokenizer: LLTokenizer = LLGuidance.tokenizer(world.vocabulary)
        self._mask = world.mask()
        self.ours: list[Judged] = []
        self.theirs: list[Judged] = []
        self._steps: tuple[list[float], list[float]] = ([], [])
        self._firsts: list[tuple[float, float]] = []

    def add(self, case: Case) -> None:
        """Runs one case in both, in turn first."""
        schema = json.dumps(case.schema)
        first: dict[bool, float | None] = {}
        order = (True, False) if len(self.ours) % 2 else (False, True)
        for ours in order:
            first[ours] = self._first(schema) if ours else self._first_alone(schema)
        texts = [(text.encode(), valid) for text, valid in case.texts]
        for judged, accepts, took in (
            (self.ours, self._accepts, first[True]),
            (self.theirs, self._accepts_alone, first[False]),
        ):
            compiled = took is not None
            judged.append(
                _judged(compiled, [(accepts(schema, t), v) for t, v in texts if compiled])
            )
        mine, alone = first[True], first[False]
        if mine is None or alone is None:
            return
        self._firsts.append((mine, alone))
        rounds = [self._rounds(schema, text) for text, valid in texts if valid]
        rounds = [one for one in rounds if one]
        grammar = LLGuidance(self._tokenizer, self._world.vocabulary, _grammar(schema))
        for one in rounds:
            masked = [step.masked for step in one]
            for ours in order:
                took_s = (
                    self._walk(schema, one)
                    if ours
                    else grammar.walk_rounds([step.appended for step in one])
                )
                self._steps[0 if ours else 1].extend(compress(took_s, masked))

    def results(self) -> dict[str, float]:
        """The figures of all cases."""
        results: dict[str, float] = {"schemas": len(self.ours)}
        for suffix, judged in (("", self.ours), ("_llguidance", self.theirs)):
            results |= {
                f"compiled{suffix}": sum(one.compiled for one in judged),
                f"passing{suffix}": sum(one.passing for one in judged),
                f"validation_errors{suffix}": sum(one.refused_valid > 0 for one in judged),
                f"invalidation_errors{suffix}": sum(one.accepted_invalid > 0 for one in judged),
            }
        ours, alone = map(statistics.mean, self._steps)
        firsts = [sum(column) for column in zip(*self._firsts, strict=True)]
        return results | {
            "mask_vs_llguidance": ours / alone,
            "mask_us": ours * MICRO,
            "mask_us_llguidance": alone * MICRO,
            "first_mask_vs_llguidance": firsts[0] / firsts[1],
            "first_mask_ms": 1000 * firsts[0] / len(self._firsts),
            "first_mask_ms_llguidance": 1000 * firsts[1] / len(self._firsts),
        }

    # --- ours -----------------------------------------------------------------------------------

    def _start(self, schema: str) -> Controller:
        controller = self._program.start(self._world.host(schema))
        controller.init_prompt([1])
        return controller

    def _first(self, schema: str) -> float | None:
        """Seconds from the schema to the first mask; None where it is refused."""
        began = _clock()
        try:
            controller = self._start(schema)
            appended: list[int] = []
            while True:
                controller.post_process(appended, 0)
                answer = controller.mid_process((0,), self._mask)
                if answer.action is not Action.SPLICE:
                    return _clock() - began
                appended = list(answer.tokens)
        except TokenbusError:
            return None

    def _accepts(self, schema: str, text: bytes) -> bool:
        """Whether each token of a text is in the mask before it, and its end in the last."""
        controller = self._start(schema)
        try:
            for token in [*self._world.vocabulary.tokenize(text), EOS]:
                answer = controller.mid_process((0,), self._mask)
                if answer.masked and not _allows(self._mask, token):
                    return False
                if token != EOS:
                    controller.post_process([token], 0)
            return controller.text_end() == "complete"  # type: ignore[attr-defined, no-any-return]
        except TokenbusError:
            return False

    def _rounds(self, schema: str, text: bytes) -> list[Step]:
        """The rounds of a stream with a text: forced tokens are appended at once; none where the
        text is refused."""
        controller = self._start(schema)
        rounds: list[Step] = []
        appended: list[int] = []
        vocabulary = self._world.vocabulary
        try:
            while True:
                controller.post_process(appended, 0)
                answer = controller.mid_process((0,), self._mask)
                rounds.append(Step(appended, answer.masked))
                if answer.action is Action.STOP or not text:
                    return rounds
                forced = answer.action is Action.SPLICE
                appended = list(answer.tokens) if forced else vocabulary.tokenize(text)[:1]
                written = vocabulary.bytes_of(appended)
                if not text.startswith(written):
                    return []
                text = text[len(written) :]
        except TokenbusError:
            return []

    def _walk(self, schema: str, rounds: list[Step]) -> list[float]:
        controller = self._start(schema)
        group, seconds = [0], []
        for appended, _ in rounds:
            began = _clock()
            controller.post_process(appended, 0)
            controller.pre_process()
            controller.mid_process(group, self._mask)
            seconds.append(_clock() - began)
        return seconds

    # --- llguidance alone -----------------------------------------------------------------------

    def _first_alone(self, schema: str) -> float | None:
        began = _clock()
        matcher = self._matcher(schema)
        if matcher is None:
            return None
        matcher.consume_tokens(matcher.compute_ff_tokens())
        matcher.compute_bitmask()
        return None if matcher.is_error() else _clock() - began

    def _accepts_alone(self, schema: str, text: bytes) -> bool:
        matcher = self._matcher(schema)
        assert matcher is not None
        tokens = self._world.vocabulary.tokenize(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def _matcher(self, schema: str) -> LLMatcher | None:
        try:
            matcher = LLMatcher(self._tokenizer, _grammar(schema), log_level=0)
        except ValueError:
            return None
        return None if matcher.is_error() else matcher


class Step(NamedTuple):
    """The tokens appended before a mask is requested: none, then a token or the forced ones."""

    appended: list[int]
    masked: bool
    """Whether the answer is a mask; otherwise more is forced, or the text has ended."""


def _judged(compiled: bool, texts: list[tuple[bool, bool]]) -> Judged:
    return Judged(
        compiled,
        sum(valid and not accepted for accepted, valid in texts),
        sum(accepted and not valid for accepted, valid in texts),
    )


def _allows(mask: memoryview, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)


def _grammar(schema: str) -> Any:
    return LLMatcher.grammar_from_json_schema(*spaced_schema(schema))
