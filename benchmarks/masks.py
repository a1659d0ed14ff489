"""The cost of token masks, compared with llguidance, xgrammar and outlines-core, for Tekken's
131,072 tokens.

One thread, everything in one process. A step is the work of an engine for one token: accept it and
fill the next mask, through the calls that a worker makes, including the copy into the mask buffer.
A first pass is with an engine that is new to the grammar, a second pass with one that has processed
the same texts; each is the median of several, and the engines take turns. ``_masks_guest.py``
measures our engine alone, ``_masks_comparison.py`` compares it.
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
    "c_mean_us": "a mask along a C file of 565 lines, second pass (at most 150)",
    "c_p99_us": "the 99th percentile of these (at most 1,500)",
    "c_first_mean_us": "on the first pass (at most 1,000)",
    "c_first_p99_us": "(at most 20,000)",
    "c_append_us": "to append a token of that file",
    "regex_vs_llguidance": "time of a step over llguidance's, mean of the regexes (at most 1.0)",
    "regex_first_vs_llguidance": "the same on the first pass",
    "regex_worst_vs_llguidance": "the worst of the regexes, second pass",
    "json_vs_llguidance": "the yacc JSON over a Lark JSON, mean of the texts (at most 1.0)",
    "json_first_vs_llguidance": "the same on the first pass",
    "regex_us": "a step, median of the regexes, second pass",
    "regex_us_llguidance": "llguidance's",
    "regex_us_xgrammar": "xgrammar's, of the regexes that it supports",
    "regex_us_outlines_core": "outlines-core's, of the regexes that it supports",
    "json_us": "a step, median of the texts, second pass",
    "json_us_llguidance": "llguidance's",
    "json_us_xgrammar": "xgrammar's",
    "substring_us": "a step in 4 kB of text, first pass (at most 100)",
    "substring_second_us": "the same on a second pass",
    "schema_overhead": "json_schema by our controller over llguidance alone (at most 1.3)",
    "schema_overhead_forced": "including the rounds in which ours computes forced tokens",
    "schema_us": "a round of json_schema that ends in a mask",
    "schema_us_llguidance": "llguidance's",
    "first_mask_ms_regex": "from pattern to mask, the slowest regex (at most 50)",
    "first_mask_ms_c_cold": "from the grammar of C to mask (at most 3,000)",
    "first_mask_ms_c_warm": "with its tables and masks on disk (at most 50)",
    "sequence_start_us": "a sequence with its first round, the mask cached (at most 1,000)",
    "sequence_bytes": "one more sequence, in the middle of that C file (at most 262,144)",
}


def key(engine: str) -> str:
    """The suffix of an engine's figures; ours have none."""
    return "" if engine == Ours.name else "_" + engine.replace("-", "_")


def compared(kind: str, lines: Sequence[Line]) -> dict[str, float]:
    """The figures of regexes, or of JSON texts."""
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
    """A row for each case: microseconds of a step, first pass and second."""
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
