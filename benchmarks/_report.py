"""Prints the results of a benchmark as a table or as one JSON object."""

from __future__ import annotations

import argparse
import json


def arguments(what: str | None, **numbers: int) -> argparse.Namespace:
    """Parses the command line of a benchmark. ``numbers`` has the names of further options, whose
    values are integers, and their defaults."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="run a shorter measurement")
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def report(results: dict[str, float], notes: dict[str, str], as_json: bool) -> None:
    """Prints the results. ``notes`` describes each result, and says its target if it has one."""
    if as_json:
        print(json.dumps({name: round(value, 4) for name, value in results.items()}))
        return
    width = max(map(len, results))
    for name, value in results.items():
        print(f"{name:{width}}  {value:>14,.3f}  {notes.get(name, '')}")
