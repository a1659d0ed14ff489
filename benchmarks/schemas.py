"""Compares our ``json_schema`` controller with llguidance alone on MaskBench's JSON schemas. Also
generates random texts under the schemas and checks that they are valid. The ``max_tokens`` of such
a text is at least the schema's minimum and at most 400.

The vocabulary is Tekken's, with 131,072 tokens. The schemas and their texts are not part of this
repository: ``--maskbench`` is a ``.tar.gz`` of MaskBench's files (guidance-ai/jsonschemabench on
GitHub, ``maskbench/data``). ``--processes`` processes each measure a part of the schemas, on one
thread. Each of them has a compile process for schemas that may be expensive. ``_schemas_masks.py``
compares the masks, and ``_schemas_walks.py`` generates random texts.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from _masks_world import World
from _report import report
from _schemas_cases import WHERE, Case, read_cases
from _schemas_masks import MaskFigures, Masks
from _schemas_walks import WalkFigures, Walks
from tokenbus.workers.controller.backends.llguidance.matchers import Matchers
from tokenbus.workers.controller.backends.llguidance.schema_and_lark import JsonSchemaProgram

NOTES = {
    "schemas": "number of schemas in this run",
    "compiled": "number of schemas that our controller compiles",
    "compiled_llguidance": "number of schemas that llguidance alone compiles",
    "passing": "number of schemas under which our controller accepts exactly the valid texts; at "
    "least passing_llguidance",
    "passing_llguidance": "number of schemas under which llguidance alone accepts exactly the "
    "valid texts",
    "validation_errors": "number of schemas under which our controller refuses a valid text; at "
    "most validation_errors_llguidance",
    "validation_errors_llguidance": "number of schemas under which llguidance alone refuses a "
    "valid text",
    "invalidation_errors": "number of schemas under which our controller accepts an invalid "
    "text; must be 0",
    "invalidation_errors_llguidance": "number of schemas under which llguidance alone accepts an "
    "invalid text",
    "mask_vs_llguidance": "mask_us divided by mask_us_llguidance; at most 1.1",
    "mask_us": "microseconds of CPU time of a step of our controller in valid texts, mean",
    "mask_us_llguidance": "microseconds of CPU time of the same step of llguidance alone, mean",
    "first_mask_vs_llguidance": "first_mask_ms divided by first_mask_ms_llguidance; at most 1.5",
    "first_mask_at_once_vs_llguidance": "first_mask_vs_llguidance for schemas without a compile "
    "process",
    "first_mask_at_once_share": "share of schemas without a compile process",
    "first_mask_ms": "milliseconds from a schema to its first mask in our controller, mean; "
    "max_tokens is 1,024",
    "first_mask_ms_llguidance": "milliseconds from a schema to its first mask in llguidance "
    "alone, mean",
    "walks": "number of random texts",
    "closed_share": "share of random texts that jsonschema accepts; must be 1.0",
    "closed_by_us_share": "share of random texts that our controller completed itself, to end "
    "within max_tokens",
    "backtracks": "number of times that our controller removed tokens of a random text; should "
    "be 0",
    "taken_back_share": "number of removed tokens, divided by the number of tokens of all random "
    "texts",
    "closing_us_per_token": "microseconds of CPU time per token, in which our controller "
    "computes how to complete a text; at most 15",
    "closing_exceptions": "number of schemas whose texts our controller cannot complete; at most "
    "0.5 % of all schemas",
    "longer_than_400_tokens": "number of schemas without random texts, because their shortest "
    "value has more than 400 tokens",
    "minutes": "duration of this run in minutes",
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="60 schemas and 4 walks")
    parser.add_argument("--maskbench", type=Path, default=WHERE, help=f"the archive ({WHERE})")
    parser.add_argument("--schemas", type=int, default=1_000_000, help="maximum number of schemas")
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="time after which no schema begins"
    )
    parser.add_argument("--processes", type=int, default=1, help="number of processes")
    parser.add_argument("--walks", type=int, default=20, help="random walks per schema")
    options = parser.parse_args()
    if options.quick:
        options.schemas, options.walks = min(options.schemas, 60), min(options.walks, 4)
    return options


def main() -> None:
    """Runs all measurements and reports the figures."""
    options = _arguments()
    began = time.monotonic()
    cases = read_cases(options.maskbench, options.schemas)
    _shared.append(World.make())
    shares = [cases[number :: options.processes] for number in range(options.processes)]
    masks, walks = MaskFigures(), WalkFigures()
    with get_context("fork").Pool(options.processes) as pool:
        run = partial(_run, walks=options.walks, until=began + 60 * options.minutes)
        for of_masks, of_walks in pool.imap(run, shares):
            masks.add(of_masks)
            walks.add(of_walks)
    results = masks.results() | walks.results()
    results["minutes"] = (time.monotonic() - began) / 60
    report(results, NOTES, options.json)
    for kind, found in (("not closed", walks.exceptions), ("not whole", walks.failures)):
        for name, why in found.items():
            print(f"{name}: {kind}: {why}", file=sys.stderr)


_shared: list[World] = []
"""Contains the ``World``, so that forked processes inherit it."""


def _run(cases: list[Case], walks: int, until: float) -> tuple[MaskFigures, WalkFigures]:
    """Runs the cases of one process. Does not begin another case after the time ``until``."""
    [world] = _shared
    matchers = Matchers()
    program = JsonSchemaProgram(matchers)
    program.start(world.host("{}"))  # Reads the tokenizer before the measurement.
    compared, walked = Masks(world, program), Walks(world, program)
    gc.freeze()
    gc.disable()
    for number, case in enumerate(cases):
        if time.monotonic() > until:
            break
        compared.add(case)
        walked.add(case, walks)
        if number % 50 == 49:
            gc.collect()
    matchers.close()
    return compared.figures, walked.figures


if __name__ == "__main__":
    main()
