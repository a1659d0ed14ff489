"""The rules by which a sequence is preempted for another. Pure functions of the scheduler's
tables."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from .block_manager import BlockManager
from .sequence import Sequence
from .waiting import MAX_OVERTAKEN


class Lack(NamedTuple):
    """Number of slots (``scheduler.py``) and number of blocks that must become free before a
    waiting sequence can be admitted."""

    slots: int
    blocks: int


def rank(sequence: Sequence) -> tuple[int, int, int]:
    """Returns the sort key of a sequence: priority, then earlier arrival. The sequence with the
    lowest rank is preempted or skipped first."""
    return sequence.priority, -sequence.arrival, -sequence.seq


def num_blocks(sequences: Iterable[Sequence]) -> int:
    """The number of blocks of sequences. A shared block counts once for each of its sequences."""
    return sum(len(sequence.block_table.blocks) for sequence in sequences)


def choose_victims(
    refused: Sequence, running: Collection[Sequence], lack: Lack, blocks: BlockManager
) -> list[Sequence]:
    """The sequences to preempt so that ``refused`` can be admitted; empty if preemption cannot free
    enough slots or blocks.

    Victims are chosen one by one, each from the client that has the most running sequences left.
    The victim is this client's sequence with the lowest rank among those that may be preempted. A
    client keeps at least 1 + ``refused.pending_forks`` running sequences. Sequences of a higher
    priority are not preempted. Sequences that were overtaken ``MAX_OVERTAKEN`` times are not
    preempted either, because the waiting queue would admit them again first.
    """
    sizes = Counter(sequence.client for sequence in running)
    chosen_from: dict[int, list[Sequence]] = {client: [] for client in sizes}
    for sequence in sorted(running, key=rank, reverse=True):
        if sequence.priority <= refused.priority and sequence.overtaken < MAX_OVERTAKEN:
            chosen_from[sequence.client].append(sequence)
    largest = [(-size, client) for client, size in sizes.items()]
    heapq.heapify(largest)
    victims: list[Sequence] = []
    slots, needed = lack
    while slots > 0 or needed > 0:
        if not largest or -largest[0][0] <= 1 + refused.pending_forks:
            return []
        size, client = largest[0]
        if not chosen_from[client]:
            heapq.heappop(largest)
            continue
        victim = chosen_from[client].pop()
        heapq.heapreplace(largest, (size + 1, client))
        victims.append(victim)
        slots -= 1 + victim.pending_forks
        needed -= blocks.num_unshared(victim.block_table) + blocks.num_reserved(
            victim.block_table, victim.target
        )
    return victims


def from_largest_client(sequences: Iterable[Sequence], kept: int = 0) -> Iterator[Sequence]:
    """Yields sequences in the order in which they are preempted, until no client has more than
    ``kept`` blocks. The next sequence belongs to the client that has the most blocks left, and has
    the lowest rank among this client's sequences."""
    of_client: dict[int, list[Sequence]] = {}
    for sequence in sorted(sequences, key=rank, reverse=True):
        of_client.setdefault(sequence.client, []).append(sequence)
    largest = [(-num_blocks(own), client) for client, own in of_client.items()]
    heapq.heapify(largest)
    while largest and -largest[0][0] > kept:
        size, client = largest[0]
        victim = of_client[client].pop()
        heapq.heapreplace(largest, (size + len(victim.block_table.blocks), client))
        yield victim
