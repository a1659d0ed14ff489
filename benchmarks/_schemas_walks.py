"""Generates random texts under the masks of schemas, and checks that the texts are valid. The
generation of one text is a *walk*."""

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
"""The largest ``max_tokens`` of a walk. The smallest ``max_tokens`` is the number of tokens of the
schema's shortest value."""

HUGE = 10**400
"""Replaces a number that is too large for a float."""
DIGITS = 1000
"""Precision of the validator's decimal divisions, in digits."""


@dataclass
class WalkFigures:
    """The results of walks."""

    walks: int = 0
    whole: int = 0
    """Number of walks whose text is valid."""
    tokens: int = 0
    closed: int = 0
    """Number of walks whose text the controller completed itself. It does this so that the text
    ends within ``max_tokens``."""
    taken_back: int = 0
    """Number of tokens that backtracks have removed."""
    backtracks: int = 0
    """Number of times that the controller has removed tokens."""
    longer: int = 0
    """Number of schemas whose shortest value has more than ``MAX_TOKENS`` tokens. They do not have
    walks."""
    seconds: float = 0.0
    """CPU time in which the controller computes how to close texts, in seconds."""
    failures: dict[str, str] = field(default_factory=dict)
    """For the name of a schema: the error of its last failed walk."""
    exceptions: dict[str, str] = field(default_factory=dict)
    """For the name of a schema: the reason why the controller cannot complete the schema's texts
    within ``max_tokens``."""

    def add(self, other: WalkFigures) -> None:
        """Adds the results of other cases."""
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
    """Runs the walks of schemas, and collects the results."""

    def __init__(self, world: World, program: JsonSchemaProgram) -> None:
        self._world = world
        self._program = program
        began = time.thread_time()
        for _ in range(10_000):
            time.thread_time()
        self._clock_s = (time.thread_time() - began) / 10_000
        """Time to read the clock, in seconds. Each measured interval contains this time."""
        self.figures = WalkFigures()

    def add(self, case: Case, count: int) -> None:
        """Runs ``count`` walks under one schema. The first walk has the smallest ``max_tokens``."""
        arg = json.dumps(case.schema)
        try:
            minimum = self._minimum(arg)
        except TokenbusError:
            return  # ``Masks`` (``_schemas_masks.py``) already counts the schema as not compiled.
        if minimum is None:
            self.figures.exceptions[case.name] = "the search did not find a shortest value"
            return
        if minimum > MAX_TOKENS:
            self.figures.longer += 1
            return
        schema = _exact(arg)
        kind = jsonschema.validators.validator_for(schema)
        # If formats were not checked, a text could match two parts of a ``oneOf`` that differ only
        # in their formats, and would be invalid.
        validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
        for number in range(count):
            rng = random.Random(number)
            limit = minimum if not number else rng.randint(minimum, MAX_TOKENS)
            self.figures.walks += 1
            why = self._walk(arg, limit, rng, validator)
            if why:
                self.figures.failures[case.name] = f"max_tokens {limit}: {why}"
            else:
                self.figures.whole += 1

    def _minimum(self, arg: str) -> int | None:
        """The number of tokens of the schema's shortest value; None if the controller does not find
        it. Also checks that a smaller ``max_tokens`` is refused with an error that contains this
        number."""
        host = self._world.host(arg)
        shortest = self._program.start(host).shortest
        if shortest is None:
            return None
        minimum, refused = len(shortest), ""
        try:
            self._program.start(replace(host, max_tokens=minimum - 1)).init_prompt([1])
        except TokenbusError as error:
            refused = error.message
        if f"takes {minimum} tokens" not in refused:
            raise SystemExit(
                f"expected an error for max_tokens {minimum - 1} with the minimum of {minimum};  "
                f"the error is {refused!r}"
            )
        return minimum

    def _walk(self, arg: str, limit: int, rng: random.Random, validator: Any) -> str:
        """Runs a walk. Returns the reason why its text is not valid; empty if the text is valid."""
        controller = self._program.start(replace(self._world.host(arg), max_tokens=limit))
        controller.init_prompt([1])
        self._measure(controller)
        try:
            tokens = self._sampled(controller, limit, rng)
        except TokenbusError as error:
            return error.message[:200]
        self.figures.tokens += len(tokens)
        end = controller.text_end()
        self.figures.closed += end == "closed"
        text = self._world.vocabulary.bytes_of(tokens)
        if len(tokens) > limit:
            return f"the text has {len(tokens)} tokens"
        try:
            with localcontext(prec=DIGITS):
                validator.validate(_exact(text))
        except ValueError as error:
            return f"{error}: …{text[-60:]!r}"
        except jsonschema.ValidationError as error:
            return error.message[:200]
        return "" if end != "cut" else "the controller reports the text as cut"

    def _sampled(self, controller: MatcherController, limit: int, rng: random.Random) -> list[int]:
        """The tokens of a sequence. Each sampled token is drawn at random from the tokens that the
        mask allows."""
        mask = self._world.mask()
        words = np.frombuffer(mask, np.uint32)
        tokens: list[int] = []
        while len(tokens) < limit:
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
        """Changes a controller so that the figures include the time in which it computes how to
        close its text."""
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
    """Parses JSON with exact decimal numbers. With floats, the validator would not accept 0.07 as a
    multiple of 0.01."""
    return json.loads(text, parse_float=_number)


def _number(text: str) -> int | Decimal:
    number = float(text)
    if math.isinf(number):
        return int(math.copysign(1, number)) * HUGE
    return int(number) if number.is_integer() else Decimal(text)


def _drawn(words: np.ndarray[tuple[int], np.dtype[np.uint32]], rng: random.Random) -> int:
    """A random token of a mask. All allowed tokens are equally likely."""
    up_to = np.cumsum(np.bitwise_count(words), dtype=np.int64)
    number = rng.randrange(int(up_to[-1]))
    at = int(np.searchsorted(up_to, number, side="right"))
    word = int(words[at])
    for _ in range(number - (int(up_to[at - 1]) if at else 0)):
        word &= word - 1
    return 32 * at + (word & -word).bit_length() - 1
