"""Compares our ``json_schema`` controller with llguidance alone on MaskBench's JSON schemas. Also
generates random texts under the schemas, and checks that they are valid. ``max_tokens`` is between
a schema's minimum and 400.

The vocabulary is Tekken's, with 131,072 tokens. The schemas and their texts are not part of this
repository: ``--maskbench`` is a ``.tar.gz`` of MaskBench's files (guidance-ai/jsonschemabench on
GitHub, ``maskbench/data``). Each of the ``--processes`` processes has one thread, a share of the
schemas, and a compile process for schemas that may be expensive. ``_schemas_masks.py`` compares the
masks, and ``_schemas_walks.py`` generates random texts.
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
    "compiled": "schemas that our controller compiles",
    "compiled_llguidance": "schemas that llguidance alone compiles",
    "passing": "schemas for which exactly the valid texts are accepted (at least llguidance's)",
    "passing_llguidance": "schemas for which llguidance alone accepts exactly the valid texts",
    "validation_errors": "schemas with a valid text that is refused (at most llguidance's)",
    "validation_errors_llguidance": "schemas with a valid text that llguidance alone refuses",
    "invalidation_errors": "schemas with an invalid text that is accepted (0)",
    "invalidation_errors_llguidance": "schemas with an invalid text that llguidance alone accepts",
    "mask_vs_llguidance": "ratio of mean step times in valid texts to llguidance (at most 1.1)",
    "mask_us": "us of CPU time of a step in our controller",
    "mask_us_llguidance": "us of CPU time of a step in llguidance alone",
    "first_mask_vs_llguidance": "ratio of mean times from schema to first mask (at most 1.5)",
    "first_mask_at_once_vs_llguidance": "ratio of CPU times, schemas without a compile process",
    "first_mask_at_once_share": "share of schemas without a compile process",
    "first_mask_ms": "ms from schema to first mask in our controller, at max_tokens 1024",
    "first_mask_ms_llguidance": "ms from schema to first mask in llguidance alone",
    "walks": "random walks, with max_tokens from a schema's minimum to 400",
    "closed_share": "share of walks whose text is valid for jsonschema (1.0)",
    "closed_by_us_share": "share of walks whose text the controller closed before max_tokens",
    "backtracks": "number of backtracks (0)",
    "taken_back_share": "ratio of removed tokens to the tokens of the texts",
    "closing_us_per_token": "us of CPU time per token to compute how to close a text (at most 15)",
    "closing_exceptions": "schemas whose texts are not closed (at most 0.5 % of all)",
    "longer_than_400_tokens": "schemas without walks, because their shortest value is longer",
    "minutes": "minutes of this run",
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
    """Measures everything and reports."""
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
"""The vocabulary. Forked processes inherit it."""


def _run(cases: list[Case], walks: int, until: float) -> tuple[MaskFigures, WalkFigures]:
    """Runs the cases of one process."""
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
