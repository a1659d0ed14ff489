"""The rule that decides which worker's copy of a stream is right, for all small cases."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product
from typing import Any

import pytest
from tokenbus.broker.lifecycle import RequestState
from tokenbus.broker.reconcile import (
    Known,
    Progress,
    Verdict,
    is_behind,
    judge,
    judge_return,
)
from tokenbus.protocol.worker_messages import Journal

PROGRESS = [Progress(moves, entries) for moves, entries in product(range(3), repeat=2)]
UNKNOWN = Known(
    awaited=True,
    cancelled=False,
    other=None,
    attached=False,
    over=False,
    client=None,
    complete=False,
    reused=False,
)


def after(reports: tuple[tuple[Progress, bool], ...], known: Known) -> set[Progress]:
    """The copies that no worker has to drop after these reports. Each report is a copy, and whether
    it has ended."""
    stays: set[Progress] = set()
    for copy, ended in reports:
        verdict = judge(copy, ended, known)
        if verdict is Verdict.ADOPT:
            known, stays = replace(known, other=copy), {copy}
        elif verdict is Verdict.IGNORE:
            stays.add(copy)
    return stays


@pytest.mark.parametrize("client", [None, *PROGRESS])
def test_the_order_of_the_reports_does_not_decide(client: Progress | None) -> None:
    known = replace(UNKNOWN, client=client)
    copies = list(product(PROGRESS, (False, True)))
    for three in product(copies, repeat=3):
        if len({copy for copy, _ in three}) < 3:
            continue
        right = [c for c, e in three if client is None or not is_behind(c, e, client)]
        expected = {max(right)} if right else set()
        assert all(after(order, known) == expected for order in permutations(three))


@pytest.mark.parametrize("field", ["cancelled", "attached", "over", "complete", "reused"])
def test_what_the_broker_knows_better_is_not_replaced(field: str) -> None:
    better: dict[str, Any] = {field: True}
    for copy, other in product(PROGRESS, (None, *PROGRESS)):
        known = replace(UNKNOWN, other=other, **better)
        assert judge(copy, False, known) is Verdict.DROP


def test_a_copy_that_nobody_awaits_is_dropped() -> None:
    assert judge(PROGRESS[0], False, replace(UNKNOWN, awaited=False)) is Verdict.DROP


def test_the_same_end_may_be_reported_twice() -> None:
    for copy in PROGRESS:
        for known in (replace(UNKNOWN, other=copy), replace(UNKNOWN, over=True)):
            assert judge(copy, True, known) is Verdict.IGNORE
            assert judge(copy, False, known) is Verdict.DROP


@pytest.mark.parametrize("state", RequestState)
@pytest.mark.parametrize(("gone", "ended"), [(False, False), (False, True), (True, False)])
def test_a_copy_at_the_worker_that_has_the_request(
    state: RequestState, gone: bool, ended: bool
) -> None:
    for routed, copy in product(PROGRESS, PROGRESS):
        said = Journal(type="GENERATE", moves=copy.moves, ended=ended, gone=gone)
        verdict = judge_return(state, routed, said, copy.entries)
        if state is RequestState.ENDED:
            assert verdict is (Verdict.FORGET if gone or ended else Verdict.IGNORE)
        elif state is not RequestState.RETURNING:
            assert verdict is Verdict.IGNORE
        elif gone:
            assert verdict is Verdict.MOVE
        else:
            continues = copy.moves == routed.moves and copy.entries >= routed.entries
            assert verdict is (Verdict.CONTINUE if continues else Verdict.INCONSISTENT)
