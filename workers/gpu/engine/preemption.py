"""The rules that choose which sequences are preempted. The functions are pure: they only read the
scheduler's tables."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from .block_manager import BlockManager
from .sequence import Sequence
from .waiting import MAX_OVERTAKEN


class Lack(NamedTuple):
    """The slots (places for running sequences) and the blocks that must become free before a
    waiting sequence can be admitted. If deferred sequences may be preempted too, ``slots`` is a
    number of places for running and deferred sequences together."""

    slots: int
    blocks: int


def rank(sequence: Sequence) -> tuple[int, int, int]:
    """The rank of a sequence. The sequence with the lowest rank is preempted or skipped first: the
    sequence with the lowest priority, and among these the latest arrival."""
    return sequence.priority, -sequence.arrival, -sequence.seq


def num_blocks(sequences: Iterable[Sequence]) -> int:
    """The total number of blocks of some sequences. A block that several of them share counts once
    for each of them."""
    return sum(len(sequence.block_table.blocks) for sequence in sequences)


def num_freed(sequences: Iterable[Sequence], blocks: BlockManager) -> int:
    """The number of blocks that waiting sequences can use after the preemption of admitted
    sequences."""
    tables = ((sequence.block_table, sequence.target) for sequence in sequences)
    return sum(blocks.num_unshared(t) + blocks.num_reserved(t, target) for t, target in tables)


def choose_victims(
    refused: Sequence, admitted: Collection[Sequence], lack: Lack, blocks: BlockManager
) -> list[Sequence]:
    """The sequences to preempt so that ``refused`` can be admitted; empty if preemption cannot free
    enough slots or blocks. ``admitted``: the running sequences, or the running and the deferred
    sequences.

    The victims are chosen one by one. Each victim belongs to the client that then has the most
    sequences in ``admitted``. Among this client's sequences that may be preempted, the victim has
    the lowest rank. A client keeps at least one sequence. A sequence
    is not preempted if its priority is above the priority of ``refused``. A sequence that later
    arrivals have overtaken ``MAX_OVERTAKEN`` times is not preempted either, because the waiting
    queue would admit it again first.
    """
    sizes = Counter(sequence.client for sequence in admitted)
    chosen_from: dict[int, list[Sequence]] = {client: [] for client in sizes}
    for sequence in sorted(admitted, key=rank, reverse=True):
        if sequence.priority <= refused.priority and sequence.overtaken < MAX_OVERTAKEN:
            chosen_from[sequence.client].append(sequence)
    largest = [(-size, client) for client, size in sizes.items()]
    heapq.heapify(largest)
    victims: list[Sequence] = []
    slots, needed = lack
    while slots > 0 or needed > 0:
        if not largest or -largest[0][0] <= 1:
            return []
        size, client = largest[0]
        if not chosen_from[client]:
            heapq.heappop(largest)
            continue
        victim = chosen_from[client].pop()
        heapq.heapreplace(largest, (size + 1, client))
        victims.append(victim)
        slots -= 1
        needed -= num_freed([victim], blocks)
    return victims


def from_largest_client(sequences: Iterable[Sequence], kept: int = 0) -> Iterator[Sequence]:
    """Yields sequences in the order in which they are to be preempted. Each belongs to the client
    that then has the most blocks left, and has the lowest rank among this client's sequences. Ends
    when no client has more than ``kept`` blocks."""
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
