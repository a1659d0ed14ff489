"""Measures only our grammar engine: masks under a C grammar and under ``substring``, the time to a
first mask, and the cost of another sequence."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from pathlib import Path

from _masks_engines import Ours
from _masks_regexes import CASES
from _masks_world import C_FILE, MICRO, MILLI, TEXTS, World, p99
from tokenbus.grammars import library
from tokenbus.grammars.substring import compile_substring
from tokenbus.grammars.yacc import compile_grammar
from tokenbus.workers.controller.backends.constraints import Constraints
from tokenbus.workers.controller.backends.grammar.grammar_instance import GrammarInstance
from tokenbus.workers.controller.interface import Controller

_clock = time.perf_counter


def c_file(world: World, fresh: int, passes: int) -> dict[str, float]:
    """Walks a C file under the grammar of C. Returns the microseconds to fill a mask (mean and 99th
    percentile) and to append a token (mean). Each figure is the median over several passes."""
    tokens = world.tokens(C_FILE.read_text())
    tables = compile_grammar(library.grammar("c")).grammar.to_bytes()
    first, again, appends = [], [], []
    for number in range(fresh):
        guest = GrammarInstance(world.module, world.vocabulary, tables)
        first.append(_walk(world, guest, tokens)[0])
        if number == fresh - 1:
            for _ in range(passes):
                masks, appended = _walk(world, guest, tokens)
                again.append(masks)
                appends.append(statistics.mean(appended))
        guest.close()
    results: dict[str, float] = {}
    for name, walks in (("c", again), ("c_first", first)):
        results[f"{name}_mean_us"] = statistics.median(map(statistics.mean, walks)) * MICRO
        results[f"{name}_p99_us"] = statistics.median(map(p99, walks)) * MICRO
    results["c_append_us"] = statistics.median(appends) * MICRO
    return results


def _walk(
    world: World, guest: GrammarInstance, tokens: list[int]
) -> tuple[list[float], list[float]]:
    """Walks a text. Returns the seconds to fill each mask, and the seconds to append each token."""
    into, place = world.mask(), guest.start()
    began = _clock()
    guest.mask(place, into)
    masks, appends = [_clock() - began], []
    for token in tokens:
        began = _clock()
        count = guest.append(place, [token])
        appended = _clock()
        guest.mask(place, into)
        masks.append(_clock() - appended)
        appends.append(appended - began)
        if not count:
            raise SystemExit(f"token {token} of {C_FILE.name} is refused")
    guest.end(place)
    return masks, appends


def substring(world: World, fresh: int) -> dict[str, float]:
    """Microseconds of a step under the constraint ``substring``, whose argument is a text of 4 kB.
    The walked texts are parts of this text."""
    text = (TEXTS / "harbour.txt").read_text()
    tables = compile_substring(text).to_bytes()
    parts = [world.tokens(text[at : at + 400]) for at in range(0, len(text) - 400, 331)]
    first: list[float] = []
    again: list[float] = []
    for _ in range(fresh):
        ours = Ours(world.module, world.vocabulary, tables)
        for walks in (first, again):
            steps = [step for part in parts for step in ours.walk(part)]
            walks.append(statistics.mean(steps))
        ours.close()
    return {
        "substring_us": statistics.median(first) * MICRO,
        "substring_second_us": statistics.median(again) * MICRO,
    }


# --- through a worker's classes ------------------------------------------------------------------


def first_masks(world: World, times: int) -> tuple[dict[str, float], dict[str, float]]:
    """Measures the milliseconds from a constraint's start to its first mask. The first dict has the
    reported figures. The second dict has the milliseconds for each regular expression. Work that a
    worker does only once is excluded. Each time is the shortest of several runs with new
    ``Constraints``, because other work on the machine slows most runs."""
    by_regex = {
        case.name: min(
            _first_mask(world, Constraints(world.engine, None), "regex", _wrapped(case.pattern, i))
            for i in range(times)
        )
        * MILLI
        for case in CASES
    }
    cold = []
    with tempfile.TemporaryDirectory(prefix="tb-bench-") as name:
        for number in range(times):
            folder = Path(name, str(number))
            constraints = Constraints(world.engine, folder)
            cold.append(_first_mask(world, constraints, "yacc", "c", C_FILE.read_text()))
        warm = [
            _first_mask(world, Constraints(world.engine, folder), "yacc", "c")
            for _ in range(2 * times + 1)
        ]
    return {
        "first_mask_ms_regex": max(by_regex.values()),
        "first_mask_ms_c_cold": min(cold) * MILLI,
        "first_mask_ms_c_warm": min(warm) * MILLI,
    }, by_regex


def _wrapped(pattern: str, times: int) -> str:
    """Writes a pattern differently, so that it is compiled again. It still matches the same
    texts."""
    return "(?:" * times + pattern + ")" * times


def _first_mask(
    world: World, constraints: Constraints, name: str, arg: str, after: str = ""
) -> float:
    """Seconds from the start of the constraint ``name`` with the argument ``arg`` to its first
    mask. Then the text ``after`` is processed without timing, to fill the caches."""
    program = constraints.get(name)
    assert program is not None
    mask = world.mask()
    began = _clock()
    controller = program.start(world.host(arg))
    _round(controller, mask)
    seconds = _clock() - began
    for token in world.tokens(after):
        controller.post_process([token], 0)
        controller.mid_process([0], mask)
    controller.close()
    constraints.close()
    del controller, program, constraints
    gc.collect()
    return seconds


def _round(controller: Controller, mask: memoryview) -> None:
    """Runs the first round of a sequence."""
    controller.init_prompt([1, 2, 3])
    controller.pre_process()
    controller.mid_process([0], mask)


def sequences(world: World, count: int) -> dict[str, float]:
    """Measures the cost of another sequence under the C grammar. ``sequence_start_us`` is the time
    in microseconds from the sequence's start to its first mask. An earlier sequence has already
    computed this mask. ``sequence_bytes`` is the number of bytes by which the sandbox's memory
    grows for a sequence that has half of a C file."""
    constraints = Constraints(world.engine, None)
    program = constraints.get("yacc")
    assert program is not None
    mask = world.mask()
    kept = program.start(world.host("c"))
    _round(kept, mask)
    starts = []
    for _ in range(count):
        began = _clock()
        controller = program.start(world.host("c"))
        _round(controller, mask)
        starts.append(_clock() - began)
        controller.close()
    kept.close()
    constraints.close()

    tokens = world.tokens(C_FILE.read_text())
    tables = compile_grammar(library.grammar("c")).grammar.to_bytes()
    guest = GrammarInstance(world.module, world.vocabulary, tables)
    before = guest.size
    for _ in range(count):
        if guest.append(guest.start(), tokens[: len(tokens) // 2]) < len(tokens) // 2:
            raise SystemExit(f"{C_FILE.name} is refused")
    grown = guest.size - before
    guest.close()
    return {
        "sequence_start_us": statistics.median(starts) * MICRO,
        "sequence_bytes": grown / count,
    }
