"""A controller that is replayed at another worker continues as if it had run there from the
beginning.

Streams are cut off after random events, some more than once, while the workers are ahead of the
client. Every token, mask, log, write, fork and end equals that of the undisturbed stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenbus.protocol.sampling import Distribution, Query
from tokenbus.protocol.worker_messages import Replay, StepResult, Variable, VariableAnswer
from tokenbus.workers.controller.backends.constraints import Constraints
from tokenbus.workers.controller.interface import Program
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.python import (
    Context,
    Controller,
    Decision,
    PythonProgram,
    ScriptProgram,
    append,
    fork,
    go_on,
    look,
    sample,
    splice,
    stop,
    suspend,
)
from tokenbus.workers.controller.sequence_group import SequenceGroup
from tokenbus.workers.controller.wasm.sandbox import make_engine
from tokenbus.workers.variables import VariableStorage

from ...counts import examples
from .played import WORDS, engine, vocabulary
from .replayed import PROMPT, WIDE, Stream
from .wasm.test_determinism import GUESTS
from .wasm.test_determinism import program as guest

pytestmark = pytest.mark.process

VOCABULARY = vocabulary(WORDS)
GRAMMAR = '%start list\n%%\nlist: item | list "," item;\nitem: "the cat" | "(" list ")";\n'


class Busy(Controller):
    """Forks, suspends until its forks have written, appends, drops tokens, and logs its rounds."""

    def __init__(self) -> None:
        self.role = "root"
        self.tokens = 0

    def pre_process(self) -> Decision:
        if self.role == "root" and self.tokens == 2:
            self.log("forks")
            return fork(3)
        if self.role == "judge":
            done = self.vars.read("done")
            if done is None or done.version < 2:
                return suspend()
            self.role = "writer"
            self.log("saw", done.value)
            return append([ord("!") + 1])
        if self.role == "writer" and self.tokens == 6:
            self.role = "again"
            self.log("forks again")
            return fork(2)
        return go_on()

    def mid_process(self, fork_group: list[int]) -> Decision:
        if len(fork_group) == 3:
            self.role = "judge" if self.seq == fork_group[0] else "worker"
        if self.role == "judge":
            return sample({5, 6, 7})
        if self.tokens == 4:
            self.tokens += 1
            return splice(1, [8, 9])
        return sample({token for token in range(5, 40) if token % 3 == self.tokens % 3})

    def post_process(self, tokens: list[int], backtrack: int) -> Decision:
        self.log(tokens, backtrack, end=";")
        self.tokens += 1
        if self.role == "worker" and self.tokens == 6:
            self.vars.append("done", f"{self.text(tokens)},")
            return stop()
        return go_on()


async def script(ctx: Context) -> None:
    """A script that forks and waits for what its fork has written."""
    await ctx.fixed("The ")
    word = await ctx.gen(regex="[a-z]{3}", max_tokens=4)
    ctx.log(f"chose {word}")
    if await ctx.fork(2) == 1:
        await ctx.fixed(" one ")
        ctx.vars["word"] = await ctx.gen(regex="[0-9]{2}", max_tokens=4)
        return
    found = await ctx.wait_var("word")
    await ctx.fixed(f" {found} ")
    await ctx.gen(choice=["the cat sat", "dog"])


class Case(NamedTuple):
    make: Callable[[], Program]
    arg: str = ""
    n: int = 1
    max_tokens: int = 24


@cache
def constraints(number: int) -> Constraints:
    """The constraints of one of two workers, which have separate masks and memories."""
    return Constraints(engine if number == 0 else make_engine(Limits()), folders[number])


folders: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def _workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folders[:] = [tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")]
    yield
    for number in range(2):
        constraints(number).close()
    constraints.cache_clear()
    guest_of.cache_clear()


@cache
def guest_of(name: str, number: int) -> Program:
    """A guest that is compiled for one of two workers."""
    return guest(name, make_engine(WIDE))


def constraint(name: str, number: int) -> Program:
    made = constraints(number).get(name)
    assert made is not None
    return made


CASES: dict[str, Callable[[int], Case]] = {
    "class": lambda _: Case(lambda: PythonProgram(Busy)),
    "class, n": lambda _: Case(lambda: PythonProgram(Busy), n=2),
    "script": lambda _: Case(lambda: ScriptProgram(script)),
    "regex": lambda i: Case(lambda: constraint("regex", i), "(the |a )?(cat|dog)( sat)*", 3),
    "choice": lambda i: Case(lambda: constraint("choice", i), '["the cat sat", "the dog"]'),
    "yacc": lambda i: Case(lambda: constraint("yacc", i), GRAMMAR, 2),
    "json_schema": lambda i: Case(
        lambda: constraint("json_schema", i),
        '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}}',
        2,
    ),
    **{
        f"Wasm {name}": lambda i, name=name: Case(  # type: ignore[misc]
            lambda: guest_of(name, i), GUESTS[name].arg
        )
        for name in GUESTS
    },
}


def stream(name: str, seed: int, worker: int = 0) -> Stream:
    case = CASES[name](worker)
    return Stream(case.make, VOCABULARY, case.arg, seed, case.max_tokens, case.n)


@settings(max_examples=examples(6))
@given(
    seed=st.integers(0, 1000),
    cuts=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 12)), min_size=1, max_size=3),
)
@pytest.mark.parametrize("name", CASES)
def test_a_stream_that_is_cut_off_and_replayed_ends_as_it_would_have(
    name: str, seed: int, cuts: list[tuple[int, int]]
) -> None:
    undisturbed = stream(name, seed).run()
    moved = stream(name, seed)
    moved.run(*cuts[0])
    moved.program = CASES[name](1).make
    for cut in cuts[1:]:
        if not moved.over:
            moved.resume(*cut)
    if not moved.over:
        moved.resume()
    assert moved.outcome() == undisturbed.outcome()


# --- replays that fail ----------------------------------------------------------------------------


def group_of(kind: type[Controller]) -> SequenceGroup:
    return SequenceGroup(1, 1, WIDE, b"", 50, False, VariableStorage().apply)


def replayed(group: SequenceGroup, kind: type[Controller], *told: Replay) -> list[StepResult]:
    """The results of a replay. Fails unless the replay pauses for other work at least once for each
    token, or the group is closed."""
    steps = group.begin_again(PythonProgram(kind), VOCABULARY, PROMPT, 1, list(told))
    stops = 0
    while True:
        try:
            next(steps)
            stops += 1
        except StopIteration as ended:
            assert stops >= sum(len(one.tokens) for one in told) or group.closed
            results: list[StepResult] = ended.value
            return results


class Even(Controller):
    """Samples even tokens, forks once after two tokens, and stops after five."""

    after = 0

    def pre_process(self) -> Decision:
        return fork(2) if self.after == 2 else stop() if self.after == 5 else go_on()

    def mid_process(self, fork_group: list[int]) -> Decision:
        self.after += self.after == 2
        return sample({4, 6, 8})

    def post_process(self, tokens: list[int], backtrack: int) -> Decision:
        self.after += 1
        return go_on()


class Thrice(Even):
    """Forks into three sequences."""

    def pre_process(self) -> Decision:
        return fork(3) if self.after == 2 else go_on()


class Looks(Controller):
    """Reads the distribution of each token before it samples."""

    looked = False

    def mid_process(self, fork_group: list[int]) -> Decision:
        self.looked = not self.looked
        return look(Query(1)) if self.looked else sample()

    def post_process(self, tokens: list[int], backtrack: int) -> Decision:
        if not tokens:
            [seen] = self.distributions
            self.log(list(seen.top))
        return go_on()


SEEN = Distribution(logprob=0.0, rank=0, entropy=1.0, top={7: -0.5})


def test_a_replay_reads_the_recorded_distributions() -> None:
    group = group_of(Looks)
    told = Replay(0, [0, 4, 0], distributions={0: SEEN, 2: SEEN})
    [result] = replayed(group, Looks, told)
    assert (result.action, result.logs) == ("sample", "[7]\n")
    assert group.record([result]) == ([], [])
    assert group.step(0, [8], False, None) is not None


class Asleep(Controller):
    def pre_process(self) -> Decision:
        return suspend()


@pytest.mark.parametrize(
    ("kind", "told", "failed", "says"),
    [
        (Even, [Replay(0, [4, 5])], [0], "after 1 of 2 sampled tokens it forbids token 5"),
        (
            Even,
            [Replay(0, [4, 6, 8])],
            [0],
            "after 2 of 3 sampled tokens it forks, but the first time",
        ),
        (Even, [Replay(0, [4, 6], [1, 2])], [0, 2], "it samples, but the first time it forked"),
        (Thrice, [Replay(0, [4, 6], [1])], [0, 1], "forks into 2 more sequences, but the first"),
        (
            Even,
            [Replay(0, [4], [1])],
            [0, 1],
            "after 1 of 1 sampled tokens it samples, but the first",
        ),
        (Even, [Replay(0, [4, 6, 4, 4, 4], [1])], [0], "after 4 of 5 sampled tokens it stops"),
        (Even, [Replay(0, [4], ended=True), Replay(7, [4])], [7], "it does not create sequence 7"),
        (Looks, [Replay(0, [4])], [0], "it reads a distribution, but the first time it sampled"),
        (
            Even,
            [Replay(0, [0], distributions={0: SEEN})],
            [0],
            "it samples, but the first time it read a distribution",
        ),
        (Asleep, [Replay(0, [4])], [0], "after 0 of 1 sampled tokens it stays suspended"),
    ],
)
def test_a_controller_that_decides_otherwise_than_the_first_time_fails_and_says_where(
    kind: type[Controller], told: list[Replay], failed: list[int], says: str
) -> None:
    children = [Replay(seq, []) for seq in failed if seq and len(told) == 1]
    group = group_of(kind)
    results = replayed(group, kind, *told, *children)
    errors = [result for result in results if result.action == "error"]
    assert [result.seq for result in errors] == failed
    assert says in (errors[0].error or "")
    assert errors[0].code == "controller_failed"
    group.record(results)
    assert not any(seq in group._sequences for seq in failed)


def test_what_has_ended_is_run_for_its_forks_only() -> None:
    group = group_of(Even)
    told = [Replay(0, [4, 6], [3], ended=True), Replay(3, [8])]
    [result] = replayed(group, Even, *told)
    assert (result.seq, result.action) == (3, "sample")
    assert list(group._sequences) == [3]
    assert group.record([result]) == ([], [])
    assert group.step(3, [8], False, None) is not None


def test_a_fork_that_was_not_applied_has_its_number_and_is_sent_with_its_results() -> None:
    group = group_of(Even)
    results = replayed(group, Even, Replay(0, [4, 6]), Replay(5, [4], ended=True))
    assert [(r.seq, r.action, r.children) for r in results] == [
        (0, "fork", [1]),
        (0, "sample", []),
        (1, "sample", []),
    ]


def test_after_a_replay_calls_have_their_usual_limits_and_masks_their_rows() -> None:
    group = group_of(Even)
    group.record(replayed(group, Even, Replay(0, [4, 6], [1]), Replay(1, [])))
    assert [s.host.limits for s in group._sequences.values()] == [WIDE, WIDE]


def test_a_request_that_ends_while_it_is_replayed_is_freed() -> None:
    group = group_of(Even)
    steps = group.begin_again(PythonProgram(Even), VOCABULARY, PROMPT, 1, [Replay(0, [4, 6])])
    next(steps)
    group.close()
    with pytest.raises(StopIteration) as ended:
        next(steps)
    assert group.record(ended.value.value) == ([], [])
    assert not group._sequences


def test_operations_are_named_by_the_path_of_forks_whatever_numbers_they_have() -> None:
    class Writes(Controller):
        """Writes in each round, and forks after token 4."""

        token = 0

        def pre_process(self) -> Decision:
            return fork(2) if self.token == 4 else go_on()

        def mid_process(self, fork_group: list[int]) -> Decision:
            self.token = 0
            return sample()

        def post_process(self, tokens: list[int], backtrack: int) -> Decision:
            self.token = tokens[0]
            self.vars["a"] = "b"
            return go_on()

    def named(order: list[int]) -> dict[tuple[int, ...], list[int]]:
        """The lineages of the operations of each sequence, by the path of the sequence."""
        paths: dict[int, tuple[int, ...]] = {0: ()}
        names: dict[tuple[int, ...], list[int]] = {}
        storage = VariableStorage()

        def perform(operation: Variable) -> VariableAnswer:
            names.setdefault(paths[now], []).append(operation.lineage)
            return storage.apply(operation)

        group = SequenceGroup(1, 1, WIDE, b"", 50, False, perform)
        group.record(group.begin(PythonProgram(Writes), VOCABULARY, PROMPT))
        for turn in order:
            # ``turn`` is the position of a sequence in the order of paths.
            now = sorted(paths, key=paths.__getitem__)[turn]
            stepped = group.step(now, [4], False, None)
            assert stepped is not None
            results = stepped[1]()
            for result in results:
                for child in result.children:
                    mine = sum(path[:-1] == paths[now] for path in paths.values() if path)
                    paths[child] = (*paths[now], mine)
            group.record(results)
        return names

    first, second = named([0, 0, 1, 0]), named([0, 1, 0, 0])
    assert first.keys() == second.keys()
    for path in first:
        assert set(first[path]) == set(second[path]), path
    lineages = [lineage for names in first.values() for lineage in set(names)]
    assert len(set(lineages)) == len(first)
    assert set(first[()]) == {0}
