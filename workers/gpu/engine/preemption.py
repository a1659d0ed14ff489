"""The rules by which a sequence gives way to another. Pure functions of the scheduler's tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from .sequence import Sequence
from .waiting import WaitingQueue


def rank(sequence: Sequence) -> tuple[int, int, int]:
    """The order of sequences: the lowest rank is preempted or skipped first."""
    return sequence.priority, -sequence.arrival, -sequence.seq


def num_blocks(sequences: Iterable[Sequence]) -> int:
    """The blocks of sequences; those that several share count several times."""
    return sum(len(sequence.block_table.blocks) for sequence in sequences)


def victim_of_largest(
    refused: Sequence | None, running: Collection[Sequence], waiting: WaitingQueue
) -> Sequence | None:
    """The sequence to preempt so that the refused one can be admitted: the last in order of the
    client with the most running sequences.

    None if the client of the refused sequence has a running sequence, if no client has two, or if
    the sequences of the largest client have a higher priority.
    """
    if refused is None or not waiting or waiting.first() is not refused:
        return None
    if not running or waiting.num_running(refused.client):
        return None
    largest = waiting.largest_client()
    if waiting.num_running(largest) < 2:
        return None
    of_client = [s for s in running if s.client == largest]
    victim = min(of_client, key=rank, default=None)
    return victim if victim is not None and victim.priority <= refused.priority else None


def from_largest_client(sequences: Iterable[Sequence]) -> Iterator[Sequence]:
    """Yields sequences in the order in which they lose their blocks: each is the last in order of
    the client with the most blocks."""
    of_client: dict[int, list[Sequence]] = {}
    for sequence in sequences:
        of_client.setdefault(sequence.client, []).append(sequence)
    while of_client:
        client = max(of_client, key=lambda each: num_blocks(of_client[each]))
        victim = min(of_client[client], key=rank)
        of_client[client].remove(victim)
        if not of_client[client]:
            del of_client[client]
        yield victim
