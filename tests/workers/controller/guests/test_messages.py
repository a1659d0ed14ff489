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


MILLION = [1] * 1_000_000
DECIDED = [1, [1, 1], [6, 0, b"", False, None, b"", 0, None, None, False, b"", []]]


def changed(place: int, value: object) -> list[object]:
    """An outcome whose mid_process has ``value`` at the position ``place`` of its answer."""
    mid: Any = list(DECIDED[2])  # type: ignore[call-overload]
    mid[place] = value
    return [*DECIDED[:2], mid]


@pytest.mark.parametrize(
    "message",
    [
        ["done", [changed(2, MILLION)]],
        ["done", [changed(11, [MILLION])]],
        ["done", [changed(7, [0, [], MILLION])]],
        ["done", [changed(8, [None, None, None, MILLION])]],
        ["done", [[*DECIDED, None, b"", 0, False, False, MILLION]]],
        ["done", [], 0.0, MILLION],
        ["done", [None] * 1000],
        ["asked", 1, "get", "x", b"", None, MILLION],
    ],
)
def test_an_answer_of_many_values_is_refused(message: list[object]) -> None:
    """The other threads of the worker wait while it decodes an answer. 60 MiB of numbers took 3 s
    and 1 GB."""
    with pytest.raises(msgspec.ValidationError):
        decode_from_guest(encode(message))


def test_a_valid_answer_is_decoded() -> None:
    done = decode_from_guest(encode(["done", [DECIDED, None], 0.5]))
    assert isinstance(done, Done)
    assert done.items[1] is None
