"""The jobs that the pool's threads run. A job is a single round or a batch of rounds. The sequences
of a batch have the same grammar, or guests in the same process.

A single round costs about ten microseconds of Python and two calls of the guest. A batch needs one
call of the guest for all of its sequences, and less Python for each sequence.

A round with a grammar is *usual* if its token is accepted, its mask is cached, and the grammar does
not force a text. The other rounds of a batch run one by one after the batch, on the same thread.
One thread runs the whole batch. With several threads, the threads would wait for each other,
because the Wasm instance of a grammar runs one call at a time.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from ...protocol.errors import TokenbusError
from ...protocol.worker_messages import StepResult, StepSequence
from .fair_jobs import Job
from .first_rounds import note_time
from .guest_clock import thread_cpu_s
from .interface import Batch
from .meters import Meter
from .pending_result import Part, PendingResult
from .rounds import ControlledSequence
from .sequence_group import Round, SequenceGroup

log = logging.getLogger(__name__)

SLOW_S = 0.0005
"""If a round of a sequence takes longer than this time, in seconds, a separate thread is woken for
the sequence's next round."""


class Begun(NamedTuple):
    """A sequence of a STEP, and the round to run."""

    stepped: StepSequence
    group: SequenceGroup
    sequence: ControlledSequence
    round: Round


class _Turn(NamedTuple):
    """One sequence's round in a batch."""

    group: SequenceGroup
    sequence: ControlledSequence
    place: int
    """The number of the sequence in the batch."""
    token: int
    alone: Job
    """The job that runs this round outside of the batch."""


def round_jobs(pending: PendingResult, begun: Sequence[Begun]) -> tuple[dict[str, list[Job]], int]:
    """Returns the jobs of a STEP's rounds for each tenant, and the number of threads to wake for
    all jobs.

    ``pending`` receives the results. A batch with sequences of several tenants is a job of the
    tenant "".
    """
    batches: dict[Batch, list[_Turn]] = {}
    alone: dict[str, list[Job]] = {}
    hands = 1
    for stepped, group, sequence, round_ in begun:
        job = partial(_run, pending, group, sequence, round_)
        found = _batch(stepped, group, sequence)
        if found is None:
            alone.setdefault(group.tenant, []).append(job)
            hands += sequence.slow
            continue
        batch, place = found
        turn = _Turn(group, sequence, place, stepped.tokens[0], job)
        batches.setdefault(batch, []).append(turn)
    jobs: dict[str, list[Job]] = {}
    for batch, turns in batches.items():
        tenants = {turn.group.tenant for turn in turns}
        tenant = tenants.pop() if len(tenants) == 1 else ""
        jobs.setdefault(tenant, []).append(partial(_run_batch, pending, batch, turns))
    for tenant, rounds in alone.items():
        jobs.setdefault(tenant, []).extend(rounds)
    return jobs, hands


def run_woken(pending: PendingResult, group: SequenceGroup, round_: Round) -> None:
    """Runs the round of a sequence that was woken."""
    results, _ = _measured(group, round_)
    pending.add(group, results)


def _batch(
    stepped: StepSequence, group: SequenceGroup, sequence: ControlledSequence
) -> tuple[Batch, int] | None:
    if sequence.batched is None or len(stepped.tokens) != 1 or stepped.draft:
        return None
    if stepped.ended is not None or group.inspect or group.events is not None:
        return None
    return sequence.batched.batch(stepped.tokens[0])


def _run(
    pending: PendingResult, group: SequenceGroup, sequence: ControlledSequence, round_: Round
) -> None:
    results, duration_s = _measured(group, round_)
    sequence.slow = duration_s > SLOW_S
    pending.add(group, results)


def _run_batch(pending: PendingResult, batch: Batch, turns: Sequence[_Turn]) -> None:
    cpu_began = thread_cpu_s()
    for turn in turns:
        turn.group.see_changes(turn.sequence)
    try:
        done = batch.rounds(
            [(turn.place, turn.token) for turn in turns], [turn.sequence.mask for turn in turns]
        )
    except BaseException as error:
        # After an error, the batch accepts no further calls. Each sequence now runs its round
        # separately, and that round ends with an error.
        if not isinstance(error, TokenbusError):
            log.exception("a batch of %d rounds failed", len(turns))
        done = [False] * len(turns)
    parts: list[Part] = []
    alone: list[Job] = []
    meters: Counter[Meter] = Counter()
    for turn, over in zip(turns, done, strict=True):
        if over:
            turn.sequence.slow = False
            parts.append((turn.group, turn.group.batched(turn.sequence, turn.token)))
            meters[turn.group.meter] += 1
        else:
            alone.append(turn.alone)
    if parts:
        share = (thread_cpu_s() - cpu_began) / len(parts)
        for meter, rounds in meters.items():
            meter.add(rounds, rounds * share)
        pending.add_all(parts)
    for job in alone:
        try:
            job()
        except BaseException:
            # The failure of one job must not stop the jobs after it.
            log.exception("a round after a batch failed")


def _measured(group: SequenceGroup, round_: Round) -> tuple[list[StepResult], float]:
    """The results of a round, and its duration in seconds."""
    meter = group.meter
    cpu_began = meter.begin()
    began = time.perf_counter()
    results = round_()
    duration_s = time.perf_counter() - began
    meter.end(cpu_began, duration_s)
    if group.inspect:
        note_time(results, duration_s)
    if group.events is not None:
        group.events.add(results, duration_s)
    return results, duration_s
