"""The table of attacks: hostile modules, scripts, arguments, and guest processes that were taken
over."""

from __future__ import annotations

from . import answers, memory_and_forks, scripts, takeovers, time_and_stack, uploads

ATTACKS = (
    *time_and_stack.ATTACKS,
    *memory_and_forks.ATTACKS,
    *answers.ATTACKS,
    *scripts.ATTACKS,
    *uploads.ATTACKS,
    *takeovers.ATTACKS,
)
