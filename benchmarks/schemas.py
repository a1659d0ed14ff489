"""JSON schemas of MaskBench by our controller, compared with llguidance alone, for Tekken's 131,072
tokens; and whether random texts under them are whole at every ``max_tokens``.

The schemas and their texts are not part of this repository: ``--maskbench`` is a ``.tar.gz`` of
files of MaskBench (guidance-ai/jsonschemabench on GitHub, ``maskbench/data``). Each of
``--processes`` has a share of them and one thread, beside the process that bounds the compilation
of a schema that may be expensive. ``_schemas_masks.py`` compares, ``_schemas_walks.py`` walks.
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
    "schemas": "schemas in this run",
    "compiled": "schemas that we take",
    "compiled_llguidance": "those that llguidance alone takes",
    "passing": "schemas whose texts are all judged rightly (at least llguidance's)",
    "passing_llguidance": "llguidance's",
    "validation_errors": "schemas with a valid text that is refused (at most llguidance's)",
    "validation_errors_llguidance": "llguidance's",
    "invalidation_errors": "schemas with an invalid text that is accepted (0)",
    "invalidation_errors_llguidance": "llguidance's",
    "mask_vs_llguidance": "a step along valid texts over one of llguidance, means (at most 1.1)",
    "mask_us": "our step, in CPU time",
    "mask_us_llguidance": "llguidance's",
    "first_mask_vs_llguidance": "from the schema to the first mask, means (at most 1.5)",
    "first_mask_at_once_vs_llguidance": "in CPU time, of the schemas that need no process",
    "first_mask_at_once_share": "how many these are",
    "first_mask_ms": "ours at max_tokens 1024, with what bounds it",
    "first_mask_ms_llguidance": "llguidance's",
    "walks": "random walks, from the least max_tokens of a schema to 400",
    "closed_share": "walks whose text parses and validates with jsonschema (1.0)",
    "closed_by_us_share": "walks whose text was closed before max_tokens",
    "backtracks": "times that tokens were taken back (0)",
    "taken_back_share": "tokens taken back over tokens of the texts",
    "closing_us_per_token": "CPU time of closing over tokens, beyond the mask (at most 15)",
    "closing_exceptions": "schemas that are not closed (at most 0.5 % of them)",
    "longer_than_400_tokens": "schemas without walks, as their shortest value is longer",
    "minutes": "of this run",
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="60 schemas and 4 walks")
    parser.add_argument("--maskbench", type=Path, default=WHERE, help=f"the archive ({WHERE})")
    parser.add_argument("--schemas", type=int, default=1_000_000, help="at most so many of them")
    parser.add_argument("--minutes", type=float, default=1e9, help="no schema is begun after them")
    parser.add_argument("--processes", type=int, default=1, help="each has a share of the schemas")
    parser.add_argument("--walks", type=int, default=20, help="random walks of each schema")
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
"""The vocabulary, which the processes have from the one that starts them."""


def _run(cases: list[Case], walks: int, until: float) -> tuple[MaskFigures, WalkFigures]:
    """The share of one process."""
    [world] = _shared
    matchers = Matchers()
    program = JsonSchemaProgram(matchers)
    program.start(world.host("{}"))  # The tokenizer is read.
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
