"""Runs the requests undisturbed, then repeatedly under blows (signals that kill or stop processes),
and reports the results."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import quantiles

from .load import HUNG_S, Load, Move, Notes, again_and_again, clients_of, one_round
from .outcomes import Outcome
from .schedule import KINDS, Blow, blows
from .system import System
from .workloads import Workload, modules, workloads

BETWEEN_S = 2.0
"""Seconds between two blows."""
OF_THE_BROKER = re.compile("the connection( to the broker)? was lost")
"""Matches the notice of a request that is sent again after its broker has died. A request without
entries, or one that has ended in the meantime, may be sent again."""
RECOVER_S = 30.0
"""Maximum time that the next blow waits until the streams continue, in seconds."""


@dataclass
class Report:
    """The results of a run."""

    seed: int
    kinds: Sequence[str]
    streams: int = 0
    """Number of different requests, whose undisturbed outcomes the run compares."""
    dealt: list[tuple[float, Blow, str | None]] = field(default_factory=list)
    """The time, the blow, and the name of the slot that it hit. The name is None if the process did
    not run."""
    notes: Notes = field(default_factory=Notes)
    failures: list[str] = field(default_factory=list)
    """Streams that were lost or duplicated, that hung or failed, or that were sent again."""
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}: {self.notes.ended} streams of {self.streams} kinds of request, "
            f"{self.notes.tokens} tokens, {self.seconds:.0f} s; blows: "
            + ", ".join(f"{n} {what}" for what, n in sorted(self._counts().items())),
            f"notices: {dict(self.notes.notices)}",
            f"sent again after the broker's death: {self._of_the_broker()}",
        ]
        for what, moves in self._by_blow().items():
            pauses = [move.pause_s for move in moves]
            after = [move.noticed_s for move in moves]
            lines.append(
                f"{what}: {len(moves)} streams moved; pause {_spread(pauses)}; without the "
                f"detection: {_spread(after)}"
            )
        if self.notes.cut_off:
            lines.append(
                f"{len(self.notes.cut_off)} times a stream's broker had died or stopped; its pause "
                + _spread(self.notes.cut_off)
            )
        lines += [f"FAILED {failure}" for failure in self.failures] or ["every stream was the same"]
        return "\n".join(lines)

    def _of_the_broker(self) -> int:
        return sum(bool(OF_THE_BROKER.search(what)) for what in self.notes.again)

    def _counts(self) -> Counter[str]:
        return Counter(
            f"{blow.kind} {_what_was_done(blow)}"
            for _, blow, slot in self.dealt
            if slot is not None
        )

    def _by_blow(self) -> dict[str, list[Move]]:
        """Groups the moves by the last blow to the worker that the stream left, or to the broker.
        Each move is also in the group ``all killed`` or in the group ``all others``."""
        found: dict[str, list[Move]] = {}
        for move in self.notes.moves:
            blows = [blow for at, blow, slot in self.dealt if at < move.at and slot == move.left]
            before = [b for at, b, slot in self.dealt if at < move.at and _is_broker(slot)]
            last = max(blows + before, key=lambda blow: blow.number, default=None)
            what = "unasked" if last is None else f"{last.kind} {_what_was_done(last)}"
            found.setdefault(what, []).append(move)
            done = "all killed" if last is not None and last.stop_s is None else "all others"
            found.setdefault(done, []).append(move)
        return dict(sorted(found.items()))


def _is_broker(slot: str | None) -> bool:
    return slot is not None and slot.startswith("broker")


def _what_was_done(blow: Blow) -> str:
    return "killed" if blow.stop_s is None else "stopped"


def _spread(pauses: list[float]) -> str:
    cuts = quantiles([*pauses, *pauses], n=100, method="inclusive")
    return f"p50 {cuts[49]:.2f} s, p99 {cuts[98]:.2f} s"


async def run(
    system: System,
    seed: int,
    kinds: Sequence[str] = KINDS,
    seconds: float | None = None,
    count: int | None = None,
    patient: bool = False,
    only: str = "",
    undisturbed: int = 1,
    between_s: float = BETWEEN_S,
    only_kills: bool = False,
) -> Report:
    """Runs the requests undisturbed, then under blows for a time or for a number of blows.

    ``patient``: the next blow waits until every stream has continued after the previous blow.
    ``only``: a pattern of the requests' names. ``undisturbed``: number of rounds without blows,
    whose outcomes must be equal. ``between_s``: seconds between two blows. ``only_kills``:
    processes are killed but not stopped.
    """
    report = Report(seed, kinds)
    wasm = modules()
    requests = [w for w in workloads(set(wasm)) if re.search(only, w.name)]
    report.streams = len(requests)
    async with clients_of(system, wasm) as load:
        wanted = await one_round(load, requests)
        report.failures += [
            f"{w.name}, undisturbed: {o.error}"
            for w, o in zip(requests, wanted, strict=True)
            if o.error
        ]
        for _ in range(1, undisturbed):
            _compare(report, requests, wanted, await one_round(load, requests))
        print(
            f"undisturbed: {load.notes.ended} streams, {load.notes.tokens} tokens, notices "
            f"{dict(load.notes.notices)}",
            flush=True,
        )
        if report.failures or count == 0:
            return report
        load.notes = report.notes
        began = time.monotonic()
        schedule = islice(blows(seed, kinds, only_kills), count)
        await _under_blows(
            report, system, load, requests, wanted, seconds, schedule, between_s, patient
        )
        report.seconds = time.monotonic() - began
        report.failures += [
            f"sent again: {what}" for what in load.notes.again if not OF_THE_BROKER.search(what)
        ]
    return report


async def _under_blows(
    report: Report,
    system: System,
    load: Load,
    requests: Sequence[Workload],
    wanted: Sequence[Outcome],
    seconds: float | None,
    schedule: Iterable[Blow],
    between_s: float,
    patient: bool,
) -> None:
    over = asyncio.Event()

    def compare(number: int, outcome: Outcome) -> None:
        _compare(report, [requests[number]], [wanted[number]], [outcome])

    running = asyncio.create_task(again_and_again(load, requests, over, compare))
    began = time.monotonic()
    try:
        for blow in schedule:
            at = time.monotonic()
            await asyncio.sleep(between_s)
            if patient:
                await _all_went_on(load, at)
            if seconds is not None and time.monotonic() - began > seconds:
                break
            load.cut_off(system.front_of(blow))
            slot = system.suffer(blow)
            report.dealt.append((time.monotonic(), blow, slot))
            _tell(report, load, began)
        if patient:
            await asyncio.sleep(BETWEEN_S)
    finally:
        over.set()
    try:
        await running
    except TimeoutError:
        hung = sorted(load.progress)
        report.failures += [f"{name}: hung for {HUNG_S:.0f} s after the last blow" for name in hung]
    finally:
        system.go_on()


async def _all_went_on(load: Load, since: float) -> None:
    """Waits until each stream has received an entry after the time ``since``, or has ended, but at
    most ``RECOVER_S``."""
    streams = [name for name, at in load.progress.items() if at < since]
    deadline = time.monotonic() + RECOVER_S
    while time.monotonic() < deadline:
        if all(load.progress.get(name, since) >= since for name in streams):
            return
        await asyncio.sleep(0.05)
    still = [name for name in streams if load.progress.get(name, since) < since]
    print(f"no entry in {RECOVER_S:.0f} s: {', '.join(still)}", flush=True)


def _compare(
    report: Report,
    requests: Sequence[Workload],
    wanted: Sequence[Outcome],
    outcomes: Sequence[Outcome],
) -> None:
    for workload, expected, outcome in zip(requests, wanted, outcomes, strict=True):
        difference = expected.difference(outcome)
        if difference is not None:
            report.failures.append(f"{workload.name}: {difference}")
            print(f"FAILED {report.failures[-1]}", flush=True)


def _tell(report: Report, load: Load, began: float) -> None:
    at, blow, slot = report.dealt[-1]
    what = "killed" if blow.stop_s is None else f"stopped for {blow.stop_s} s"
    print(
        f"{at - began:6.1f} s  {blow.number:4} {slot or f'{blow.kind} (gone)'} {what}; "
        f"{load.notes.ended} ended, {len(load.notes.moves)} moved, {len(report.failures)} failed",
        file=sys.stderr,
        flush=True,
    )
