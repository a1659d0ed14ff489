"""The messages to and from a process that compiles."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal[
    "llguidance", "shortest", "blame", "rewrite", "relax", "regex", "choice", "combination"
]
"""The kind of a task. ``llguidance`` checks a grammar, ``shortest`` searches for its shortest text,
``blame`` finds the faulty part of a refused grammar, ``rewrite`` rewrites a schema, and
``relax`` relaxes a schema. Other kinds compile tables."""


class Task(msgspec.Struct):
    """A task for a process that compiles."""

    kind: Kind
    cpu_s: float
    """Limit on the task's CPU time, in seconds. The kernel ends the process of a task that exceeds
    the limit (``process._serve``)."""
    grammar: bytes
    failed: str = ""
    """For ``blame``: the reason why the grammar was refused."""


class Done(msgspec.Struct):
    """The outcome of a task: tables or a rewritten schema, a shortest text, or the reason of a
    refusal."""

    tables: bytes = b""
    refused: str = ""
    shortest: bytes | None = None
    """For ``shortest``: the shortest text that a search found."""
