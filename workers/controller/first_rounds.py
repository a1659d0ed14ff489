"""Handles START: creates a controller and runs its first round, or replays all rounds that ran on
another worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from ...protocol.errors import Code, RequestError, TokenbusError
from ...protocol.logs import about
from ...protocol.worker_messages import Start, StepResult
from .backends.healing import HealingProgram
from .interface import Program
from .meters import Meters
from .pending_result import PendingResult
from .pool import Pool
from .programs import Programs
from .replays import Steps, failed_start
from .sequence_group import SequenceGroup
from .tokens.vocabulary import TokenizerVocabulary

log = logging.getLogger(__name__)

SLICE_S = 0.005
"""Seconds for which a replay runs without interruption (a *slice*). The replay then passes its
thread to waiting requests, or pauses if rounds are queued."""
PAUSE_S = 0.0005
"""Seconds for which a replay pauses after each slice if rounds are queued. Without the pause, the
replay would keep the GIL, which these rounds need."""


class FirstRounds:
    """Runs the first rounds of requests in the pool ``starts``, while later rounds of other
    requests run in the pool ``rounds``."""

    def __init__(self, programs: Programs, meters: Meters, starts: Pool, rounds: Pool) -> None:
        self._programs = programs
        self._meters = meters
        self._starts = starts
        self._rounds = rounds

    def submit(
        self,
        pending: PendingResult,
        group: SequenceGroup,
        start: Start,
        vocabulary: TokenizerVocabulary | None,
        error: str,
        refuse: Callable[[str], None],
    ) -> None:
        """Begins a request. Its results are added to ``pending``. ``error``: the reason why
        ``vocabulary`` is None. If the request's controller is unknown, ``refuse`` is called with a
        message, and the request has no results."""
        steps = self._steps(group, start, vocabulary, error, refuse)
        self._starts.submit([partial(self._run, pending, group, steps)], tenant=group.tenant)

    def _steps(
        self,
        group: SequenceGroup,
        start: Start,
        vocabulary: TokenizerVocabulary | None,
        error: str,
        refuse: Callable[[str], None],
    ) -> Steps:
        """Runs the first round, or all rounds of a replay. Yields after each round of a replay.
        Every failure becomes a result, except that ``refuse`` handles an unknown controller."""
        try:
            if vocabulary is None:
                raise RequestError(Code.UNSUPPORTED, error, path="$.controller")
            try:
                program: Program = self._programs.get(group.tenant, start.controller, group.owner)
            except RequestError as failed:
                if failed.code != Code.UNKNOWN_CONTROLLER:
                    raise
                refuse(failed.message)
                return []
            if start.healed is not None:
                program = HealingProgram(program, start.healed)
            group.meter = self._meters.of(start.controller, group.tenant)
            if not start.replay:
                with group.meter.measured():
                    return group.begin(program, vocabulary, start.prompt, start.n)
            steps = group.begin_again(program, vocabulary, start.prompt, start.n, start.replay)
            while True:
                try:
                    with group.meter.measured():
                        next(steps)
                except StopIteration as ended:
                    results: list[StepResult] = ended.value
                    return results
                yield
        except TokenbusError as failed:
            return failed_start(group.request, start.replay, failed.message, failed.code)
        except GeneratorExit:
            raise
        except BaseException as failed:  # This includes panics of native libraries.
            number = about(group.request)
            log.exception("the controller %s cannot be started", start.controller, extra=number)
            text = f"the controller worker failed: {failed!r}"
            return failed_start(group.request, start.replay, text)

    def _run(
        self, pending: PendingResult, group: SequenceGroup, steps: Steps, spent_s: float = 0.0
    ) -> None:
        """Runs the first rounds of a request. If other requests wait at the end of a slice, the
        remaining rounds are queued again. ``spent_s``: the seconds that earlier slices took."""
        began = slice_began = time.perf_counter()
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                results: list[StepResult] = ended.value
                break
            now = time.perf_counter()
            if now - slice_began < SLICE_S:
                continue
            if self._starts.backlog:
                rest = partial(self._run, pending, group, steps, spent_s + now - began)
                self._starts.submit([rest], tenant=group.tenant)
                return
            if self._rounds.backlog:
                time.sleep(PAUSE_S)
            slice_began = time.perf_counter()
        duration_s = spent_s + time.perf_counter() - began
        if group.inspect:
            note_time(results, duration_s)
        if group.events is not None and results:
            group.events.add(results, duration_s)
        pending.add(group, results)


def note_time(results: Sequence[StepResult], seconds: float) -> None:
    """Stores ``seconds``, the duration of a round, in the last result of each sequence of the
    round."""
    for result in {result.seq: result for result in results}.values():
        result.round_us = round(1e6 * seconds)
