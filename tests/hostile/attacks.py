"""The table of attacks: hostile modules, arguments, and guest processes that were taken over."""

from __future__ import annotations

from . import answers, memory_and_forks, takeovers, time_and_stack, uploads

ATTACKS = (
    *time_and_stack.ATTACKS,
    *memory_and_forks.ATTACKS,
    *answers.ATTACKS,
    *uploads.ATTACKS,
    *takeovers.ATTACKS,
)
