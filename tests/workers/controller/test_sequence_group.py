"""Sequence groups, rounds, RESULT messages, threads and rows of masks, each tested separately."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenbus.protocol.bodies import decode_as
from tokenbus.protocol.errors import Code
from tokenbus.protocol.header import decode_header
from tokenbus.protocol.special_tokens import SpecialToken
from tokenbus.protocol.worker_messages import Result, StepResult, VocabularyName
from tokenbus.workers.controller import sequence_group
from tokenbus.workers.controller.fair_jobs import Job
from tokenbus.workers.controller.host import allowed
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.masks import MaskFiles, MaskRows
from tokenbus.workers.controller.pending_result import PendingResult
from tokenbus.workers.controller.pool import Pool
from tokenbus.workers.controller.python import (
    Controller,
    Decision,
    PythonProgram,
    append,
    fork,
    go_on,
    sample,
    splice,
    stop,
    suspend,
)
from tokenbus.workers.controller.rounds import Change
from tokenbus.workers.controller.sequence_group import Round, SequenceGroup
from tokenbus.workers.controller.tokens import tokenizers
from tokenbus.workers.controller.tokens.tokenizers import Vocabularies
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary
from tokenbus.workers.variables import VariableStorage

from .played import BYTES, EOS, vocabulary
from .tokens.small_tokenizers import byte_level

SIZE = len(BYTES)
Decisions = list[Decision]


class Decides(Controller):
    """Makes the decisions of two lists, ``pre`` and ``mid``, and then samples."""

    pre: Decisions = []
    mid: Decisions = []

    def __init__(self) -> None:
        self.next_pre, self.next_mid = list(self.pre), list(self.mid)
        self.posted: list[tuple[list[int], int]] = []

    def pre_process(self) -> Decision:
        return self.next_pre.pop(0) if self.next_pre else go_on()

    def mid_process(self, fork_group: list[int]) -> Decision:
        return self.next_mid.pop(0) if self.next_mid else sample()

    def post_process(self, tokens: list[int], backtrack: int) -> Decision:
        self.posted.append((tokens, backtrack))
        self.log(tokens, backtrack, end=";")
        return go_on()


def decides(pre: Decisions = [], mid: Decisions = []) -> type[Decides]:  # noqa: B006
    return type("Decides", (Decides,), {"pre": pre, "mid": mid})


def opened(
    kind: type[Controller], limits: Limits | None = None, ignore_eos: bool = False
) -> tuple[SequenceGroup, list[StepResult]]:
    """A group and the results of its first round, which have been recorded."""
    group = SequenceGroup(1, 9, limits or Limits(), b"", 100, ignore_eos, VariableStorage().apply)
    results = group.begin(PythonProgram(kind), vocabulary(BYTES), [1, 2, 3])
    assert group.record(results) == ([], [])
    return group, results


def stepped(
    group: SequenceGroup,
    *tokens: int,
    seq: int = 0,
    ended: bool = False,
    rows: MaskRows | None = None,
) -> list[StepResult]:
    """The results of a sequence's round after these tokens."""
    found = group.step(seq, tokens, ended, rows)
    assert found is not None
    return found[1]()


# --- rounds ---------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 9), max_size=4)), max_size=8))
def test_splices_of_a_round_add_up_to_one(splices: list[tuple[int, list[int]]]) -> None:
    before = [100 + i for i in range(20)]
    wanted, change = list(before), Change()
    for drop, tokens in splices:
        drop = min(drop, len(wanted))
        del wanted[len(wanted) - drop :]
        wanted += tokens
        change.splice(drop, tokens)
    assert before[: len(before) - change.backtrack] + change.tokens == wanted


def test_what_a_controller_does_by_itself_is_one_result() -> None:
    kind = decides([append([5, 6]), append([7])], [splice(2, [8]), splice(1, []), sample({3})])
    group, [result] = opened(kind)
    assert (result.action, result.backtrack, result.ff_tokens) == ("sample", 0, [5])
    assert result.logs == "[5, 6] 0;[7] 0;[8] 2;[] 1;"
    mask = group.mask(0)
    assert mask is not None
    assert list(allowed(mask, SIZE)) == [3]


def test_more_is_taken_back_than_was_appended() -> None:
    group, _ = opened(decides([], [sample(), sample(), splice(2, [4]), sample()]))
    group.record(stepped(group, 10))
    [result] = stepped(group, 11)
    assert (result.action, result.backtrack, result.ff_tokens) == ("sample", 2, [4])


@pytest.mark.parametrize(
    ("pre", "mid", "says"),
    [
        ([], [splice(1, [4])], "drops 1 tokens; the sequence has 0"),
        ([append([4])], [splice(2, [4])], "drops 2 tokens; the sequence has 1"),
        ([], [splice(0, [])], "neither drops nor appends"),
        ([append([4])] * 300, [], "256 rounds without sampling"),
        ([fork(200)], [], "128 are allowed"),
    ],
)
def test_a_wrong_decision_ends_its_sequence_and_says_why(
    pre: Decisions, mid: Decisions, says: str
) -> None:
    group, [result] = opened(decides(pre, mid))
    assert (result.action, result.code) == ("error", "controller_failed")
    assert says in (result.error or "")
    assert not group._sequences


@pytest.mark.parametrize(
    ("mid", "ignore_eos", "action", "finish"),
    [
        ([], False, "stop", "stop"),
        ([sample({3})], False, "stop", "stop"),
        ([stop()], False, "stop", "stop"),
        ([], True, "sample", "controller"),
        ([splice(1, []), sample()], False, "sample", "controller"),
        ([append([5]), sample()], False, "sample", "controller"),
        ([append([5]), stop()], False, "stop", "controller"),
        ([append([5])], True, "sample", "controller"),
    ],
)
def test_after_the_end_of_sequence_token_only_a_controller_that_does_more_goes_on(
    mid: Decisions, ignore_eos: bool, action: str, finish: str
) -> None:
    group, _ = opened(decides([], [sample(), *mid]), ignore_eos=ignore_eos)
    [result] = stepped(group, EOS)
    assert (result.action, result.finish, result.attachment) == (action, finish, None)


def test_an_end_that_the_gpu_worker_reports_is_passed_on_and_answered_with_the_last_log() -> None:
    group, _ = opened(decides())
    results = stepped(group, 7, ended=True)
    assert [(r.action, r.logs) for r in results] == [("stop", "[7] 0;")]
    group.record(results)
    assert not group._sequences
    group, _ = opened(decides())
    assert [(r.action, r.logs) for r in stepped(group, ended=True)] == [("stop", "")]


def test_the_log_of_a_round_is_bounded_and_counts_what_is_dropped() -> None:
    class Talks(Controller):
        def mid_process(self, fork_group: list[int]) -> Decision:
            self.log("x" * 100, end="")
            return sample()

    group, [result] = opened(Talks, Limits(log_bytes=64))
    assert result.logs == "x" * 64 + "\n[36 more bytes of log were dropped]\n"
    group.record([result])
    [result] = stepped(group, 5)
    assert result.logs.startswith("x" * 64)


# --- groups ---------------------------------------------------------------------------------------


class Pair(Controller):
    """Two sequences. Sequence 0 decides by ``waits``, sequence 1 by ``acts``."""

    def __init__(self) -> None:
        self.forked = False
        self.log_of: list[str] = []

    def pre_process(self) -> Decision:
        if not self.forked:
            self.forked = True
            return fork(2)
        return self.waits() if self.seq == 0 else self.acts()

    def waits(self) -> Decision:
        return suspend() if self.vars.get("go") is None else stop()

    def acts(self) -> Decision:
        return go_on()


def test_a_fork_is_reported_first_and_each_of_its_sequences_after_it() -> None:
    _, results = opened(Pair)
    assert [(r.seq, r.action, r.children) for r in results] == [
        (0, "fork", [1]),
        (0, "sample", []),
        (1, "sample", []),
    ]


def test_who_waits_for_a_variable_is_woken_by_another_s_write_and_not_by_its_own() -> None:
    class Writes(Pair):
        def waits(self) -> Decision:
            self.vars.set("mine", "x")
            return suspend() if self.vars.get("go") is None else stop()

        def acts(self) -> Decision:
            self.vars.set("go", "now")
            return go_on()

    group, _ = opened(Writes)
    assert group.record(stepped(group, 5)) == ([], []), "its own write does not wake it"
    results = stepped(group, 6, seq=1)
    assert [w["WriteVar"]["name"] for w in results[0].storage] == ["go"]
    [round_], [] = group.record(results)
    assert [(r.seq, r.action) for r in round_()] == [(0, "stop")]


def test_a_write_of_a_round_that_began_before_the_suspension_is_not_missed() -> None:
    class Writes(Pair):
        def acts(self) -> Decision:
            self.vars.set("go", "now")
            return go_on()

    group, _ = opened(Writes)
    waits = stepped(group, 5)
    acts = stepped(group, 6, seq=1)
    [round_], [] = group.record([*waits, *acts])
    assert [(r.seq, r.action) for r in round_()] == [(0, "stop")]


def test_the_end_of_a_fork_wakes_who_waits() -> None:
    class Ends(Pair):
        woken = False

        def waits(self) -> Decision:
            self.woken, before = True, self.woken
            return stop() if before else suspend()

        def acts(self) -> Decision:
            return stop()

    group, _ = opened(Ends)
    group.record(stepped(group, 5))
    [round_], [] = group.record(stepped(group, 6, seq=1))
    assert [(r.seq, r.action) for r in round_()] == [(0, "stop")]


def test_where_everybody_waits_all_are_told_of_the_deadlock() -> None:
    class Both(Pair):
        def acts(self) -> Decision:
            self.log("waiting", end="")
            return suspend()

    group, _ = opened(Both, Limits(idle_wakes=3))
    group.record(stepped(group, 5))
    rounds, failed = group.record(stepped(group, 6, seq=1))
    # The step of sequence 1 wakes sequence 0 once more.
    group.record([result for round_ in rounds for result in round_()])
    for _ in range(3):
        assert failed == []
        assert group.begins_idle()
        assert not group.begins_idle(), "only one caller wakes the group"
        rounds, failed = group.wake_idle()
        assert len(rounds) == 2
        group.record([result for round_ in rounds for result in round_()])
    rounds, failed = group.wake_idle()
    assert rounds == []
    assert {(r.seq, r.action, r.code) for r in failed} == {
        (seq, "error", str(Code.DEADLOCK)) for seq in (0, 1)
    }
    assert "they were woken 3 times in a row" in (failed[0].error or "")
    group.record(failed)
    assert not group._sequences


def test_a_suspended_sequence_is_woken_after_each_step_of_its_request() -> None:
    class Counts(Pair):
        wakes = 0

        def waits(self) -> Decision:
            self.wakes += 1
            return suspend() if self.wakes < 4 else go_on()

    group, _ = opened(Counts)
    group.record(stepped(group, 5))
    assert not group.begins_idle(), "the other sequence runs"
    for step in range(3):
        [round_], [] = group.record(stepped(group, 6, seq=1))
        [result] = round_()
        assert (result.seq, result.action) == (0, "sample" if step == 2 else "suspend")
        assert result.wakes == step + 1
        # A result that only suspends the sequence again is not sent.
        assert group.repeats(result) == (step < 2)
        assert group.record([result]) == ([], [])
    group.record(stepped(group, 7))
    assert group.record(stepped(group, 6, seq=1)) == ([], []), "not suspended any more"


def test_a_lone_sequence_skips_rounds_and_goes_on() -> None:
    group, [result] = opened(decides([suspend(), suspend()]))
    assert result.action == "suspend"
    for then in ("suspend", "sample"):
        assert group.begins_idle()
        [round_], [] = group.wake_idle()
        [result] = round_()
        assert result.action == then
        assert group.record([result]) == ([], [])
    assert result.wakes == 2
    assert not group.begins_idle()
    assert stepped(group, 5)[0].wakes == 0


def test_a_sampled_token_begins_the_count_of_idle_wakes_anew() -> None:
    kind = decides([suspend(), suspend(), go_on(), suspend(), suspend()])
    group, _ = opened(kind, Limits(idle_wakes=2))
    for _ in range(2):
        for _ in range(2):
            [round_], [] = group.wake_idle()
            results = round_()
            group.record(results)
        assert results[0].action == "sample"
        group.record(stepped(group, 5))
    assert group.wake_idle() == ([], [])


def test_a_group_that_has_ended_is_not_woken() -> None:
    group, _ = opened(decides([suspend()]))
    assert group.begins_idle()
    group.end()
    assert group.wake_idle() == ([], [])
    group.close()


def test_sequences_that_only_wake_each_other_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    class PingPong(Pair):
        def waits(self) -> Decision:
            self.vars.append("turn", "x")
            return suspend()

        acts = waits

    monkeypatch.setattr(sequence_group, "MAX_WAKES", 50)
    group, _ = opened(PingPong)
    rounds, failed = group.record([*stepped(group, 5), *stepped(group, 6, seq=1)])
    for _ in range(60):
        if failed:
            break
        results = [result for round_ in rounds for result in round_()]
        rounds, failed = group.record(results)
    assert all("woke each other" in (r.error or "") for r in failed)


def test_more_forks_than_are_allowed_end_the_sequence_that_wants_them_and_no_other() -> None:
    group, results = opened(decides([fork(3), fork(3)]), Limits(forks=4))
    assert [r.seq for r in results if r.action == "sample"] == [0, 1, 2]
    [failed] = stepped(group, 5)
    assert "the fork into 2 more sequences would give this request 5" in (failed.error or "")
    group.record([failed])
    assert [r.action for r in stepped(group, 5, seq=1)] == ["error"]
    assert group._sequences


def test_a_sequence_that_the_model_does_not_have_is_not_played() -> None:
    group, _ = opened(decides())
    assert group.step(3, [5], False, None) is None
    found = group.step(0, [5], False, None)
    assert found is not None
    assert group.step(0, [6], False, None) is None, "its round has not ended"
    group.record(found[1]())
    assert group.step(0, [6], False, None) is not None


def test_a_group_that_is_closed_keeps_a_sequence_until_its_round_has_ended() -> None:
    group, _ = opened(Pair)
    found = group.step(0, [5], False, None)
    assert found is not None
    group.close()
    assert group._sequences
    assert group.record(found[1]()) == ([], [])
    assert not group._sequences


def test_nothing_is_made_of_a_number_of_forks_before_it_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    monkeypatch.setattr(sequence_group, "lineage_of_fork", lambda *which: made.append(which[2]))
    _, results = opened(decides([fork(2_000_000)]))
    assert [r.action for r in results] == ["error"]
    assert "the fork into 1999999 more sequences would give this request 2000000" in (
        results[0].error or ""
    )
    assert not made


@pytest.mark.parametrize(
    "order",
    [(0, 1, 0, 1025), (1, 0, 1025, 0), (1, 1025, 0, 0), (0, 0, 1, 1025)],
)
def test_the_numbers_of_forks_do_not_depend_on_which_sequence_forks_first(
    order: tuple[int, ...],
) -> None:
    """Sampling, controllers and clients use the number of a sequence, so a request that runs again
    must number its forks as before."""
    group, results = opened(decides([fork(2)] * 9))
    assert [result.children for result in results] == [[1], [], []]
    made: dict[int, list[list[int]]] = {}
    for seq in order:
        results = stepped(group, 5, seq=seq)
        group.record(results)
        made.setdefault(seq, []).append(results[0].children)
    assert made == {0: [[2], [3]], 1: [[1025]], 1025: [[1025 * 1024 + 1]]}


def test_forks_of_forks_have_numbers_of_their_own_however_deep_they_are() -> None:
    group, results = opened(decides([fork(2)] * 60))
    seq, seen = 0, {0}
    for _ in range(50):
        [seq] = results[0].children
        assert 0 < seq < 2**32
        assert seq not in seen
        seen.add(seq)
        group.record(results)
        results = stepped(group, 5, seq=seq)


def test_a_group_whose_controller_is_being_made_may_be_closed() -> None:
    group = SequenceGroup(1, 9, Limits(), b"", 100, False, VariableStorage().apply)
    group.close()
    results = group.begin(PythonProgram(Pair), vocabulary(BYTES), [1])
    assert group.record(results) == ([], [])
    assert not group._sequences


# --- rows of masks --------------------------------------------------------------------------------


def path_of(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}#{os.fstat(descriptor).st_ino}"


@pytest.fixture
def file() -> Iterator[Callable[[int], tuple[MaskRows, mmap.mmap]]]:
    """Makes a file of this many rows; returns the controller worker's rows and the GPU worker's
    map."""
    descriptors = []

    def make(rows: int) -> tuple[MaskRows, mmap.mmap]:
        size = 4 * -(-SIZE // 32)
        descriptor = os.memfd_create("rows")
        descriptors.append(descriptor)
        os.ftruncate(descriptor, rows * size)
        made = MaskRows(path_of(descriptor), rows, size)
        return made, mmap.mmap(descriptor, rows * size)

    yield make
    for descriptor in descriptors:
        os.close(descriptor)


MakeRows = Callable[[int], tuple[MaskRows, mmap.mmap]]


def test_masks_are_written_where_the_gpu_worker_reads_them(file: MakeRows) -> None:
    rows, seen = file(4)
    group, _ = opened(decides([], [sample({1}), sample({2, 40})]))
    [result] = stepped(group, 5, rows=rows)
    assert result.attachment is None
    assert result.row is not None
    size = rows.row_bytes
    assert list(allowed(seen[result.row * size : (result.row + 1) * size], SIZE)) == [2, 40]


def test_sequences_without_a_row_send_their_masks(file: MakeRows) -> None:
    rows, _ = file(1)
    mid = [sample({seq}) for seq in range(1, 5)]
    group, _ = opened(decides([fork(3)], mid))
    results = [stepped(group, 5, seq=seq, rows=rows)[0] for seq in range(3)]
    assert [(r.row, r.attachment) for r in results] == [(0, None), (None, 0), (None, 0)]
    mask = group.mask(2)
    assert mask is not None
    assert list(allowed(mask, SIZE)) == [2]


def test_a_row_is_given_back_with_its_sequence(file: MakeRows) -> None:
    rows, _ = file(2)
    for _ in range(5):
        group, _ = opened(decides([fork(2)]))
        group.record([*stepped(group, 5, rows=rows), *stepped(group, 5, seq=1, rows=rows)])
        assert rows.take() is None
        group.close()
    assert {rows.take(), rows.take()} == {0, 1}


def test_no_row_is_given_to_two_threads(file: MakeRows) -> None:
    rows, _ = file(200)
    taken: list[int | None] = []
    threads = [
        threading.Thread(target=lambda: taken.extend(rows.take() for _ in range(100)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(row for row in taken if row is not None) == list(range(200))
    assert taken.count(None) == 200


def test_a_file_that_cannot_be_mapped_is_refused_and_its_masks_are_sent() -> None:
    files = MaskFiles()
    with open("/dev/null", "rb") as other:
        place = f"/proc/{os.getpid()}/fd/{other.fileno()}"
        for path in ("/proc/1/fd/99999#5", place, place + "#1", path_of(other.fileno())):
            assert files.get(path, 4, 4) is None
            assert files.get(path, 4, 4) is None


def test_another_file_at_the_same_place_is_not_taken_for_the_first() -> None:
    """A restarted GPU worker may have the same path for another file."""
    files, found = MaskFiles(), []
    descriptor = os.memfd_create("rows")
    for fill in range(2):
        new = os.memfd_create("rows")
        os.dup2(new, descriptor)
        os.close(new)
        os.ftruncate(descriptor, 64)
        rows = files.get(path_of(descriptor), 4, 16)
        assert rows is not None
        rows.view(0)[:] = bytes([fill + 1]) * 16
        found.append(os.pread(descriptor, 16, 0))
    os.close(descriptor)
    assert found == [bytes([1]) * 16, bytes([2]) * 16]


# --- answers --------------------------------------------------------------------------------------


class Answered:
    """The messages of a ``PendingResult`` that has this many parts."""

    def __init__(self, parts: int) -> None:
        self.results: list[Result] = []
        self.attachments: list[list[bytes]] = []
        self.woken: list[tuple[list[Round], list[StepResult]]] = []
        self.on_post: Callable[[], None] = lambda: None
        self.jobs: list[Job] = []
        self.pending = PendingResult(
            9, parts, self._post, self._woken, self._submit, threading.Lock()
        )

    def _post(self, frames: list[bytes]) -> None:
        word, header, body, *attachments = frames
        assert (word, decode_header(header).address) == (b"RESULT", 9)
        self.results.append(decode_as(Result, body, "msgpack"))
        self.attachments.append(attachments)
        self.on_post()

    def _submit(self, jobs: Iterable[Job], *, tenant: str) -> None:
        self.jobs += jobs

    def _woken(self, _: SequenceGroup, rounds: list[Round], failed: list[StepResult]) -> None:
        assert self.results or not (rounds or failed), "sequences woke before the RESULT"
        self.woken.append((rounds, failed))


def untold(kind: type[Controller]) -> tuple[SequenceGroup, list[StepResult]]:
    group = SequenceGroup(1, 9, Limits(), b"", 100, False, VariableStorage().apply)
    return group, group.begin(PythonProgram(kind), vocabulary(BYTES), [1])


def test_an_answer_is_one_message_when_its_last_part_is_there() -> None:
    answered = Answered(3)
    for token in (3, 4):
        answered.pending.add(*untold(decides([], [sample({token})])))
    assert not answered.results
    assert not answered.pending.complete
    answered.pending.add(*untold(decides()))
    assert answered.pending.complete
    [result] = answered.results
    assert [r.attachment for r in result.sequences] == [0, 1, None]
    assert [list(allowed(mask, SIZE)) for mask in answered.attachments[0]] == [[3], [4]]


def test_what_is_done_does_not_wait_for_ever_for_what_is_not() -> None:
    answered = Answered(2)
    answered.pending.add(*untold(decides()))
    assert not answered.pending.due(answered.pending._began)
    assert answered.pending.due(answered.pending._began + 1)
    answered.pending.flush()
    assert not answered.pending.due(answered.pending._began + 1)
    answered.pending.flush()
    assert len(answered.results) == 1
    assert not answered.pending.complete
    answered.pending.add(*untold(decides()))
    assert len(answered.results) == 2
    assert answered.pending.complete


def test_a_step_that_comes_at_once_finds_its_sequence_with_the_model() -> None:
    answered = Answered(1)
    group, results = untold(decides())
    found = []
    answered.on_post = lambda: found.append(group.step(0, [5], False, None))
    answered.pending.add(group, results)
    assert found[0] is not None
    [after] = found[0][1]()
    assert group.record([after]) == ([], [])
    assert group.step(0, [6], False, None) is not None


def test_nothing_of_a_group_that_was_closed_is_sent() -> None:
    answered = Answered(2)
    group, results = opened(decides([], [sample({3}), sample({4})]))
    group.close()
    answered.pending.add(*untold(decides()))
    answered.pending.add(group, results)
    [result] = answered.results
    assert len(result.sequences) == 1
    answered = Answered(1)
    answered.pending.add(group, results)
    assert not answered.results


# --- threads --------------------------------------------------------------------------------------


def test_quick_jobs_go_one_after_another_and_slow_ones_do_not_hold_them_up() -> None:
    pool = Pool(3)
    done: list[int] = []
    gate, over = threading.Event(), threading.Semaphore(0)

    def job(number: int) -> Callable[[], None]:
        def run() -> None:
            if number == 0:
                gate.wait(300)
            done.append(number)
            over.release()

        return run

    pool.submit([job(number) for number in range(5)])
    for _ in range(4):
        while not over.acquire(timeout=0.01):
            pool.help()
    # The order may differ, because several threads run the jobs.
    assert sorted(done) == [1, 2, 3, 4]
    assert pool.busy
    gate.set()
    assert over.acquire(timeout=300)
    assert done[-1] == 0


def test_a_job_that_fails_leaves_its_thread_for_the_next() -> None:
    pool = Pool(1)
    over = threading.Event()

    def fails() -> None:
        raise ZeroDivisionError

    pool.submit([fails, over.set])
    assert over.wait(300)


# --- vocabularies ---------------------------------------------------------------------------------


def test_a_vocabulary_is_asked_for_and_built_once_for_all_who_wait() -> None:
    asked: list[tuple[str, int]] = []
    vocabularies = Vocabularies(lambda fingerprint, gpu: asked.append((fingerprint, gpu)))
    came: list[TokenizerVocabulary | None] = []

    def then(found: TokenizerVocabulary | None, error: str) -> None:
        came.append(found)

    json = byte_level().to_str().encode()
    small, large = (VocabularyName(fingerprint="f", size=size, eos=[0]) for size in (400, 512))
    vocabularies.want(small, 1, then)
    vocabularies.want(small, 2, then)
    vocabularies.want(large, 2, then)
    assert came == []
    vocabularies.arrived("f", json, "")
    assert [found.size for found in came if found is not None] == [400, 400, 512]
    assert came[0] is came[1]
    count = len(asked)
    vocabularies.want(small, 3, then)
    assert came[3] is came[0]
    assert len(asked) == count


def test_models_of_one_tokenizer_may_have_different_special_tokens() -> None:
    vocabularies = Vocabularies(lambda fingerprint, gpu: None)
    came: list[int | None] = []

    def then(found: TokenizerVocabulary | None, error: str) -> None:
        assert found is not None
        came.append(found.special_token(SpecialToken.BOS))

    for special in ({"bos": 7}, {"bos": 8, "later": 1}, {"bos": 400}, {}):
        name = VocabularyName(fingerprint="f", size=400, eos=[0], special=special)
        vocabularies.want(name, 1, then)
    vocabularies.arrived("f", byte_level().to_str().encode(), "")
    assert came == [7, 8, None, None]


def test_who_waits_for_a_vocabulary_that_cannot_be_had_hears_why() -> None:
    vocabularies = Vocabularies(lambda fingerprint, gpu: None)
    heard: list[str] = []
    name = VocabularyName(fingerprint="f", size=400, eos=[])
    for json, error in ((None, "no such tokenizer"), (b"{}", "")):
        vocabularies.want(name, 1, lambda found, why: heard.append(why))
        vocabularies.arrived("f", json, error)
    assert heard[0] == "no such tokenizer"
    assert "cannot be used" in heard[1]


class Waits:
    """Requests that wait for a tokenizer, and a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.requested: list[int] = []
        self.outcomes: list[str] = []
        self.vocabularies = Vocabularies(
            lambda fingerprint, gpu: self.requested.append(gpu), lambda: self.now
        )

    def want(self, gpu: int, size: int = 400) -> None:
        name = VocabularyName(fingerprint="f", size=size, eos=[0])
        self.vocabularies.want(name, gpu, lambda found, why: self.outcomes.append(why))

    def retry(self, now: float) -> None:
        self.now = now
        self.vocabularies.retry()


def test_a_tokenizer_that_does_not_come_is_requested_again_from_the_latest_gpu_worker() -> None:
    waits = Waits()
    waits.want(gpu=1)
    waits.want(gpu=2)
    waits.retry(1.0)
    assert waits.requested == [1]
    waits.retry(2.5)
    assert waits.requested == [1, 2], "the first GPU worker may be gone"
    waits.vocabularies.arrived("f", byte_level().to_str().encode(), "")
    waits.retry(10.0)
    assert (waits.requested, waits.outcomes) == ([1, 2], ["", ""])


def test_requests_wait_for_a_tokenizer_for_a_bounded_time_and_leave_nothing() -> None:
    waits = Waits()
    waits.want(gpu=1)
    waits.retry(29.0)
    waits.want(gpu=2)
    waits.retry(31.0)
    assert waits.outcomes == ["the model's tokenizer did not arrive within 30 s"]
    waits.retry(60.0)
    assert len(waits.outcomes) == 2
    assert not waits.vocabularies._waiting
    assert not waits.vocabularies._requested


def test_only_the_vocabularies_that_were_used_last_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizers, "KEPT", 2)
    waits = Waits()
    for size in (400, 401, 400, 402):
        waits.want(gpu=1, size=size)
        waits.vocabularies.arrived("f", byte_level().to_str().encode(), "")
    assert [size for _, size, *_ in waits.vocabularies._built] == [400, 402]
