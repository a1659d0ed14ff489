"""Compares our controller ``json_schema``, which uses llguidance, with llguidance alone. The
comparison has two parts: which texts are accepted under a schema, and how long masks take."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, NamedTuple

from _masks_engines import LLGuidance
from _masks_world import EOS, MICRO, World
from _schemas_cases import Case
from llguidance import LLMatcher, LLTokenizer
from tokenbus.protocol.errors import TokenbusError
from tokenbus.workers.controller.backends.llguidance.least_length import least_bytes
from tokenbus.workers.controller.backends.llguidance.plain import is_plain
from tokenbus.workers.controller.backends.llguidance.schema_and_lark import JsonSchemaProgram
from tokenbus.workers.controller.backends.llguidance.spacing import spaced_schema
from tokenbus.workers.controller.interface import Action, Controller

FIRSTS = 3
"""Number of times that each engine computes the first mask of a schema."""
MAX_TOKENS = 1024
"""``max_tokens`` of the sequences whose first masks are timed. Our controller refuses a schema
whose shortest value has more tokens. If it cannot read this from the schema directly, it searches
for the shortest value before the first mask."""

_clock = time.perf_counter
_cpu_clock = time.thread_time
"""A clock that counts this thread's CPU time, which other load hardly affects."""


class Judged(NamedTuple):
    """The results of one engine for one schema: whether the engine compiles the schema, the number
    of valid texts that it refuses, and the number of invalid texts that it accepts."""

    compiled: bool
    refused_valid: int = 0
    accepted_invalid: int = 0

    @property
    def passing(self) -> bool:
        """Whether the engine accepts exactly the valid texts."""
        return self.compiled and not self.refused_valid and not self.accepted_invalid


@dataclass
class MaskFigures:
    """The results of our controller and of llguidance."""

    ours: list[Judged] = field(default_factory=list)
    theirs: list[Judged] = field(default_factory=list)
    steps: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    """Seconds of each round of valid texts, in two lists: for our controller and for llguidance.
    Rounds that do not end with a mask are left out."""
    firsts: list[tuple[float, float, bool]] = field(default_factory=list)
    """For each schema: the seconds to our controller's first mask, the seconds to llguidance's
    first mask, and the result of ``_is_at_once``."""

    def add(self, other: MaskFigures) -> None:
        """Adds the results of other cases."""
        self.ours += other.ours
        self.theirs += other.theirs
        for mine, more in zip(self.steps, other.steps, strict=True):
            mine += more
        self.firsts += other.firsts

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
        ours, alone = map(statistics.mean, self.steps)
        firsts = [sum(column) for column in zip(*self.firsts, strict=True)]
        at_once = [sum(column) for column in zip(*(f for f in self.firsts if f[2]), strict=True)]
        return results | {
            "mask_vs_llguidance": ours / alone,
            "mask_us": ours * MICRO,
            "mask_us_llguidance": alone * MICRO,
            "first_mask_vs_llguidance": firsts[0] / firsts[1],
            "first_mask_at_once_vs_llguidance": at_once[0] / at_once[1],
            "first_mask_at_once_share": at_once[2] / len(self.firsts),
            "first_mask_ms": 1000 * firsts[0] / len(self.firsts),
            "first_mask_ms_llguidance": 1000 * firsts[1] / len(self.firsts),
        }


class Masks:
    """Runs cases with our controller and with llguidance, and collects the results."""

    def __init__(self, world: World, program: JsonSchemaProgram) -> None:
        self._world = world
        self._program = program
        self._tokenizer: LLTokenizer = LLGuidance.tokenizer(world.vocabulary)
        self._mask = world.mask()
        self.figures = MaskFigures()

    def add(self, case: Case) -> None:
        """Runs one case with our controller and with llguidance. In every second case, llguidance
        runs first."""
        schema = json.dumps(case.schema)
        order = (True, False) if len(self.figures.ours) % 2 else (False, True)
        first = self._firsts_of(case.schema, order)
        texts = [(text.encode(), valid) for text, valid in case.texts]
        # If the shortest value of a schema has more than ``MAX_TOKENS`` tokens, ``_firsts_of`` does
        # not return a time for our controller. The schema still counts as compiled if the
        # controller accepts it with the larger ``max_tokens`` of ``World.host``.
        for judged, accepts, compiled in (
            (self.figures.ours, self._accepts, first[True] is not None or self._compiles(schema)),
            (self.figures.theirs, self._accepts_alone, first[False] is not None),
        ):
            judged.append(
                _judged(compiled, [(accepts(schema, t), v) for t, v in texts if compiled])
            )
        mine, alone = first[True], first[False]
        if mine is None or alone is None:
            return
        self.figures.firsts.append((mine, alone, _is_at_once(case.schema)))
        # Our controller accepts some valid texts that llguidance alone refuses.
        both = [text for text, valid in texts if valid and self._accepts_alone(schema, text)]
        rounds = [one for text in both if (one := self._rounds(schema, text))]
        grammar = LLGuidance(self._tokenizer, self._world.vocabulary, _grammar(schema))
        # This walk is not timed. It creates the states of llguidance's lexer. ``_rounds`` has
        # already created the states of our controller's lexer.
        for one in rounds:
            grammar.walk_rounds([step.appended for step in one])
        for one in rounds:
            masked = [step.masked for step in one]
            for ours in order:
                took_s = (
                    self._walk(schema, one)
                    if ours
                    else grammar.walk_rounds([step.appended for step in one], _cpu_clock)
                )
                self.figures.steps[0 if ours else 1].extend(compress(took_s, masked))

    # --- our controller -------------------------------------------------------------------------

    def _start(self, schema: str) -> Controller:
        controller = self._program.start(self._world.host(schema))
        controller.init_prompt([1])
        return controller

    def _compiles(self, schema: str) -> bool:
        try:
            self._start(schema)
        except TokenbusError:
            return False
        return True

    def _firsts_of(self, schema: Any, order: tuple[bool, ...]) -> dict[bool, float | None]:
        """Seconds from a schema to its first mask, for our controller (True) and for llguidance
        (False). None if the schema is refused. Each time is the minimum of ``FIRSTS`` runs, because
        other load can only add time. Equal schemas are compiled only once, so each run has a
        different comment in the schema. If ``_is_at_once``, the times are CPU times."""
        found: dict[bool, list[float]] = {True: [], False: []}
        clock = _cpu_clock if _is_at_once(schema) else _clock
        for number in range(FIRSTS):
            one = json.dumps({**schema, "$comment": number} if isinstance(schema, dict) else schema)
            for ours in order:
                took = self._first(one, clock) if ours else self._first_alone(one, clock)
                if took is not None:
                    found[ours].append(took)
            if not found[True] or not found[False]:
                break
        return {ours: min(took) if took else None for ours, took in found.items()}

    def _first(self, schema: str, clock: Callable[[], float]) -> float | None:
        """Seconds from the schema to the first mask; None if the schema is refused."""
        began = clock()
        try:
            host = replace(self._world.host(schema), max_tokens=MAX_TOKENS)
            controller = self._program.start(host)
            controller.init_prompt([1])
            appended: list[int] = []
            while True:
                controller.post_process(appended, 0)
                answer = controller.mid_process((0,), self._mask)
                if answer.action is not Action.SPLICE:
                    return clock() - began
                appended = list(answer.tokens)
        except TokenbusError:
            return None

    def _accepts(self, schema: str, text: bytes) -> bool:
        """Whether the masks allow each token of a text and the end of the text."""
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
        """The rounds in which our controller would generate ``text``. Consecutive forced tokens are
        appended in one round. The list is empty if the controller refuses the text."""
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
            began = _cpu_clock()
            controller.post_process(appended, 0)
            controller.pre_process()
            controller.mid_process(group, self._mask)
            seconds.append(_cpu_clock() - began)
        return seconds

    # --- llguidance alone -----------------------------------------------------------------------

    def _first_alone(self, schema: str, clock: Callable[[], float]) -> float | None:
        began = clock()
        matcher = self._matcher(schema)
        if matcher is None:
            return None
        matcher.consume_tokens(matcher.compute_ff_tokens())
        matcher.compute_bitmask()
        return None if matcher.is_error() else clock() - began

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
    """A round: tokens are appended, then a mask is requested."""

    appended: list[int]
    """The tokens to append. The first round has none. Each later round has one sampled token, or
    one or more forced tokens."""
    masked: bool
    """Whether the round results in a mask. If not, the controller forces further tokens, or the
    text has ended."""


def _judged(compiled: bool, texts: list[tuple[bool, bool]]) -> Judged:
    return Judged(
        compiled,
        sum(valid and not accepted for accepted, valid in texts),
        sum(accepted and not valid for accepted, valid in texts),
    )


def _is_at_once(schema: Any) -> bool:
    """Whether our controller compiles a schema in its own process, and finds without a search that
    the shortest value has less than ``MAX_TOKENS`` tokens. Our controller compiles a schema in a
    separate process if compiling may be expensive."""
    least = least_bytes(schema)
    return is_plain(json.dumps(schema), schema) and least is not None and least < MAX_TOKENS


def _allows(mask: memoryview, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)


def _grammar(schema: str) -> Any:
    return LLMatcher.grammar_from_json_schema(*spaced_schema(schema))
