"""How steps are packed, without torch: the tokens and their order, and the sequences that wait."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.block_manager import BlockManager, BlockTable
from tokenbus.workers.gpu.engine.preemption import from_largest_client
from tokenbus.workers.gpu.engine.scheduler import (
    LIKELY_ROW,
    MAX_LIKELY,
    SCORE_ROWS,
    Batch,
    Scheduler,
)
from tokenbus.workers.gpu.engine.sequence import Sequence

from ...counts import examples

BLOCK = 4


def sequence(number: int, prompt: int, priority: int = 0, client: int = 0) -> Sequence:
    """A sequence that shares no tokens with others."""
    return Sequence(
        request=number,
        seq=0,
        tokens=[number * 1000 + i for i in range(prompt)],
        num_prompt=prompt,
        sampling=Sampling(),
        max_length=prompt + 20,
        arrival=number,
        priority=priority,
        client=client,
    )


def scheduler(blocks: int = 100, running: int = 8, room: int = 16) -> Scheduler:
    return Scheduler(BlockManager(blocks, BLOCK), running, room)


def compute(batch: Batch) -> None:
    """Simulates a forward. Each sequence whose tokens are all computed gets one more token."""
    for chunk in batch.chunks:
        chunk.sequence.num_computed_tokens = chunk.end
        if chunk.completes:
            chunk.sequence.tokens.append(-chunk.end)


def shape(batch: Batch) -> list[tuple[int, int, int]]:
    return [(c.sequence.request, c.start, c.end) for c in batch.chunks]


def test_a_long_prompt_is_prefilled_in_chunks_together_with_decodes() -> None:
    s = scheduler(room=16)
    s.add(sequence(1, 3))
    compute(s.schedule())
    s.add(sequence(2, 40))
    sizes = []
    for _ in range(3):
        batch = s.schedule()
        assert shape(batch)[0][0] == 1, "the decode comes first"
        assert batch.num_tokens <= 16
        sizes.append(shape(batch)[1][1:])
        compute(batch)
    assert sizes == [(0, 15), (15, 30), (30, 40)]


def test_a_higher_priority_goes_first() -> None:
    s = scheduler(room=4)
    s.add(sequence(1, 4))
    s.add(sequence(2, 4, priority=5))
    assert shape(s.schedule()) == [(2, 0, 4)]


def test_the_client_with_fewest_running_sequences_goes_first() -> None:
    s = scheduler(room=8)
    for number in (1, 2, 3):
        s.add(sequence(number, 4, client=1))
    s.add(sequence(4, 4, client=2))
    assert shape(s.schedule()) == [(1, 0, 4), (4, 0, 4)]


def test_a_client_without_a_running_sequence_gets_a_slot_of_the_largest_client() -> None:
    s = scheduler(running=4)
    first = [sequence(number, 4, client=1) for number in range(6)]
    for one in first:
        s.add(one)
    compute(s.schedule())
    assert list(s.running) == first[:4]
    late = [sequence(10 + number, 4, client=2) for number in range(2)]
    for one in late:
        s.add(one)
    compute(s.schedule())
    compute(s.schedule())
    # The last sequence of the largest client is preempted, but no second one: the late client's
    # second sequence waits.
    assert set(s.running) == {*first[:3], late[0]}
    for _ in range(3):
        compute(s.schedule())
    assert set(s.running) == {*first[:3], late[0]}
    assert s.preemptions == 1
    # The preempted sequence runs again when the other client's sequences have ended.
    s.remove(late[1])
    s.remove(late[0])
    compute(s.schedule())
    assert set(s.running) == set(first[:4])


def test_a_client_without_a_running_sequence_gets_blocks_of_the_largest_client() -> None:
    s = scheduler(blocks=20, running=8)
    first = [sequence(number, 12, client=1) for number in range(4)]
    for one in first:
        s.add(one)
    for _ in range(4):
        compute(s.schedule())
    assert s.running
    late = sequence(10, 40, client=2)
    s.add(late)
    for _ in range(8):
        compute(s.schedule())
    assert late in s.running
    assert any(one in s.running for one in first)


def test_no_slot_is_taken_for_a_lower_priority_or_from_a_client_with_one_sequence() -> None:
    s = scheduler(running=2)
    held = [sequence(0, 4, 1, client=1), sequence(1, 4, 1, client=1)]
    for one in held:
        s.add(one)
    compute(s.schedule())
    s.add(sequence(2, 4, 0, client=2))
    for _ in range(3):
        compute(s.schedule())
    assert set(s.running) == set(held)
    s = scheduler(running=2)
    each = [sequence(number, 4, client=number) for number in range(3)]
    for one in each:
        s.add(one)
    for _ in range(3):
        compute(s.schedule())
    assert set(s.running) == set(each[:2])


def with_client(count: int, prompt: int, blocks: int, client: int = 1) -> Scheduler:
    """A scheduler of ``count`` sequences, in which all running sequences belong to one client."""
    s = scheduler(blocks=blocks, running=count, room=64)
    for number in range(count):
        one = sequence(number, prompt, client=client)
        one.max_length = 10_000
        s.add(one)
    while len(s.running) < count:
        compute(s.schedule())
    return s


def test_no_sequence_is_preempted_for_a_prompt_that_does_not_fit_then() -> None:
    s = with_client(8, 30, blocks=300)
    # One running sequence remains after the preemptions, so not all blocks can become free.
    s.add(sequence(100, 298 * BLOCK, client=2))
    for _ in range(12):
        compute(s.schedule())
    assert (len(s.running), s.preemptions) == (8, 0)


def test_one_sequence_is_preempted_for_a_request_with_forks() -> None:
    for forks in (7, 3):
        s = with_client(8, 30, blocks=300)
        late = sequence(100, 8, client=2)
        late.pending_forks = forks
        s.add(late)
        for _ in range(4):
            compute(s.schedule())
        assert late in s.running
        assert s.preemptions == 1


def test_a_request_with_more_forks_than_free_slots_does_not_hold_up_other_clients() -> None:
    s = scheduler(running=8, room=64)
    for number in range(3):
        s.add(sequence(number, 4, client=number))
    compute(s.schedule())
    forking = sequence(10, 4, client=10)
    forking.pending_forks = 7
    late = [sequence(20 + number, 4, client=20 + number) for number in range(3)]
    for one in (forking, *late):
        s.add(one)
    compute(s.schedule())
    assert set(s.running) >= {forking, *late}


def test_free_slots_are_kept_for_the_forks_of_a_request() -> None:
    s = scheduler(running=8, room=4)
    forking = sequence(1, 12, client=1)
    forking.pending_forks = 7
    second = sequence(2, 4, client=1)
    third = sequence(3, 4, client=2)
    third.pending_forks = 1
    for one in (forking, second, third):
        s.add(one)
    compute(s.schedule())
    compute(s.schedule())
    assert list(s.running) == [forking]
    # The first sequence of another client is admitted.
    s.remove(third)
    s.add(sequence(4, 4, client=3))
    forking.num_computed_tokens = 11
    compute(s.schedule())
    assert [one.request for one in s.running] == [1, 4]


def test_short_requests_one_after_another_cost_a_bounded_part_of_the_steps() -> None:
    s = with_client(4, 240, blocks=2000)
    first, num_tokens, num_steps = list(s.running), 0, 0
    for number in range(60):
        late = sequence(100 + number, 4, client=2 + number)
        s.add(late)
        for _ in range(6):
            batch = s.schedule()
            # The test commits no blocks, so a preempted sequence is recomputed from its start.
            num_tokens += sum(c.end - c.start for c in batch.chunks if c.sequence in first)
            num_steps += 1
            compute(batch)
            if late in s.running:
                s.remove(late)
        s.remove(late)
    assert s.preemptions > 2
    again = num_tokens - sum(len(one.tokens) for one in first)
    assert again <= num_steps * 64 // 8 + 2 * len(first[0].tokens)


def test_many_clients_get_an_eighth_of_the_slots_of_a_running_one() -> None:
    s = with_client(16, 8, blocks=2000)
    first = set(s.running)
    for number in range(10):
        s.add(sequence(100 + number, 8, client=2 + number))
    for _ in range(20):
        compute(s.schedule())
    assert len(first & set(s.running)) == 14
    # When one of the other clients' sequences ends, a sequence of a further client runs in its
    # place.
    [ended, _] = set(s.running) - first
    s.remove(ended)
    for _ in range(4):
        compute(s.schedule())
    assert len(first & set(s.running)) == 14
    assert len(s.running) == 16


def test_an_overdue_sequence_is_not_preempted_for_another_client() -> None:
    s = with_client(4, 30, blocks=300)
    *_, before, last = s.running
    last.overtaken = 1024
    late = sequence(100, 4, client=2)
    s.add(late)
    for _ in range(8):
        compute(s.schedule())
    assert late in s.running
    assert before not in s.running
    assert s.preemptions == 1


def test_a_client_with_deferred_sequences_does_not_shield_the_one_with_the_slots() -> None:
    s = with_client(4, 30, blocks=300)
    for one in list(s.running):
        s.defer(one)
    for number in range(4):
        s.add(sequence(10 + number, 30, client=2))
    while len(s.running) < 4:
        compute(s.schedule())
    late = sequence(100, 4, client=3)
    s.add(late)
    for _ in range(3):
        compute(s.schedule())
    assert late in s.running


def compute_all(s: Scheduler) -> None:
    """Computes steps, at most 6, while the scheduler has work."""
    for _ in range(6):
        if s.has_work:
            compute(s.schedule())


def with_deferred(count: int, prompt: int, blocks: int, running: int) -> Scheduler:
    """A scheduler in which client 1 has ``count`` deferred sequences and no other sequence."""
    s = scheduler(blocks=blocks, running=running, room=64)
    for number in range(count):
        s.add(sequence(number, prompt, client=1))
        while s.running or s.waiting:
            compute(s.schedule())
            for one in [s for s in s.running if s.num_computed_tokens >= prompt]:
                s.defer(one)
    return s


def test_a_client_without_an_admitted_sequence_gets_blocks_of_deferred_ones() -> None:
    s = with_deferred(4, 12, blocks=20, running=8)
    late = sequence(10, 40, client=2)
    s.add(late)
    compute_all(s)
    assert late in s.running
    assert s.deferred, "a client keeps one of its sequences"
    # A preempted sequence runs again when the other client's sequence has ended.
    s.remove(late)
    compute_all(s)
    assert len(s.running) + len(s.deferred) == 4


def test_deferred_sequences_that_run_one_at_a_time_do_not_keep_the_blocks() -> None:
    s = with_deferred(4, 12, blocks=20, running=8)
    running = next(iter(s.deferred))
    s.reschedule(running)
    late = sequence(10, 40, client=2)
    s.add(late)
    compute_all(s)
    assert late in s.running


def test_a_client_without_an_admitted_sequence_gets_a_place_of_a_deferred_one() -> None:
    s = with_deferred(8, 4, blocks=100, running=2)
    others = [sequence(10 + number, 4, client=2) for number in range(3)]
    for one in others:
        s.add(one)
    compute_all(s)
    assert [one in s.running for one in others] == [True, False, False]
    assert (len(s.deferred), s.preemptions) == (7, 1)


def test_no_place_of_a_deferred_sequence_is_taken_for_a_lower_priority() -> None:
    s = with_deferred(8, 4, blocks=100, running=2)
    s.add(sequence(10, 4, priority=-1, client=2))
    compute_all(s)
    assert (len(s.deferred), s.preemptions) == (8, 0)


def with_waiting_prefix(
    monkeypatch: pytest.MonkeyPatch, client: int
) -> tuple[Scheduler, Sequence, Sequence, list[int]]:
    """A running sequence of client 1, a waiting sequence of ``client`` that begins with the same
    prompt and lacks blocks, and a list to which each match is added."""
    blocks, matches = BlockManager(100, BLOCK), list[int]()
    s = Scheduler(blocks, 8, 400)
    first, waiting = sequence(1, 200, client=1), sequence(2, 340, client=client)
    s.add(first)
    compute_and_commit(s, blocks)
    waiting.tokens[:200] = first.tokens[:200]
    s.add(waiting)
    usual = blocks.match

    def match(table: BlockTable, tokens: Tokens[int], limit: int) -> int:
        matches.append(limit)
        return usual(table, tokens, limit)

    monkeypatch.setattr(blocks, "match", match)
    # Another table takes some of the blocks.
    assert blocks.reserve(BlockTable(), 0, 12 * BLOCK) == []
    return s, first, waiting, matches


def compute_and_commit(s: Scheduler, blocks: BlockManager) -> None:
    batch = s.schedule()
    for chunk in batch.chunks:
        blocks.commit(chunk.sequence.block_table, chunk.sequence.tokens, chunk.end)
    compute(batch)


@pytest.mark.parametrize("client", [1, 2])
def test_a_cached_prefix_of_a_waiting_prompt_is_not_matched_in_each_step(
    monkeypatch: pytest.MonkeyPatch, client: int
) -> None:
    s, _, waiting, matches = with_waiting_prefix(monkeypatch, client)
    for _ in range(15):
        compute(s.schedule())
        assert waiting in s.waiting
    assert len(matches) == 1


def test_a_waiting_prompt_with_a_cached_prefix_is_admitted_when_it_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s, first, waiting, _ = with_waiting_prefix(monkeypatch, 1)
    compute(s.schedule())
    assert waiting in s.waiting
    s.remove(first)
    [chunk] = s.schedule().chunks
    assert (chunk.sequence, chunk.start) == (waiting, 200)


def test_a_waiting_prompt_is_matched_again_when_its_prefix_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s, first, waiting, matches = with_waiting_prefix(monkeypatch, 1)
    compute(s.schedule())
    first.tokens[200:] = waiting.tokens[200:205]
    first.num_computed_tokens = 204
    s._blocks.commit(first.block_table, first.tokens, 204)
    compute(s.schedule())
    assert len(matches) == 2


def test_no_more_sequences_run_than_max_num_seqs() -> None:
    s = scheduler(running=2)
    for number in (1, 2, 3):
        s.add(sequence(number, 2))
    assert [r for r, _, _ in shape(s.schedule())] == [1, 2]
    assert len(s.waiting) == 1


def test_when_blocks_run_out_the_last_to_arrive_is_preempted_and_recomputed() -> None:
    s = scheduler(blocks=7)
    first, second = sequence(1, 8), sequence(2, 8)
    s.add(first)
    s.add(second)
    compute(s.schedule())
    while s.preemptions == 0:
        batch = s.schedule()
        assert batch.chunks
        compute(batch)
    assert second in s.waiting
    assert second.num_computed_tokens == 0
    s.remove(first)
    assert shape(s.schedule())[0][0] == 2


def with_suspended(clients: list[int]) -> tuple[Scheduler, list[Sequence]]:
    """A scheduler of 30 blocks. Client 1 has a running sequence. Each client in ``clients`` has a
    suspended sequence of 8 blocks."""
    s = scheduler(blocks=31, room=64)
    s.add(sequence(1, 3, client=1))
    compute(s.schedule())
    held = [sequence(number, 31, client=client) for number, client in enumerate(clients, 2)]
    for each in held:
        s.add(each)
        compute(s.schedule())
        s.suspend(each)
    return s, held


def test_suspended_sequences_make_room_for_another_client_while_others_run() -> None:
    s, (first, second, third) = with_suspended([1, 1, 2])
    s.add(sequence(9, 20, client=3))
    assert [request for request, _, _ in shape(s.schedule())] == [1, 9]
    assert not second.block_table.blocks, "the last sequence of the client with the most blocks"
    assert first.block_table.blocks
    assert third.block_table.blocks
    s.resume(second)
    s.remove(first)
    assert 3 in [request for request, _, _ in shape(s.schedule())]


def test_suspended_sequences_keep_their_blocks_before_another_of_their_client() -> None:
    s, held = with_suspended([1, 1, 1])
    s.add(sequence(9, 20, client=1))
    assert [request for request, _, _ in shape(s.schedule())] == [1]
    assert all(each.block_table.blocks for each in held)


def test_a_client_with_more_blocks_does_not_evict_suspended_sequences_of_others() -> None:
    s, held = with_suspended([1, 1, 2])
    s.add(sequence(9, 20, client=1))
    assert [request for request, _, _ in shape(s.schedule())] == [1]
    assert all(each.block_table.blocks for each in held)


def test_victims_are_found_without_a_visit_of_all_sequences_for_each() -> None:
    class Counted(list[int]):
        reads = 0

        def __len__(self) -> int:
            Counted.reads += 1
            return super().__len__()

    held = [sequence(number, 4, client=number % 7) for number in range(500)]
    for each in held:
        each.block_table.blocks = Counted([1])
    assert len(list(from_largest_client(held))) == 500
    assert Counted.reads <= 4 * 500


def test_suspended_sequences_keep_their_blocks_if_these_are_not_enough() -> None:
    s, held = with_suspended([1, 1, 2])
    s.add(sequence(9, 130, client=3))
    assert [request for request, _, _ in shape(s.schedule())] == [1]
    assert all(each.block_table.blocks for each in held)


@settings(max_examples=examples(40))
@given(
    prompts=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 2)), min_size=1, max_size=12),
    num_blocks=st.integers(14, 40),
    room=st.integers(1, 32),
)
def test_every_sequence_gets_all_its_tokens(
    prompts: list[tuple[int, int]], num_blocks: int, room: int
) -> None:
    blocks = BlockManager(num_blocks, BLOCK)
    s = Scheduler(blocks, 4, room)
    every = [sequence(i, n, priority=p) for i, (n, p) in enumerate(prompts)]
    for one in every:
        s.add(one)
    for _ in range(5000):
        if not s.has_work:
            break
        batch = s.schedule()
        assert 0 < batch.num_tokens <= room
        assert len({c.sequence.request for c in batch.chunks}) == len(batch.chunks)
        compute(batch)
        for chunk in batch.chunks:
            if len(chunk.sequence.tokens) >= chunk.sequence.max_length:
                s.remove(chunk.sequence)
    assert not s.has_work
    assert all(len(one.tokens) == one.max_length for one in every)
    assert blocks.num_used == 0


def scoring(number: int, length: int, top_logprobs: int) -> Sequence:
    """A sequence whose tokens are scored."""
    found = sequence(number, length)
    found.scored, found.scored_from, found.num_prompt = True, 1, 0
    found.sampling = Sampling(top_logprobs=top_logprobs)
    return found


def test_a_step_reports_a_bounded_number_of_likely_tokens_of_scores() -> None:
    s = scheduler(blocks=2000, room=2048)
    most = MAX_LIKELY // (LIKELY_ROW + 256)
    s.add(scoring(1, 800, 256))
    first = s.schedule()
    assert shape(first) == [(1, 0, most)]
    compute(first)
    for number in (2, 3, 4):
        s.add(scoring(number, 800, 256))
    compute(s.schedule())
    sizes = {chunk.sequence.request: chunk.end - chunk.start for chunk in s.schedule().chunks}
    assert sizes == dict.fromkeys((1, 2, 3, 4), most // 4)


def test_scores_without_likely_tokens_take_no_part_of_their_bound() -> None:
    s = scheduler(blocks=2000, room=2048)
    s.add(scoring(1, 800, 256))
    s.add(scoring(2, 800, 0))
    assert shape(s.schedule()) == [(1, 0, MAX_LIKELY // (LIKELY_ROW + 256)), (2, 0, SCORE_ROWS)]


def test_the_last_token_of_a_score_may_be_left_for_a_step_of_its_own() -> None:
    s = scheduler(blocks=2000, room=2048)
    most = MAX_LIKELY // (LIKELY_ROW + 256)
    s.add(scoring(1, 2 * most + 1, 256))
    chunks = []
    for _ in range(3):
        batch = s.schedule()
        chunks += shape(batch)
        compute(batch)
    assert chunks == [(1, 0, most), (1, most, 2 * most), (1, 2 * most, 2 * most + 1)]
