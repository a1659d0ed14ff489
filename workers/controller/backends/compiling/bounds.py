"""The bounds of compiling one grammar, and the error for a grammar that exceeds them."""

from __future__ import annotations

from dataclasses import dataclass

TURN_S = 30.0
"""Maximum time that a grammar waits until a process is free, in seconds. If the wait is longer, the
client has to send the request again."""
WALL_S = 120.0
"""Maximum wall-clock time of a task, in seconds. If a task takes longer, the client has to send the
request again. The grammar itself is not refused, because a task takes this long only on a busy
machine, where the task's process gets hardly any CPU time."""
STACK_BYTES = 3 * 1024 * 1024
"""Stack size of the thread that compiles in a separate process, in bytes. The stacks of the
worker's threads (``sandbox.HOST_STACK_BYTES``) are larger. So a grammar that compiles in the
process also compiles in the worker."""
BLAME_SHARE = 0.25
"""Maximum CPU time of the search for the faulty part of a refused grammar, as a share of
``Bounds.cpu_s``."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of compiling one grammar."""

    cpu_s: float = 1.5
    """Maximum CPU time, in seconds; the setting ``grammar_compile_s``."""
    memory_bytes: int = 1024**3
    """Maximum memory of the process that compiles, in bytes; the setting
    ``grammar_compile_bytes``."""

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
    """The grammar is not valid, or compiling it exceeds the bounds. The message has the reason."""
