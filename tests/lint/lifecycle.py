"""Draws the states of a request from the broker's table of transitions, and checks the drawing in
the docs: ``python -m tests.lint.lifecycle [--draw]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tokenbus.broker.lifecycle import TRANSITIONS, RequestState

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"


def diagram() -> str:
    """The table as a state diagram in Mermaid's syntax."""
    lines = ["```mermaid", "stateDiagram-v2", "    direction LR"]
    for state, changes in TRANSITIONS.items():
        shown = "[*]" if state is RequestState.NEW else state
        by_next: dict[RequestState, list[str]] = {}
        for event, after in changes.items():
            by_next.setdefault(after, []).append(event)
        for after, events in by_next.items():
            end = "[*]" if after is RequestState.GONE else after
            lines.append(f"    {shown} --> {end}: {', '.join(events)}")
    return "\n".join([*lines, "```"])


def main() -> None:
    """With ``--draw``, prints the diagram. Otherwise exits with an error if the docs do not contain
    this diagram."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="print the diagram")
    if parser.parse_args().draw:
        print(diagram())
    elif diagram() not in PAGE.read_text():
        sys.exit(
            f"{PAGE.name} has an old diagram of a request's states; replace it with the one "
            "that 'python -m tests.lint.lifecycle --draw' prints"
        )


if __name__ == "__main__":
    main()
