"""Rounds have the same results in a batch as alone, and no round is lost if another round fails."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tokenbus.workers.controller.host import allowed

from ...worlds.controller_rounds import GROUPS, SIZE, World
from .played import EOS, WORDS

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("constraint", "arg"),
    [
        ("regex", "(the |cat|dog|[a-f]{1,3} )+"),
        ("regex", "(ca|cat|AB)(bcD)?(the cat)*[x-z]{2}"),
        ("yacc", '%start e %% e: t | e "+" t; t: "a" | "b" | "(" e ")" | "cat";'),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_rounds_in_a_batch_give_what_they_give_alone(constraint: str, arg: str, seed: int) -> None:
    chosen = random.Random(seed)
    together, alone = World(constraint, arg), World(constraint, arg)
    alone.batches_nothing()
    masks = {
        request: list(allowed(group.mask(0) or b"", SIZE))
        for request, group in together.groups.items()
    }
    live, rounds = set(together.groups), 0
    while live:
        tokens: dict[int, Sequence[int]] = {}
        for request in sorted(live):
            # Sometimes the token may be refused, or ends the sequence, or the sequence gets no
            # token.
            pick = chosen.random()
            if pick < 0.02:
                tokens[request] = [chosen.randrange(1, SIZE)]
            elif pick < 0.04:
                tokens[request] = [EOS]
            elif pick < 0.9:
                words = [token for token in masks[request] if token != EOS]
                tokens[request] = [chosen.choice(words or [EOS])]
        if not tokens:
            continue
        ended = {request for request in tokens if chosen.random() < 0.01}
        ours, theirs = together.step(tokens, ended), alone.step(tokens, ended)
        assert ours == theirs
        assert together.masks == alone.masks
        rounds += len(ours)
        masks.update(together.masks)
        live -= {one.request for one in ours if one.action in ("stop", "error")}
        for one in ours:
            if one.action == "sample":
                group = together.groups[one.request]
                length = group._sequences[0].length
                assert length == alone.groups[one.request]._sequences[0].length
    assert rounds > 2 * GROUPS
    assert together.meter.rounds == alone.meter.rounds == rounds
    assert together.meter.cpu_s > 0


def test_usual_rounds_are_one_call_and_others_are_run_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World("regex", "[a-f]{30}", 200)
    guest, batched = world.controller._guest, []
    rounds = guest.rounds

    def counted(turns: Sequence[tuple[int, int]], masks: Sequence[memoryview]) -> list[bool]:
        done = rounds(turns, masks)
        batched.append((len(turns), sum(done)))
        return done

    monkeypatch.setattr(guest, "rounds", counted)
    a, not_allowed = WORDS.index(b"a"), WORDS.index(b"x")
    every: dict[int, Sequence[int]] = {request: [a] for request in world.groups}
    world.step(every)  # Each round runs alone, and computes the masks after one letter.
    world.step(every)
    later = world.step(every)
    assert {one.action for one in later} == {"sample"}
    assert batched[0] == (GROUPS, 0)
    batched.clear()
    for request in (1, 2):
        every[request] = [not_allowed]
    results = world.step(every)
    assert [one.action for one in results] == ["error"] * 2 + ["sample"] * (GROUPS - 2)
    assert "does not allow the tokens" in (results[0].error or "")
    assert [count for count, _ in batched] == [GROUPS]
    assert world.num_jobs == 1, "one thread runs all rounds of an instance"


def test_each_sequence_of_a_guest_that_fails_gets_the_error() -> None:
    world = World("regex", "[a-f]{30}", 200)
    a = WORDS.index(b"a")
    every: dict[int, Sequence[int]] = {request: [a] for request in world.groups}
    world.step(every)
    world.controller._guest.dead = True
    results = world.step(every)
    assert [one.action for one in results] == ["error"] * GROUPS
    assert {one.error for one in results} == {"the grammar failed for another sequence; try again"}
