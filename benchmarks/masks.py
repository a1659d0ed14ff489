"""Compares the time for token masks in our grammar engine, llguidance, xgrammar and outlines-core.

The vocabulary is Tekken's, with 131,072 tokens. Everything runs on one thread. A step is an
engine's work for one token: it accepts the token and fills the next mask. The engines are called as
a worker calls them, and the time includes the copy into the mask buffer. In the *first pass*, a new
engine processes the texts. In the *second pass*, the same engine processes the texts again, and its
caches are full. Our engine and llguidance run each pass several times, in turn, and the time of a
step is the median. xgrammar and outlines-core run each pass once. ``_masks_guest.py`` measures our
engine alone, and ``_masks_comparison.py`` compares the engines.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence

from _masks_comparison import Comparison, Line
from _masks_engines import LLGuidance, Ours, OutlinesCore, XGrammar
from _masks_guest import c_file, first_masks, sequences, substring
from _masks_schema import Schemas
from _masks_world import World
from _report import arguments, report

ENGINES = (Ours.name, LLGuidance.name, XGrammar.name, OutlinesCore.name)

NOTES = {
    "c_mean_us": "microseconds to fill a mask in a C file of 565 lines, mean; second pass; at "
    "most 150",
    "c_p99_us": "microseconds to fill a mask in the C file, 99th percentile; second pass; at "
    "most 1,500",
    "c_first_mean_us": "microseconds to fill a mask in the C file, mean; first pass; at most 1,000",
    "c_first_p99_us": "microseconds to fill a mask in the C file, 99th percentile; first pass; "
    "at most 20,000",
    "c_append_us": "microseconds to append a token of the C file, mean",
    "regex_vs_llguidance": "time of our step divided by the time of llguidance's step, mean over "
    "the regexes; second pass; at most 1.0",
    "regex_first_vs_llguidance": "regex_vs_llguidance in the first pass",
    "regex_worst_vs_llguidance": "time of our step divided by the time of llguidance's step, for "
    "the regex with the largest result; second pass",
    "json_vs_llguidance": "time of our step under a yacc grammar of JSON, divided by the time of "
    "llguidance's step under a Lark grammar of JSON; second pass; at most 1.0",
    "json_first_vs_llguidance": "json_vs_llguidance in the first pass",
    "regex_us": "microseconds of a step in our engine, median over the regexes; second pass",
    "regex_us_llguidance": "regex_us for llguidance",
    "regex_us_xgrammar": "regex_us for xgrammar; only regexes that it supports",
    "regex_us_outlines_core": "regex_us for outlines-core; only regexes that it supports",
    "json_us": "microseconds of a step in our engine under a grammar of JSON, median over the "
    "texts; second pass",
    "json_us_llguidance": "json_us for llguidance",
    "json_us_xgrammar": "json_us for xgrammar",
    "substring_us": "microseconds of a step under the constraint substring of a text of 4 kB; "
    "first pass; at most 100",
    "substring_second_us": "substring_us in the second pass",
    "schema_overhead": "time of a round of our json_schema controller, divided by the time of a "
    "round of llguidance alone; only rounds that end with a mask; at most 1.3",
    "schema_overhead_forced": "schema_overhead for all rounds, including rounds in which our "
    "controller computes forced tokens",
    "schema_us": "microseconds of a round of our json_schema controller that ends with a mask",
    "schema_us_llguidance": "microseconds of the same round in llguidance alone",
    "first_mask_ms_regex": "milliseconds from a new regex to its first mask; slowest regex; at "
    "most 50",
    "first_mask_ms_c_cold": "milliseconds from the start of the C grammar to its first mask, "
    "without a cache on disk; at most 3,000",
    "first_mask_ms_c_warm": "first_mask_ms_c_cold, if tables and masks are cached on disk; at "
    "most 50",
    "sequence_start_us": "microseconds to start a sequence and to fill its first mask, which is "
    "cached; at most 1,000",
    "sequence_bytes": "bytes of memory for each further sequence that has half of the C file; at "
    "most 262,144",
}


def key(engine: str) -> str:
    """The suffix in the names of an engine's figures. It is empty for our engine."""
    return "" if engine == Ours.name else "_" + engine.replace("-", "_")


def compared(kind: str, lines: Sequence[Line]) -> dict[str, float]:
    """The figures for ``kind``, which is ``regex`` or ``json``."""
    ours, theirs = Ours.name, LLGuidance.name
    second = [line.again[ours] / line.again[theirs] for line in lines]
    first = [line.first[ours] / line.first[theirs] for line in lines]
    results = {
        f"{kind}_vs_llguidance": statistics.mean(second),
        f"{kind}_first_vs_llguidance": statistics.mean(first),
    }
    if kind == "regex":
        results["regex_worst_vs_llguidance"] = max(second)
    for engine in ENGINES:
        took = [line.again[engine] for line in lines if engine in line.again]
        if took:
            results[f"{kind}_us{key(engine)}"] = statistics.median(took)
    return results


def show(kind: str, lines: Sequence[Line], first_ms: dict[str, float]) -> None:
    """Prints a row for each case. For each engine, the row has the microseconds of a step in the
    first and in the second pass."""
    print(f"\n{'us a step: first, second pass':30}", *(f"{engine:>20}" for engine in ENGINES))
    for line in lines:
        cells = [
            f"{line.first[engine]:10,.1f}{line.again[engine]:10,.1f}"
            if engine in line.again
            else " " * 19 + "-"
            for engine in ENGINES
        ]
        facts = [f"{line.tokens:,} tokens"]
        if line.case in first_ms:
            facts.append(f"first mask {first_ms[line.case]:.0f} ms")
        facts += [f"{name} prepared {ms:,.0f} ms" for name, ms in line.prepared_ms.items()]
        if line.differing:
            facts.append(f"{line.differing} masks differ from llguidance's")
        print(f"{kind + ' ' + line.case:30}", *cells, " ", "; ".join(facts))


def main() -> None:
    """Runs all measurements and reports the figures."""
    options = arguments(__doc__)
    fresh, passes = (1, 3) if options.quick else (5, 11)
    world = World.make()
    gc.freeze()
    gc.disable()
    results, first_ms = first_masks(world, fresh)
    results |= sequences(world, 200)
    results |= c_file(world, fresh, passes)
    results |= substring(world, fresh)
    results |= Schemas(world).overhead(passes)
    comparison = Comparison(world, fresh, passes)
    regexes, texts = list(comparison.regexes()), list(comparison.json())
    results |= compared("regex", regexes) | compared("json", texts)
    report({name: results[name] for name in NOTES if name in results}, NOTES, options.json)
    if not options.json:
        show("regex", regexes, first_ms)
        show("json", texts, {})
        for name in comparison.missing:
            print(f"{name} is not installed")


if __name__ == "__main__":
    main()
