"""Random walks under the masks of schemas, at any ``max_tokens``: every text is to be whole."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from decimal import Decimal, localcontext
from typing import Any

import jsonschema
import numpy as np
from _masks_world import EOS, MICRO, World
from _schemas_cases import Case
from tokenbus.protocol.errors import TokenbusError
from tokenbus.workers.controller.backends.llguidance.matcher_controller import MatcherController
from tokenbus.workers.controller.backends.llguidance.schema_and_lark import JsonSchemaProgram
from tokenbus.workers.controller.interface import Action

MAX_TOKENS = 400
"""The largest ``max_tokens`` of a walk; the smallest is what the shortest value takes."""

HUGE = 10**400
"""In place of a number that is too large for a float."""
DIGITS = 1000
"""With this many, numbers are divided exactly."""


@dataclass
class WalkFigures:
    """The outcomes of walks."""

    walks: int = 0
    whole: int = 0
    tokens: int = 0
    closed: int = 0
    taken_back: int = 0
    """Tokens that were dropped again."""
    backtracks: int = 0
    """How often tokens were."""
    longer: int = 0
    """Schemas whose shortest value has more than ``MAX_TOKENS``: they have no walks."""
    seconds: float = 0.0
    """CPU time of computing how texts are closed."""
    failures: dict[str, str] = field(default_factory=dict)
    """Why a walk of a schema failed, by its name."""
    exceptions: dict[str, str] = field(default_factory=dict)
    """Why a schema is not closed, by its name."""

    def add(self, other: WalkFigures) -> None:
        """Adds those of other cases."""
        self.walks += other.walks
        self.whole += other.whole
        self.tokens += other.tokens
        self.closed += other.closed
        self.taken_back += other.taken_back
        self.backtracks += other.backtracks
        self.longer += other.longer
        self.seconds += other.seconds
        self.failures |= other.failures
        self.exceptions |= other.exceptions

    def results(self) -> dict[str, float]:
        """The figures of all walks."""
        return {
            "walks": self.walks,
            "closed_share": self.whole / self.walks,
            "closed_by_us_share": self.closed / self.walks,
            "backtracks": self.backtracks,
            "taken_back_share": self.taken_back / self.tokens,
            "closing_us_per_token": self.seconds / self.tokens * MICRO,
            "closing_exceptions": len(self.exceptions),
            "longer_than_400_tokens": self.longer,
        }


class Walks:
    """The walks of one case after another."""

    def __init__(self, world: World, program: JsonSchemaProgram) -> None:
        self._world = world
        self._program = program
        began = time.thread_time()
        for _ in range(10_000):
            time.thread_time()
        self._clock_s = (time.thread_time() - began) / 10_000
        """The time of reading the clock, which is in each interval."""
        self.figures = WalkFigures()

    def add(self, case: Case, count: int) -> None:
        """A number of walks under one schema: the first at the least ``max_tokens`` that it has."""
        arg = json.dumps(case.schema)
        try:
            least = self._least(arg)
        except TokenbusError:
            return  # It is counted as not compiled.
        if least is None:
            self.figures.exceptions[case.name] = "no shortest value was found"
            return
        if least > MAX_TOKENS:
            self.figures.longer += 1
            return
        schema = _exact(arg)
        validator = jsonschema.validators.validator_for(schema)(schema)
        for number in range(count):
            rng = random.Random(number)
            most = least if not number else rng.randint(least, MAX_TOKENS)
            self.figures.walks += 1
            why = self._walk(arg, most, rng, validator)
            if why:
                self.figures.failures[case.name] = f"max_tokens {most}: {why}"
            else:
                self.figures.whole += 1

    def _least(self, arg: str) -> int | None:
        """The tokens of the shortest value. A request below that is to be refused with it."""
        host = self._world.host(arg)
        shortest = self._program.start(host).shortest
        if shortest is None:
            return None
        least, refused = len(shortest), ""
        try:
            self._program.start(replace(host, max_tokens=least - 1)).init_prompt([1])
        except TokenbusError as error:
            refused = error.message
        if f"takes {least} tokens" not in refused:
            raise SystemExit(f"max_tokens below {least} is not refused, but: {refused!r}")
        return least

    def _walk(self, arg: str, most: int, rng: random.Random, validator: Any) -> str:
        """Why the text of a walk is not whole; empty if it is."""
        controller = self._program.start(replace(self._world.host(arg), max_tokens=most))
        controller.init_prompt([1])
        self._measure(controller)
        tokens = self._sampled(controller, most, rng)
        self.figures.tokens += len(tokens)
        end = controller.text_end()
        self.figures.closed += end == "closed"
        text = self._world.vocabulary.bytes_of(tokens)
        if len(tokens) > most:
            return f"it has {len(tokens)} tokens"
        try:
            with localcontext(prec=DIGITS):
                validator.validate(_exact(text))
        except ValueError as error:
            return f"{error}: …{text[-60:]!r}"
        except jsonschema.ValidationError as error:
            return error.message[:200]
        return "" if end != "cut" else "its end is given as cut"

    def _sampled(self, controller: MatcherController, most: int, rng: random.Random) -> list[int]:
        """The tokens of a sequence whose model draws them at random."""
        mask = self._world.mask()
        words = np.frombuffer(mask, np.uint32)
        tokens: list[int] = []
        while len(tokens) < most:
            answer = controller.mid_process((0,), mask)
            if answer.action is Action.STOP:
                break
            appended = list(answer.tokens)
            if answer.action is Action.CONTINUE:
                appended = [_drawn(words, rng)]
                if appended == [EOS]:
                    break
            if answer.backtrack:
                self.figures.taken_back += answer.backtrack
                self.figures.backtracks += 1
            del tokens[len(tokens) - answer.backtrack :]
            tokens += appended
            controller.post_process(appended, answer.backtrack)
        return tokens

    def _measure(self, controller: MatcherController) -> None:
        """Adds up the time of closing of one sequence."""
        closing = controller.closing

        def measured(call: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*given: Any) -> Any:
                began = time.thread_time()
                found = call(*given)
                self.figures.seconds += time.thread_time() - began - self._clock_s
                return found

            return timed

        for name in ("look", "append", "restrict", "closes_instead"):
            setattr(closing, name, measured(getattr(closing, name)))


def _exact(text: str | bytes) -> Any:
    """A text of JSON with numbers as they are written: in floats, 0.07 is not a multiple of
    0.01."""
    return json.loads(text, parse_float=_number)


def _number(text: str) -> int | Decimal:
    number = float(text)
    if math.isinf(number):
        return int(math.copysign(1, number)) * HUGE
    return int(number) if number.is_integer() else Decimal(text)


def _drawn(words: np.ndarray[tuple[int], np.dtype[np.uint32]], rng: random.Random) -> int:
    """One of the tokens of a mask, each as probable as the others."""
    up_to = np.cumsum(np.bitwise_count(words), dtype=np.int64)
    number = rng.randrange(int(up_to[-1]))
    at = int(np.searchsorted(up_to, number, side="right"))
    word = int(words[at])
    for _ in range(number - (int(up_to[at - 1]) if at else 0)):
        word &= word - 1
    return 32 * at + (word & -word).bit_length() - 1
