"""The output of the benchmarks: a table for people, or one JSON object."""

from __future__ import annotations

import argparse
import json


def arguments(what: str | None) -> argparse.Namespace:
    """The command line that every benchmark has."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="shorter, for a first look")
    return parser.parse_args()


def report(results: dict[str, float], notes: dict[str, str], as_json: bool) -> None:
    """Prints the results; ``notes`` says what each is and what it is to be."""
    if as_json:
        print(json.dumps({name: round(value, 4) for name, value in results.items()}))
        return
    width = max(map(len, results))
    for name, value in results.items():
        print(f"{name:{width}}  {value:>14,.3f}  {notes.get(name, '')}")
