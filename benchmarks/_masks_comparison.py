"""Compares our grammar engine with llguidance, xgrammar and outlines-core on the same tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from _masks_engines import Engine, LLGuidance, Ours, OutlinesCore, XGrammar
from _masks_regexes import CASES
from _masks_world import MILLI, TEXTS, World, steady_us
from llguidance import LLMatcher
from tokenbus.grammars import library
from tokenbus.grammars.regex import compile_regex
from tokenbus.grammars.yacc import compile_grammar
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary

LARK_JSON = r"""
%llguidance {"allow_initial_skip": true}
start: value
value: object | array | STRING | NUMBER | "true" | "false" | "null"
object: "{" [member ("," member)*] "}"
member: STRING ":" value
array: "[" [value ("," value)*] "]"
STRING: /"([^"\\\x00-\x1f]|\\(["\\\/bfnrt]|u[0-9a-fA-F]{4}))*"/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
%ignore /[ \t\n\r]+/
"""
"""The JSON of RFC 8259 in llguidance's form of Lark, without white space after the value."""
OTHERS_S = 2.0
"""Time limit of a case, in seconds. After this time, xgrammar and outlines-core do not begin
another text."""

Makers = dict[str, Callable[[], Engine]]


@dataclass(slots=True)
class Line:
    """The figures of a case. The time of an engine is the mean over the steps of all texts of the
    case."""

    case: str
    tokens: int
    differing: int = 0
    """Number of our masks that differ from llguidance's masks."""
    first: dict[str, float] = field(default_factory=dict)
    """By engine: microseconds of a step in the first pass of a new engine."""
    again: dict[str, float] = field(default_factory=dict)
    """By engine: microseconds of a step in later passes over the same texts."""
    prepared_ms: dict[str, float] = field(default_factory=dict)
    """Milliseconds to compile the grammar, for xgrammar and outlines-core."""


class Comparison:
    """Compares all engines with one vocabulary."""

    def __init__(self, world: World, fresh: int, passes: int) -> None:
        """``fresh``: number of new engines for each case. ``passes``: number of passes of the last
        engine over texts that it has already processed."""
        self._world = world
        self._fresh, self._passes = fresh, passes
        self._ll_tokenizer = LLGuidance.tokenizer(world.vocabulary)
        self.missing: list[str] = []
        """Names of the optional engines that are not installed."""
        self._xgrammar = self._optional(XGrammar.name, XGrammar.compiler)
        self._outlines = self._optional(OutlinesCore.name, OutlinesCore.words)

    def regexes(self) -> Iterator[Line]:
        """Yields a ``Line`` for each of ``CASES``."""
        for case in CASES:
            pattern = case.pattern
            makers, others = self._makers(
                compile_regex(pattern).to_bytes(), LLMatcher.grammar_from_regex(pattern)
            )
            if case.others and self._xgrammar:
                others[XGrammar.name] = partial(self._xgrammar_regex, pattern)
            if case.others and self._outlines:
                others[OutlinesCore.name] = partial(
                    OutlinesCore, self._outlines, self._world.vocabulary, pattern
                )
            yield self._line(case.name, case.texts, makers, others)

    def json(self) -> Iterator[Line]:
        """Yields a ``Line`` for each JSON text."""
        tables = compile_grammar(library.grammar("json")).grammar.to_bytes()
        makers, others = self._makers(tables, LLMatcher.grammar_from_lark(LARK_JSON))
        if self._xgrammar:
            others[XGrammar.name] = lambda: XGrammar(
                self._xgrammar.compile_builtin_json_grammar(), self._world.vocabulary
            )
        for path in sorted(TEXTS.glob("*.json")):
            yield self._line(path.stem, [path.read_text().strip()], makers, others)

    # --- private --------------------------------------------------------------------------------

    def _optional(self, name: str, make: Callable[[TokenizerVocabulary], Any]) -> Any:
        try:
            return make(self._world.vocabulary)
        except ImportError:
            self.missing.append(name)
            return None

    def _xgrammar_regex(self, pattern: str) -> Engine:
        return XGrammar(self._xgrammar.compile_regex(pattern), self._world.vocabulary)

    def _makers(self, tables: bytes, grammar: str) -> tuple[Makers, Makers]:
        """Returns two dicts of functions that make engines, by name. The first has our engine and
        llguidance's. The second is empty, and the caller adds the other engines."""
        world = self._world
        compared: Makers = {
            Ours.name: lambda: Ours(world.module, world.vocabulary, tables),
            LLGuidance.name: lambda: LLGuidance(self._ll_tokenizer, world.vocabulary, grammar),
        }
        return compared, {}

    def _line(self, case: str, texts: Sequence[str], makers: Makers, others: Makers) -> Line:
        parts = [self._world.tokens(text) for text in texts]
        line = Line(case, sum(map(len, parts)))
        first: dict[str, list[list[float]]] = {name: [] for name in makers}
        again: dict[str, list[list[float]]] = {name: [] for name in makers}
        engines: dict[str, Engine] = {}
        # The engines take turns, so that other load on the machine affects all of them equally.
        for _ in range(self._fresh):
            for name, make in makers.items():
                if name in engines:
                    engines[name].close()
                engines[name] = make()
                first[name].append(_steps(engines[name], parts))
        for _ in range(self._passes):
            for name, engine in engines.items():
                again[name].append(_steps(engine, parts))
        for name in makers:
            line.first[name] = steady_us(first[name])
            line.again[name] = steady_us(again[name])
        ours, theirs = engines.values()
        line.differing = sum(
            a != b
            for part in parts
            for a, b in zip(ours.masks(part), theirs.masks(part), strict=True)
        )
        for engine in engines.values():
            engine.close()
        for name, make in others.items():
            # xgrammar and outlines-core do not support some patterns, or fail at some texts.
            with suppress(ValueError, RuntimeError):
                self._measure_other(line, name, make, parts)
        return line

    def _measure_other(
        self, line: Line, name: str, make: Callable[[], Engine], parts: list[list[int]]
    ) -> None:
        began = time.perf_counter()
        engine = make()
        prepared = time.perf_counter()
        walked: list[list[int]] = []
        steps: list[float] = []
        for part in parts:
            if time.perf_counter() - prepared < OTHERS_S:
                steps += engine.walk(part)
                walked.append(part)
        line.again[name] = steady_us([_steps(engine, walked)])
        line.first[name] = steady_us([steps])
        line.prepared_ms[name] = (prepared - began) * MILLI


def _steps(engine: Engine, parts: Sequence[Sequence[int]]) -> list[float]:
    """Seconds of each step of all texts."""
    return [step for part in parts for step in engine.walk(part)]
