"""Derives seeds for requests that do not have a seed, and for sequences that have dropped
tokens."""

from __future__ import annotations

_MASK = (1 << 64) - 1
SEED_BITS = 62


def derived_seed(number: int) -> int:
    """A seed of ``SEED_BITS`` bits. It is derived from a number with splitmix64's finalizer, so
    every worker derives the same seed."""
    z = (number + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> (64 - SEED_BITS)
