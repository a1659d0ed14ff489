"""A guest process that was taken over can send any message. The worker refuses a message that would
harm other tenants."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from tokenbus.workers.controller.guests.messages import (
    Asked,
    Done,
    MidAnswer,
    Outcome,
    PreAnswer,
    decode_from_guest,
    encode,
)


@pytest.mark.parametrize("cpu_s", [-1e9, math.nan, math.inf])
def test_cpu_time_that_would_raise_the_share_of_a_tenant_is_refused(cpu_s: float) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_from_guest(encode(Done([], cpu_s)))


@pytest.mark.parametrize(
    ("what", "name"), [("get", "x" * 257), ("drop", "x")], ids=["a long name", "another operation"]
)
def test_an_operation_that_a_guest_cannot_make_is_refused(what: Any, name: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_from_guest(encode(Asked(1, what, name)))


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(pre=PreAnswer(1, count=2**63)),
        Outcome(mid=MidAnswer(1, backtrack=2**63)),
        Outcome(mid=MidAnswer(1, pairs=2**63)),
        Outcome(dropped=-1),
    ],
)
def test_numbers_that_do_not_fit_are_refused(outcome: Outcome) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_from_guest(encode(Done([outcome])))
