"""The limits of a controller: the CPU time of its calls, its memory, its logs, its forks and its
variables."""

from __future__ import annotations

from dataclasses import dataclass

TEXT_BYTES_PER_S = 4 * 1024 * 1024
"""Approximate bytes of text that a tokenizer processes in one second of CPU time."""
MIN_TEXT_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits are in seconds of CPU time. So other processes that use the CPU do not make a
    call exceed its limit. Sizes are in bytes."""

    init_s: float = 1.0
    pre_s: float = 0.001
    mid_s: float = 0.020
    post_s: float = 0.001
    script_s: float = 0.1
    """Limit of each call of a script in MicroPython or QuickJS. This limit replaces ``pre_s``,
    ``mid_s`` and ``post_s``, but not ``init_s``."""
    fuel_per_ms: int = 0
    """Wasm instructions that a guest may execute for each millisecond of a call's limit. Unlike the
    limit on CPU time, this limit stops a call at the same instruction on every machine. If 0, only
    CPU time is limited."""
    memory_bytes: int = 64 * 1024 * 1024
    stack_bytes: int = 512 * 1024
    table_elements: int = 100_000
    """Maximum elements of each Wasm table of a guest."""
    tables: int = 4
    """Maximum Wasm tables of a guest; compilers create one."""
    log_bytes: int = 64 * 1024
    """Maximum bytes of the log of one round. The logs of all rounds of a sequence together may have
    16 times this number. Further bytes are dropped, and their number is reported."""
    compile_s: float = 1.5
    """Maximum CPU time of compiling a grammar in a separate process."""
    compile_bytes: int = 1024**3
    """Maximum memory of the process that compiles a grammar."""
    text_bytes: int = 1024 * 1024
    """Maximum bytes of a text that a guest tokenizes in one call; ``max_text`` may allow less."""
    forks: int = 128
    """Maximum sequences of one request, including finished sequences."""
    idle_wakes: int = 10_000
    """Maximum consecutive wake-ups of a request whose sequences are all suspended."""
    silent_rounds: int = 256
    """Maximum number of actions in a row with which a sequence appends or splices tokens without
    sampling."""
    appended_tokens: int = 65_536
    """Maximum tokens that a sequence appends without sampling."""
    variable_bytes: int = 1024 * 1024
    """Maximum bytes of one variable's value. The state worker has another bound for all variables
    together."""
    used_bytes: int = 16 * 1024 * 1024
    """Maximum total bytes of a request's writes to variables, new prompts, scored texts, dropped
    tokens, and distributions that are read without sampling. A token counts as 4 bytes. Writes are
    bounded because each write is also sent to the client."""

    @property
    def round_s(self) -> float:
        """Maximum CPU time of a round of three calls, in seconds."""
        return self.post_s + self.pre_s + self.mid_s

    @property
    def watched_round_s(self) -> float:
        """CPU time in seconds that the watchdog of guest processes allows for a round. This is the
        larger of the limits for compiled modules and for scripts."""
        return max(self.round_s, 3 * self.script_s)

    def max_text(self, call_s: float) -> int:
        """Maximum bytes of a text that is tokenized at once, in a call that may use ``call_s``
        seconds of CPU time.

        A tokenizer cannot be interrupted, so a text is refused if its tokenization would take
        longer than about ``call_s``. A text of ``MIN_TEXT_BYTES`` is always allowed. The bound is a
        number of bytes, so it is the same on every machine.
        """
        return min(self.text_bytes, max(MIN_TEXT_BYTES, int(TEXT_BYTES_PER_S * call_s)))
