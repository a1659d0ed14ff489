"""Makes inputs by mutating other inputs, without regard to coverage. The tests try these inputs for
each target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random

from .target import Target


def inputs(target: Target, count: int) -> Iterator[bytes]:
    """The corpus of a target, and then ``count`` mutations of the corpus. Each run has the same
    inputs."""
    corpus = list(target.corpus())
    yield from corpus
    yield from islice(mutated(corpus, target.words, Random(len(corpus))), count)


def mutated(corpus: Sequence[bytes], words: tuple[bytes, ...], draw: Random) -> Iterator[bytes]:
    """Yields mutations of a corpus without end. ``words``: texts to insert."""
    while True:
        data = bytearray(draw.choice(corpus))
        for _ in range(draw.randrange(1, 5)):
            _mutate(data, corpus, words, draw)
        yield bytes(data)


def _mutate(
    data: bytearray, corpus: Sequence[bytes], words: tuple[bytes, ...], draw: Random
) -> None:
    at = draw.randrange(len(data) + 1)
    match draw.randrange(6):
        case 0:
            data[at : at + draw.randrange(1, 9)] = b""
        case 1:
            data[at:at] = draw.randbytes(draw.randrange(1, 9))
        case 2 if data:
            data[at % len(data)] ^= 1 << draw.randrange(8)
        case 3:
            data[at : at + 4] = draw.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\x80"))
        case 4 if words:
            data[at:at] = draw.choice(words)
        case _:
            other = draw.choice(corpus)
            data[at:] = other[draw.randrange(len(other) + 1) :]
