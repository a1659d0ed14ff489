"""The bounds of compiling one grammar, and the error for a grammar that exceeds them."""

from __future__ import annotations

from dataclasses import dataclass

TURN_S = 30.0
"""Maximum time that a grammar waits for a process, in seconds; after that, the client has to send
the request again."""
WALL_S = 120.0
"""Maximum wall-clock time of a task, in seconds; after that, the client has to send the request
again. The bound does not refuse a grammar: it is exceeded only if a busy machine gives the process
hardly any CPU time."""
STACK_BYTES = 3 * 1024 * 1024
"""Stack of the thread that compiles, in bytes. The worker's threads have a larger stack
(``sandbox.HOST_STACK_BYTES``), so that a grammar that compiles in the process also compiles in the
worker."""
BLAME_SHARE = 0.25
"""Maximum CPU time of the search for the most expensive part of a refused grammar, as a share of
``cpu_s``."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of compiling one grammar."""

    cpu_s: float = 1.5
    """Maximum CPU time, in seconds; the setting ``grammar_compile_s``."""
    memory_bytes: int = 1024**3
    """Maximum memory, in bytes; the setting ``grammar_compile_bytes``."""

    @property
    def too_slow(self) -> str:
        """The error for a grammar whose compilation exceeds ``cpu_s``."""
        return (
            f"compiling the grammar takes more than {self.cpu_s:g} s of CPU time, the limit that "
            "grammar_compile_s sets"
        )

    @property
    def too_large(self) -> str:
        """The error for a grammar whose compilation exceeds ``memory_bytes``."""
        return (
            f"compiling the grammar takes more than {self.memory_bytes >> 20} MiB of memory, the "
            "limit that grammar_compile_bytes sets"
        )


TOO_DEEP = "the grammar is nested too deeply: llguidance's stack overflowed"


class RefusedGrammar(Exception):
    """A grammar that is not valid or that exceeds the bounds; the message is the reason."""
