"""Compares the cost of token masks in our grammar engine, llguidance, xgrammar and outlines-core.

The vocabulary is Tekken's, with 131,072 tokens. Everything runs on one thread. A step is an
engine's work for one token: it accepts the token and fills the next mask. The engines are called as
a worker calls them. The time includes the copy into the mask buffer. There are two kinds of passes
over the texts. In a first pass, the engine is new. In a second pass, the engine has already
processed the same texts. Our engine and llguidance take turns, with several passes of each kind.
The time of a step is the median of these passes. xgrammar and outlines-core run one pass of each
kind. ``_masks_guest.py`` measures our engine alone, and ``_masks_comparison.py`` compares the
engines.
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
    "c_mean_us": "us of a mask in a C file of 565 lines, mean, second pass (at most 150)",
    "c_p99_us": "us of a mask in the C file, 99th percentile, second pass (at most 1,500)",
    "c_first_mean_us": "us of a mask in the C file, mean, first pass (at most 1,000)",
    "c_first_p99_us": "us of a mask in the C file, 99th percentile, first pass (at most 20,000)",
    "c_append_us": "us to append a token of the C file",
    "regex_vs_llguidance": "ratio of step times to llguidance, mean of regexes (at most 1.0)",
    "regex_first_vs_llguidance": "ratio of step times to llguidance, regexes, first pass",
    "regex_worst_vs_llguidance": "ratio of step times to llguidance, worst regex, second pass",
    "json_vs_llguidance": "ratio of step times, yacc JSON to Lark JSON (at most 1.0)",
    "json_first_vs_llguidance": "ratio of step times, yacc JSON to Lark JSON, first pass",
    "regex_us": "us of a step in our engine, median of the regexes, second pass",
    "regex_us_llguidance": "us of a step in llguidance, median of the regexes, second pass",
    "regex_us_xgrammar": "us of a step in xgrammar, median of the regexes that it supports",
    "regex_us_outlines_core": "us of a step in outlines-core, median of its supported regexes",
    "json_us": "us of a step in our engine, median of the JSON texts, second pass",
    "json_us_llguidance": "us of a step in llguidance, median of the JSON texts, second pass",
    "json_us_xgrammar": "us of a step in xgrammar, median of the JSON texts",
    "substring_us": "us of a step of substring, 4 kB of text, first pass (at most 100)",
    "substring_second_us": "us of a step of substring, 4 kB of text, second pass",
    "schema_overhead": "ratio of our json_schema controller to llguidance alone (at most 1.3)",
    "schema_overhead_forced": "schema_overhead over all rounds, also those with forced tokens",
    "schema_us": "us of a round of json_schema that ends in a mask",
    "schema_us_llguidance": "us of a round of llguidance alone that ends in a mask",
    "first_mask_ms_regex": "ms from pattern to first mask, slowest regex (at most 50)",
    "first_mask_ms_c_cold": "ms from the C grammar to the first mask (at most 3,000)",
    "first_mask_ms_c_warm": "ms to the first mask, with tables and masks on disk (at most 50)",
    "sequence_start_us": "us to start a sequence with its first, cached mask (at most 1,000)",
    "sequence_bytes": "bytes of memory for each sequence with half of the C file (at most 262,144)",
}


def key(engine: str) -> str:
    """The suffix of the names of an engine's figures; empty for our engine."""
    return "" if engine == Ours.name else "_" + engine.replace("-", "_")


def compared(kind: str, lines: Sequence[Line]) -> dict[str, float]:
    """The figures of the regexes or of the JSON texts."""
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
    """Prints a row for each case, with the microseconds of a step in the first and second pass."""
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
    """Measures everything and reports."""
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
