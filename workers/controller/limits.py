"""The limits of a controller: time of a CPU for each call, memory, logs, forks, variables."""

from __future__ import annotations

from dataclasses import dataclass

TEXT_BYTES_PER_S = 4 * 1024 * 1024
"""Bytes of text that a tokenizer takes in one second of CPU time, about."""
MIN_TEXT_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds of CPU, so that a busy machine ends no sequence; sizes in bytes."""

    init_s: float = 1.0
    pre_s: float = 0.001
    mid_s: float = 0.020
    post_s: float = 0.001
    memory_bytes: int = 64 * 1024 * 1024
    stack_bytes: int = 512 * 1024
    table_elements: int = 100_000
    """For each table."""
    tables: int = 4
    """Compilers make one."""
    log_bytes: int = 64 * 1024
    """Kept of the log of one round, and 16 times that of a sequence's; what is beyond is counted
    and dropped."""
    compile_s: float = 1.5
    """CPU time of compiling a grammar, which runs in a process of its own."""
    compile_bytes: int = 1024**3
    """Its memory."""
    text_bytes: int = 1024 * 1024
    """Bound of a text that a guest has tokenized at once; ``most_text`` may allow less."""
    forks: int = 128
    """Sequences that one request may come to have."""
    silent_rounds: int = 256
    """Rounds that a sequence may go through by itself, appending, before it samples."""
    appended_tokens: int = 65_536
    """Tokens that a sequence may append by itself before it samples."""
    variable_bytes: int = 1024 * 1024
    """For one variable's value; the state worker bounds what there is of all of them together."""
    written_bytes: int = 16 * 1024 * 1024
    """For everything that a request writes to variables in its life: each write goes to its client
    too."""

    def most_text(self, call_s: float) -> int:
        """Bytes of a text that may be tokenized at once in a call of ``call_s`` seconds of CPU.

        Nothing interrupts a tokenizer, so a text that would take longer than the call is refused.
        The bound is a count: it is the same on every machine.
        """
        return min(self.text_bytes, max(MIN_TEXT_BYTES, int(TEXT_BYTES_PER_S * call_s)))
