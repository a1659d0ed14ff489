"""The bounds of compiling one grammar, and the error of one that costs more."""

from __future__ import annotations

from dataclasses import dataclass

TURN_S = 30.0
"""How long a grammar waits for a process, in seconds; then its request has to be sent again."""
WALL_S = 120.0
"""Likewise how long the process may take by the clock. A grammar is refused by CPU time alone: this
one is exceeded only where the machine is so busy that the process gets hardly any."""
STACK_BYTES = 3 * 1024 * 1024
"""Less than the worker's threads have (``sandbox.HOST_STACK_BYTES``): a grammar that compiles in
the process compiles there."""
BLAME_SHARE = 0.25
"""How much longer it may take to find the part of a refused grammar that cost the most."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """For the compilation of one grammar."""

    cpu_s: float = 1.5
    """CPU time, in seconds; the setting ``grammar_compile_s``."""
    memory_bytes: int = 1024**3
    """Memory; the setting ``grammar_compile_bytes``."""

    @property
    def too_slow(self) -> str:
        """The error of a grammar that takes longer."""
        return (
            f"compiling it takes more than {self.cpu_s:g} s of CPU time, the limit that "
            "grammar_compile_s sets"
        )

    @property
    def too_large(self) -> str:
        """The error of a grammar that takes more memory."""
        return (
            f"compiling it takes more than {self.memory_bytes >> 20} MiB of memory, the limit that "
            "grammar_compile_bytes sets"
        )


TOO_DEEP = "it is nested too deeply: llguidance's stack overflowed"


class RefusedGrammar(Exception):
    """A grammar that is not valid or that exceeds the bounds; the message is the reason."""
