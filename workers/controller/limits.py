"""The limits of a controller: CPU time of each call, memory, logs, forks, variables."""

from __future__ import annotations

from dataclasses import dataclass

TEXT_BYTES_PER_S = 4 * 1024 * 1024
"""Approximate bytes of text that a tokenizer processes in one second of CPU time."""
MIN_TEXT_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds of CPU, so that a busy machine does not end a sequence; sizes in bytes."""

    init_s: float = 1.0
    pre_s: float = 0.001
    mid_s: float = 0.020
    post_s: float = 0.001
    memory_bytes: int = 64 * 1024 * 1024
    stack_bytes: int = 512 * 1024
    table_elements: int = 100_000
    """Elements of each table."""
    tables: int = 4
    """Tables; compilers create one."""
    log_bytes: int = 64 * 1024
    """Bytes of the log of one round that are kept, and 16 times this for a sequence. Further bytes
    are counted and dropped."""
    compile_s: float = 1.5
    """CPU time of compiling a grammar, which runs in a process of its own."""
    compile_bytes: int = 1024**3
    """Memory of that process."""
    text_bytes: int = 1024 * 1024
    """Bytes of a text that a guest may tokenize in one call; ``max_text`` may allow less."""
    forks: int = 128
    """Sequences of one request."""
    idle_wakes: int = 10_000
    """How often in a row the sequences of a request are woken if all of them are suspended."""
    silent_rounds: int = 256
    """Consecutive rounds in which a sequence may append tokens without sampling."""
    appended_tokens: int = 65_536
    """Tokens that a sequence may append without sampling."""
    variable_bytes: int = 1024 * 1024
    """Bytes of one variable's value; the state worker bounds all variables together."""
    written_bytes: int = 16 * 1024 * 1024
    """Bytes that a request may write to variables during its life; each write is also sent to its
    client."""

    def max_text(self, call_s: float) -> int:
        """Bytes of a text that may be tokenized at once in a call of ``call_s`` seconds of CPU.

        A tokenizer cannot be interrupted, so a text that would take longer than the call is
        refused. The bound is a count: it is the same on every machine.
        """
        return min(self.text_bytes, max(MIN_TEXT_BYTES, int(TEXT_BYTES_PER_S * call_s)))
