"""Each chosen attack of the table ends as expected, and the other tenant's streams do not
change."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from .attack import Attack
from .attacks import ATTACKS
from .world import HostileWorld, hostile_world

pytestmark = pytest.mark.process

CHOSEN = ATTACKS if os.environ.get("ATTACKS") == "all" else ATTACKS[::3]
"""The attacks that run: every third attack, or all attacks with ``make test-hostile``."""


@pytest.fixture(scope="module")
def world(processes: None) -> Iterator[HostileWorld]:
    with hostile_world(short=True) as world:
        yield world


def test_names_are_unique() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 60


@pytest.mark.parametrize("attack", CHOSEN, ids=lambda attack: attack.name)
def test_an_attack_harms_only_its_own_request(world: HostileWorld, attack: Attack) -> None:
    outcome = world.run(attack)
    assert not attack.expected.problem(outcome)
    world.calm.wait_for_streams()
    assert not world.problems()
